# SPDX-License-Identifier: Apache-2.0
"""What this torch can do, found by trying. Versions are only compared to warn about one that nobody has tried."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

__all__ = ["HAS_PYTHON_BACKEND", "premul_factor", "warn_if_untried"]

TRIED = ("2.13", "2.14")  # what the tests have run with
_warned: set[str] = set()


def _can_subclass_backend() -> bool:
    """True if a Python class can be a c10d back end (torch 2.14 and newer). Older ones have no constructor."""

    class Probe(c10d.Backend):
        def __init__(self) -> None:
            c10d.Backend.__init__(self, 0, 1)

    try:
        Probe()
    except TypeError:
        return False
    return True


HAS_PYTHON_BACKEND: bool = _can_subclass_backend()


def premul_factor(op: Any) -> Any:
    """Factor of a PREMUL_SUM operator, a float or a tensor."""
    if hasattr(op, "factor"):
        return op.factor
    return op.__getstate__()[1]


def warn_if_untried() -> None:
    """Warns once a process if this torch is not one that hetccl was run with."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in TRIED and version not in _warned:
        _warned.add(version)
        tried = ", ".join(TRIED)
        warnings.warn(f"hetccl has not been tried with torch {torch.__version__} (tried: {tried})", stacklevel=3)
