# SPDX-License-Identifier: Apache-2.0
"""Reads DLPack capsules, the exchange format of array libraries (https://dmlc.github.io/dlpack), with ctypes."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from hetccl.errors import UnsupportedError, UsageError
from hetccl.types import DType

if TYPE_CHECKING:
    from hetccl.core.buffers import Buffer

__all__ = ["take_dlpack"]

_HOST = (1, 3, 11, 13)  # device types whose memory the host can reach: CPU, pinned for CUDA or ROCm, managed
_NAME = b"dltensor"
_TYPES = {  # (code, bits)
    (0, 8): DType.INT8, (0, 16): DType.INT16, (0, 32): DType.INT32, (0, 64): DType.INT64,
    (1, 8): DType.UINT8, (1, 16): DType.UINT16, (1, 32): DType.UINT32, (1, 64): DType.UINT64,
    (2, 16): DType.FLOAT16, (2, 32): DType.FLOAT32, (2, 64): DType.FLOAT64, (4, 16): DType.BFLOAT16,
    (5, 64): DType.COMPLEX64, (5, 128): DType.COMPLEX128, (6, 8): DType.BOOL,
}  # fmt: skip


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def take_dlpack(array: Any, writable: bool, what: str) -> Buffer:
    """The memory behind `array.__dlpack__()`. Only contiguous memory: DLPack offers no way to copy back."""
    from hetccl.core.buffers import Buffer

    capsule = array.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # The capsule is kept, not consumed: its owner frees the tensor when the capsule goes.
    tensor = _Tensor.from_address(get(capsule, _NAME))
    key = (tensor.dtype.code, tensor.dtype.bits)
    if key not in _TYPES or tensor.dtype.lanes != 1:
        raise UnsupportedError(f"{what}: no path supports DLPack type code {key[0]} of {key[1]} bits")
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    if tensor.strides:
        expected = 1
        for i in reversed(range(tensor.ndim)):
            if shape[i] != 1 and tensor.strides[i] != expected and math.prod(shape):
                raise UsageError(f"{what} is not contiguous; pass a contiguous array")
            expected *= shape[i]
    kind = tensor.device.type
    place = "" if kind in _HOST else f"a device (DLPack device type {kind})"
    return Buffer((tensor.data or 0) + tensor.byte_offset, math.prod(shape), _TYPES[key], (array, capsule), place=place)
