# SPDX-License-Identifier: Apache-2.0
"""`hetccl_combine` for Python: element-wise arithmetic on host memory. The reference for every other way to combine."""

from libc.stddef cimport size_t
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.string cimport memset

from hetccl.native.combine cimport (
    hetccl_can_combine,
    hetccl_can_scale,
    hetccl_combine,
    hetccl_dtype_size,
    hetccl_scale,
)
from hetccl.spi cimport HETCCL_OK, HETCCL_UNSUPPORTED

from hetccl.errors import UnsupportedError, UsageError

cdef enum:
    MAX_DST = 8
    MAX_SRC = 64


def combine(dsts, srcs, int dtype, int redop, double divisor=1.0):
    """Writes srcs[0] op srcs[1] op ..., divided by `divisor`, to every one of `dsts`.

    All are C-contiguous buffers of equally many bytes (1 to 8 destinations, 1 to 64 sources); a destination may be a
    source. `dtype` and `redop` are the numbers of `hetccl.types`. Raises `UsageError` for sizes that do not fit and
    `UnsupportedError` for an operator that the element type does not have.
    """
    cdef int n_dst = len(dsts), n_src = len(srcs), held = 0, i, status
    cdef size_t size = hetccl_dtype_size(dtype), count = 0
    cdef Py_buffer views[MAX_DST + MAX_SRC]
    cdef void *dst[MAX_DST]
    cdef const void *src[MAX_SRC]
    if not size:
        raise UsageError(f"combine: {dtype} is not the number of an element type")
    if not 1 <= n_dst <= MAX_DST or not 1 <= n_src <= MAX_SRC:
        raise UsageError(f"combine: {n_dst} destinations and {n_src} sources; 1 to {MAX_DST} and 1 to {MAX_SRC} are "
                         "allowed")
    memset(views, 0, sizeof(views))
    try:
        for i in range(n_dst + n_src):
            if i < n_dst:
                PyObject_GetBuffer(dsts[i], &views[i], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
                dst[i] = views[i].buf
            else:
                PyObject_GetBuffer(srcs[i - n_dst], &views[i], PyBUF_C_CONTIGUOUS)
                src[i - n_dst] = views[i].buf
            held += 1
            if views[i].len != views[0].len or <size_t>views[i].len % size:
                raise UsageError(f"combine: buffers of {views[0].len} and {views[i].len} bytes, elements of {size}")
        count = <size_t>views[0].len // size
        with nogil:
            status = hetccl_combine(dst, n_dst, src, n_src, count, dtype, redop, divisor)
    finally:
        for i in range(held):
            PyBuffer_Release(&views[i])
    if status == HETCCL_UNSUPPORTED:
        raise UnsupportedError(f"combine: element type {dtype} has no operator {redop}")
    if status != HETCCL_OK:
        raise UsageError(f"combine: operator {redop} or divisor {divisor} is not valid for element type {dtype}")


def scale(dst, src, int dtype, double factor):
    """dst = src * factor, C-contiguous buffers of equally many bytes (or the same one).

    Raises `UsageError` for bool, and for a factor that is not whole where the elements are integers.
    """
    cdef Py_buffer views[2]
    cdef int held = 0, i, status
    cdef size_t size = hetccl_dtype_size(dtype)
    try:
        for i in range(2):
            PyObject_GetBuffer(src if i else dst, &views[i], PyBUF_C_CONTIGUOUS | (0 if i else PyBUF_WRITABLE))
            held += 1
        if not size or views[0].len != views[1].len or <size_t>views[0].len % size:
            raise UsageError(f"scale: buffers of {views[0].len} and {views[1].len} bytes, elements of {size}")
        with nogil:
            status = hetccl_scale(views[0].buf, views[1].buf, <size_t>views[0].len // size, dtype, factor)
    finally:
        for i in range(held):
            PyBuffer_Release(&views[i])
    if status != HETCCL_OK:
        raise UsageError(f"scale: element type {dtype} cannot be multiplied by {factor}")


def can_scale(int dtype, double factor):
    """True if `scale` takes this factor for this element type."""
    return bool(hetccl_can_scale(dtype, factor))


def can_combine(int dtype, int redop):
    """True if `combine` knows this element type with this operator."""
    return bool(hetccl_can_combine(dtype, redop))


def dtype_size(int dtype):
    """Bytes of an element; 0 for a number that is no element type."""
    return hetccl_dtype_size(dtype)
