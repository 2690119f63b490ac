# SPDX-License-Identifier: Apache-2.0
"""CUDA's runtime and NCCL as data: names, numbers and where wheels put the files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hetccl.types import DType, RedOp
from hetccl.vendors.cuda_shape import CudaShape, KernelCompiler, ModuleLoader
from hetccl.vendors.nccl_shape import Caps, NcclShape, Result, Status

__all__ = ["NCCL", "NCCL_FOLDERS", "RUNTIME"]

_VERSIONS = ("13", "12")  # of CUDA, newest first; what the process has loaded already comes before either
_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib", "nvidia/cuda_nvrtc/lib")
NCCL_FOLDERS = ("nvidia/nccl/lib",)

RUNTIME = CudaShape(
    name="CUDA",
    libraries=(*(f"libcudart.so.{version}" for version in _VERSIONS), "libcudart.so.11.0"),
    prefix="cuda",
    folders=_FOLDERS,
    loader=ModuleLoader(("libcuda.so.1",), "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"),
    compiler=KernelCompiler(
        libraries=(*(f"libnvrtc.so.{version}" for version in _VERSIONS), "libnvrtc.so.11.2"),
        prefix="nvrtc",
        get_code="nvrtcGetCUBIN",
        options=("--gpu-architecture=sm_{arch}", "--fmad=false", "--ftz=false", "--prec-div=true"),
        folders=_FOLDERS,
        companions="libnvrtc-builtins.so.*[0-9]",
    ),
    remedy="Install PyTorch for CUDA, or `pip install nvidia-cuda-runtime`",
)

_RESULTS: Mapping[int, Result] = MappingProxyType(
    {
        0: Result(Status.OK, "success"),
        1: Result(Status.VENDOR, "unhandled CUDA error"),
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

NCCL = NcclShape(
    name="NCCL",
    libraries=("libnccl.so.2",),
    prefix="nccl",
    results=_RESULTS,
    spellings={"AllToAll": ("ncclAlltoAll", "ncclAllToAll")},
    missing=frozenset({"CommFinalize"}),  # CommDestroy does the same; both wait for the other ranks of the host
    init_in_thread=True,  # it blocks until all ranks have come; a deadline needs somebody who does not
    caps=Caps.ABORT | Caps.STREAM_ORDERED | Caps.MULTI_COMM | Caps.GROUP | Caps.IN_PLACE,
    # Of integers hetccl sums and then divides toward zero: the same on every vendor.
    not_reduced=frozenset((dtype, RedOp.AVG) for dtype in _INTEGERS),
    remedy="Install PyTorch for CUDA, or `pip install nvidia-nccl-cu13`",
)
