# SPDX-License-Identifier: Apache-2.0
"""The data by which one body of code (cuda_shaped) serves CUDA and every runtime that is shaped like it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hetccl.vendors.nccl_shape import Status

__all__ = ["CUDA_STATUSES", "CudaShape", "KernelCompiler", "Memory", "ModuleLoader"]


class Memory(enum.IntEnum):
    """Whose memory a pointer is, as the device table counts."""

    HOST = 0  # ordinary, pinned or unknown to the runtime: the device copies from and to it
    DEVICE = 1
    MANAGED = 2  # of all devices


# Result codes that mean more than "the runtime failed". CUDA's and HIP's agree in these.
CUDA_STATUSES: Mapping[int, Status] = MappingProxyType(
    {0: Status.OK, 1: Status.INVALID, 2: Status.NO_MEMORY, 600: Status.IN_PROGRESS, 801: Status.UNSUPPORTED}
)


@dataclass(frozen=True)
class ModuleLoader:
    """Where compiled kernels are loaded and launched: three functions, with the same arguments in all runtimes."""

    libraries: tuple[str, ...]  # empty: the runtime's own
    load_data: str  # (module *, image) -> code
    get_function: str  # (function *, module, name) -> code
    launch: str  # (function, grid xyz, block xyz, shared, stream, arguments **, extra **) -> code


@dataclass(frozen=True)
class KernelCompiler:
    """The vendor's compiler for kernels at run time. Calls are shaped alike: create, compile, log, code, destroy."""

    libraries: tuple[str, ...]
    prefix: str  # "nvrtc": nvrtcCreateProgram ...
    get_code: str  # with its size under the same name and "Size": "nvrtcGetCUBIN"
    options: tuple[str, ...]  # "{arch}" is the device's
    folders: tuple[str, ...] = ()  # below each folder of Python packages, where wheels put the library
    companions: str = ""  # pattern of files beside the library that it opens by bare name, so they come first


@dataclass(frozen=True)
class CudaShape:
    """How one runtime differs from the rest of the family. The defaults are CUDA's.

    Functions are named by CUDA's words without prefix: "MemcpyAsync".
    """

    name: str  # for messages: "CUDA"
    libraries: tuple[str, ...]  # full paths or sonames, tried in this order
    prefix: str  # of every symbol: "cuda"
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # call -> full names, tried in order
    missing: frozenset[str] = frozenset()  # calls that are there in name only: never looked up
    statuses: Mapping[int, Status] = field(default_factory=lambda: CUDA_STATUSES)
    invalid_is_host: bool = False  # PointerGetAttributes refuses memory that it does not know
    # From which version of the runtime on: its numbers of memory types.
    memory_types: Mapping[int, Mapping[int, Memory]] = field(
        default_factory=lambda: {0: {0: Memory.HOST, 1: Memory.HOST, 2: Memory.DEVICE, 3: Memory.MANAGED}}
    )
    folders: tuple[str, ...] = ()  # below each folder of Python packages, where wheels put the library
    loader: ModuleLoader | None = None
    compiler: KernelCompiler | None = None
    remedy: str = ""  # what the user can do if the library does not open
