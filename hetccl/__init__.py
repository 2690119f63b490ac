# SPDX-License-Identifier: Apache-2.0
"""Collectives over ranks whose accelerators are of different vendors.

    import hetccl

    with hetccl.init() as comm:          # RANK, WORLD_SIZE and HETCCL_STORE say who takes part
        comm.all_reduce(array)           # in place, sum

Importing this package opens no vendor library; a communicator opens the one of its rank.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hetccl import errors
from hetccl.errors import (
    AbortedError,
    ClosedError,
    ConfigError,
    HetcclError,
    InternalError,
    MismatchError,
    PeerLostError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    PluginVersionError,
    TimedOutError,
    TransportError,
    UnsupportedError,
    UsageError,
    VendorError,
)
from hetccl.types import DType, Op, RedOp

if TYPE_CHECKING:
    from hetccl.core.batch import Recv, Send
    from hetccl.core.communicator import Communicator
    from hetccl.core.start import init
    from hetccl.core.work import Work

__version__ = "0.1.0"  # the only place: pyproject.toml reads it

# Versions promise these names and no others.
__all__ = [
    "AbortedError",
    "ClosedError",
    "Communicator",
    "ConfigError",
    "DType",
    "HetcclError",
    "InternalError",
    "MismatchError",
    "Op",
    "PeerLostError",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginVersionError",
    "Recv",
    "RedOp",
    "Send",
    "TimedOutError",
    "TransportError",
    "UnsupportedError",
    "UsageError",
    "VendorError",
    "Work",
    "__version__",
    "errors",
    "get_include",
    "init",
]

# Loaded at first use, so that `import hetccl` stays cheap for tools that only ask for its version or its headers.
_LAZY = {
    "Communicator": "hetccl.core.communicator",
    "init": "hetccl.core.start",
    "Recv": "hetccl.core.batch",
    "Send": "hetccl.core.batch",
    "Work": "hetccl.core.work",
}


def get_include() -> str:
    """Folder to pass to a C compiler so that `#include "hetccl/spi.h"` is found."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hetccl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
