# SPDX-License-Identifier: Apache-2.0
"""HIP's runtime and RCCL as data: names, numbers and what differs between versions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hetccl.types import DType, RedOp
from hetccl.vendors.cuda_shape import CudaShape, KernelCompiler, Memory, ModuleLoader
from hetccl.vendors.nccl_shape import Caps, NcclShape, Result, Status

__all__ = ["RCCL", "RUNTIME"]

_VERSIONS = ("7", "6", "5")  # of ROCm, newest first; what the process has loaded already comes before all

RUNTIME = CudaShape(
    name="HIP",
    libraries=tuple(f"libamdhip64.so.{version}" for version in _VERSIONS),
    prefix="hip",
    spellings={
        "HostAlloc": ("hipHostMalloc",),
        "FreeHost": ("hipHostFree",),
        # The plain name keeps the struct of ROCm 5 in some versions; both begin alike.
        "PointerGetAttributes": ("hipPointerGetAttributes",),
    },
    invalid_is_host=True,
    memory_types={
        0: {0: Memory.HOST, 1: Memory.DEVICE, 4: Memory.MANAGED},
        60000000: {0: Memory.HOST, 1: Memory.HOST, 2: Memory.DEVICE, 3: Memory.MANAGED, 11: Memory.MANAGED},
    },
    loader=ModuleLoader((), "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel"),
    compiler=KernelCompiler(
        libraries=tuple(f"libhiprtc.so.{version}" for version in _VERSIONS),
        prefix="hiprtc",
        get_code="hiprtcGetCode",
        options=("--offload-arch={arch}", "-ffp-contract=off"),
    ),
    remedy="Install ROCm, or PyTorch for ROCm",
)

_RESULTS: Mapping[int, Result] = MappingProxyType(
    {
        0: Result(Status.OK, "success"),
        1: Result(Status.VENDOR, "unhandled HIP error"),
        2: Result(Status.SYSTEM, "unhandled system error"),
        3: Result(Status.VENDOR, "internal error"),
        4: Result(Status.INVALID, "invalid argument"),
        5: Result(Status.INVALID, "invalid usage"),
        6: Result(Status.PEER_LOST, "remote error"),
        7: Result(Status.IN_PROGRESS, "in progress"),
        8: Result(Status.TIMED_OUT, "timeout"),
    }
)
_INTEGERS = (DType.INT8, DType.UINT8, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64)

RCCL = NcclShape(
    name="RCCL",
    libraries=("librccl.so.1",),
    prefix="nccl",  # RCCL exports NCCL's names, so it must never be loaded globally beside it
    results=_RESULTS,
    spellings={"AllToAll": ("ncclAlltoAll", "ncclAllToAll")},
    missing=frozenset({"CommFinalize"}),
    init_in_thread=True,
    caps=Caps.ABORT | Caps.STREAM_ORDERED | Caps.MULTI_COMM | Caps.GROUP | Caps.IN_PLACE,
    not_reduced=frozenset((dtype, RedOp.AVG) for dtype in _INTEGERS),
    remedy="Install ROCm's rccl, or PyTorch for ROCm",
)
