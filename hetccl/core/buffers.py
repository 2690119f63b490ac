# SPDX-License-Identifier: Apache-2.0
"""Takes arrays of any library by the protocols they offer, without importing the library.

NumPy arrays (`__array_interface__`), torch tensors, anything with `__cuda_array_interface__`, DLPack or the buffer
protocol. What is not contiguous is copied, and an output is copied back when the operation has ended.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetccl.errors import UnsupportedError, UsageError
from hetccl.types import DType

__all__ = ["Buffer", "check_overlap", "take"]

_BY_TYPESTR = {
    "i1": DType.INT8, "u1": DType.UINT8, "i2": DType.INT16, "u2": DType.UINT16, "i4": DType.INT32, "u4": DType.UINT32,
    "i8": DType.INT64, "u8": DType.UINT64, "f2": DType.FLOAT16, "f4": DType.FLOAT32, "f8": DType.FLOAT64,
    "b1": DType.BOOL, "c8": DType.COMPLEX64, "c16": DType.COMPLEX128,
}  # fmt: skip
_BY_FORMAT = {
    "b": DType.INT8, "B": DType.UINT8, "c": DType.UINT8, "h": DType.INT16, "H": DType.UINT16,
    "i": DType.INT32, "I": DType.UINT32,
    "e": DType.FLOAT16, "f": DType.FLOAT32, "d": DType.FLOAT64, "?": DType.BOOL,
}  # fmt: skip
_BY_NAME = {d.label: d for d in DType} | {"half": DType.FLOAT16, "float": DType.FLOAT32, "double": DType.FLOAT64}


@dataclass
class Buffer:
    """Contiguous memory of `count` elements. `finish` copies back into a strided original; `keep` holds the memory;
    `place` says whose memory it is, "" for the host's."""

    ptr: int
    count: int
    dtype: DType
    keep: Any
    finish: Callable[[], None] | None = None
    place: str = ""

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def take(array: Any, writable: bool, what: str = "buffer") -> Buffer:
    """The memory of `array`. Raises `UsageError` for what cannot be taken, `UnsupportedError` for an unknown dtype."""
    if isinstance(array, Buffer):
        return array
    if hasattr(array, "data_ptr") and _is_torch(type(array)):
        return _torch(array, writable, what)
    if hasattr(array, "__cuda_array_interface__"):
        buffer = _interface(array, array.__cuda_array_interface__, writable, what)
        buffer.place = f"a device ({type(array).__name__} has __cuda_array_interface__)"
        return buffer
    if hasattr(array, "__array_interface__"):
        return _interface(array, array.__array_interface__, writable, what)
    if hasattr(array, "__dlpack__"):
        from hetccl.core.dlpack import take_dlpack

        return take_dlpack(array, writable, what)
    return _memory(array, writable, what)


def check_overlap(inp: Buffer, out: Buffer, allowed_at: int | None) -> None:
    """Refuses an output that overlaps the input anywhere but in place, which is at byte `allowed_at` of the larger
    one."""
    if inp.nbytes == 0 or out.nbytes == 0 or inp.ptr >= out.ptr + out.nbytes or out.ptr >= inp.ptr + inp.nbytes:
        return
    large, small = (inp, out) if inp.nbytes >= out.nbytes else (out, inp)
    if allowed_at is not None and small.ptr == large.ptr + allowed_at:
        return
    raise UsageError(
        f"the output overlaps the input (input at {inp.ptr:#x}, {inp.nbytes} bytes; "
        f"output at {out.ptr:#x}, {out.nbytes} bytes). "
        "Pass separate memory, or the same memory to work in place"
    )


def _is_torch(kind: type) -> bool:
    """Whether it is torch's tensor, or somebody's subclass of it."""
    return any(k.__name__ == "Tensor" and k.__module__.partition(".")[0] == "torch" for k in kind.__mro__)


