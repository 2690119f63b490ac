# SPDX-License-Identifier: Apache-2.0
"""Arrays that live in the memory of a pretend accelerator, for users and tests."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hetccl.errors import ClosedError, UsageError
from hetccl.types import DType

if TYPE_CHECKING:
    import numpy as np

    from hetccl.vendors.base import Vendor

__all__ = ["SimArray"]


class SimArray:
    """A dense array in memory of `vendor` (an opened sim vendor), uninitialised like fresh device memory.

    Attributes: vendor, shape (tuple), dtype (`DType`), size (elements), nbytes, ptr (device address, 0 if the array has
    no bytes). The host cannot read it by address; `to_numpy` copies. Elements that NumPy has no name for (bfloat16,
    fp8) come and go as unsigned integers of the same size.
    """

    def __init__(self, vendor: Vendor, shape: tuple[int, ...] | int, dtype: DType | str) -> None:
        from hetccl.tables import DeviceTable

        self.ptr = 0
        self.vendor = vendor
        self.shape: tuple[int, ...] = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        if any(n < 0 for n in self.shape):
            raise UsageError(f"SimArray: shape {self.shape} has a negative length")
        self.dtype = _dtype(dtype)
        self.size = 1
        for n in self.shape:
            self.size *= n
        self.nbytes = self.size * self.dtype.itemsize
        self._device = DeviceTable(vendor.device_table)
        self._closed = False
        self.ptr = self._device.alloc(self.nbytes)

    @classmethod
    def from_numpy(cls, vendor: Vendor, a: Any, dtype: DType | str | None = None) -> SimArray:
        """Copies array-like `a`. `dtype` reads its bytes as another type of the same size, say uint16 as bfloat16."""
        import numpy as np

        host = np.ascontiguousarray(a).reshape(np.shape(a))  # ascontiguousarray alone makes (1,) of ()
        kind = _dtype(dtype if dtype is not None else host.dtype.name)
        if kind.itemsize != host.itemsize:
            raise UsageError(f"SimArray.from_numpy: {kind.label} has {kind.itemsize} bytes an element, "
                             f"the array's {host.dtype} has {host.itemsize}")
        array = cls(vendor, host.shape, kind)
        array.copy_from(host)
        return array

    def copy_from(self, a: np.ndarray[Any, Any], stream: int = 0) -> None:
        """Overwrites the array with `a` (same number of bytes). Blocks until the copy is done."""
        import numpy as np

        host = np.ascontiguousarray(a)
        self._check(host.nbytes)
        self._device.copy(self.ptr, host.ctypes.data, self.nbytes, stream)
        self._device.stream_sync(stream)

    def to_numpy(self, stream: int = 0) -> np.ndarray[Any, Any]:
        """A host copy, made after what `stream` holds now. Blocks until it is done."""
        import numpy as np

        host = np.empty(self.shape, dtype=_numpy_name(self.dtype))
        self._check(host.nbytes)
        self._device.copy(host.ctypes.data, self.ptr, self.nbytes, stream)
        self._device.stream_sync(stream)
        return host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        import numpy as np

        return {
            "shape": self.shape,
            "typestr": np.dtype(_numpy_name(self.dtype)).str,
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def close(self) -> None:
        """Frees the memory; work that is queued on it still ends well. Idempotent."""
        if not self._closed:
            self._closed = True
            ptr, self.ptr = self.ptr, 0
            self._device.free(ptr)

    def __enter__(self) -> SimArray:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        with contextlib.suppress(Exception):  # in a forked child or at exit: the memory goes with the process
            self.close()

    def __repr__(self) -> str:
        return f"SimArray({self.vendor.name}, shape={self.shape}, dtype={self.dtype.label}, ptr={self.ptr:#x})"

    def _check(self, nbytes: int) -> None:
        if self._closed:
            raise ClosedError(f"this SimArray of {self.vendor.name} has been closed")
        if nbytes != self.nbytes:
            raise UsageError(f"the array has {self.nbytes} bytes, the host's copy {nbytes}")


def _dtype(name: DType | str) -> DType:
    if isinstance(name, DType):
        return name
    try:
        return DType[name.upper()]
    except KeyError:
        known = ", ".join(d.label for d in DType)
        raise UsageError(f"SimArray: no element type {name!r}; known are {known}") from None


def _numpy_name(dtype: DType) -> str:
    if dtype in _UNNAMED:
        return f"uint{8 * dtype.itemsize}"
    return dtype.label


_UNNAMED = frozenset({DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FNUZ,
                      DType.FLOAT8_E5M2FNUZ})