def _torch(tensor: Any, writable: bool, what: str) -> Buffer:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _BY_NAME:
        raise UnsupportedError(
            f"{what}: no path supports dtype {tensor.dtype}; supported are {', '.join(sorted(_BY_NAME))}"
        )
    if getattr(tensor, "is_sparse", False) or str(tensor.layout) != "torch.strided":
        raise UnsupportedError(
            f"{what}: only dense tensors can be sent, this one has layout {tensor.layout}; use to_dense()"
        )
    if tensor.device.type == "meta":
        raise UnsupportedError(f"{what} is on torch's meta device and has no memory; make it on a real device")
    dense, finish = tensor, None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():  # conjugates and negations may be pending
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if writable:
            _check_apart(tensor.shape, tensor.stride(), what)

            def finish() -> None:
                tensor.detach().copy_(dense)

    place = "" if tensor.is_cpu else f"torch device {tensor.device}"
    return Buffer(dense.data_ptr(), dense.numel(), _BY_NAME[name], (tensor, dense), finish, place)


def _check_apart(shape: Any, strides: Any, what: str) -> None:
    if any(stride == 0 and length > 1 for length, stride in zip(shape, strides, strict=True)):
        raise UsageError(f"{what} is an expanded view: several of its elements are one in memory; pass a copy of it")


def _interface(array: Any, interface: dict[str, Any], writable: bool, what: str) -> Buffer:
    shape, typestr = tuple(interface["shape"]), interface["typestr"]
    ptr, readonly = interface["data"]
    dtype = _dtype(array, typestr, what)
    if writable and (readonly or not hasattr(array, "__setitem__")):  # the latter: NumPy's scalars lend a copy
        raise UsageError(f"{what} is read-only; pass memory that may be written")
    if _contiguous(shape, interface.get("strides"), dtype.itemsize):
        return Buffer(ptr, math.prod(shape), dtype, array)
    if not hasattr(array, "copy") or not hasattr(array, "__setitem__"):
        raise UsageError(
            f"{what} is not contiguous and its type {type(array).__name__} cannot be copied; pass a contiguous one"
        )
    if writable:
        _check_apart(shape, interface["strides"], what)
    dense = array.copy(order="C") if type(array).__module__.partition(".")[0] in ("numpy", "cupy") else array.copy()
    inner = take(dense, False, what)

    def finish() -> None:
        array[...] = dense

    return Buffer(inner.ptr, inner.count, dtype, (array, dense), finish if writable else None)


def _dtype(array: Any, typestr: str, what: str) -> DType:
    name = str(getattr(getattr(array, "dtype", None), "name", ""))
    if name in _BY_NAME:  # also the extension types of ml_dtypes: bfloat16, float8_e4m3fn ...
        found = _BY_NAME[name]
    elif typestr[1:] in _BY_TYPESTR:
        found = _BY_TYPESTR[typestr[1:]]
    else:
        raise UnsupportedError(
            f"{what}: no path supports dtype {name or typestr}; supported are {', '.join(sorted(_BY_NAME))}"
        )
    little = typestr[0] != ">"
    if not little and found.itemsize > 1:
        raise UnsupportedError(
            f"{what}: big-endian data ({typestr}) cannot be sent; convert it to the machine's own order"
        )
    return found


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    if strides is None or math.prod(shape) == 0:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _memory(array: Any, writable: bool, what: str) -> Buffer:
    try:
        view = memoryview(array)
    except TypeError:
        raise UsageError(
            f"{what} is a {type(array).__name__}; pass a NumPy array, a torch tensor, or an object with "
            "__cuda_array_interface__, __dlpack__ or the buffer protocol"
        ) from None
    code = view.format.lstrip("@=<")
    dtype = _BY_FORMAT.get(code)
    if code in ("l", "q", "L", "Q"):  # long differs between systems, its size does not lie
        dtype = (
            {4: DType.INT32, 8: DType.INT64}[view.itemsize]
            if code in "lq"
            else {4: DType.UINT32, 8: DType.UINT64}[view.itemsize]
        )
    if dtype is None:
        raise UnsupportedError(f"{what}: no path supports elements of format {view.format!r}")
    if not view.c_contiguous:
        raise UsageError(f"{what} is a strided memory view; pass a contiguous one or a NumPy array")
    if writable and view.readonly:
        raise UsageError(f"{what} is read-only; pass memory that may be written")
    if view.nbytes == 0:
        return Buffer(0, 0, dtype, view)
    if view.readonly:
        data = bytes(view)
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        return Buffer(address, view.nbytes // view.itemsize, dtype, data)
    holder = (ctypes.c_char * view.nbytes).from_buffer(view)
    return Buffer(ctypes.addressof(holder), view.nbytes // view.itemsize, dtype, (view, holder))
