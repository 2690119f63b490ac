# SPDX-License-Identifier: Apache-2.0
"""Wraps transports so that their messages pass at a given rate (HETCCL_BORDER_RATE)."""

cimport cython
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc

from hetccl.spi cimport *
from hetccl.tables.transport cimport TransportTable

from hetccl import errors
from hetccl.tables import capsule

__all__ = ["shape"]

cdef extern from "shaping.h" nogil:
    ctypedef struct hx_rate:
        uint64_t bytes_s
    ctypedef struct hx_shaped:
        hetccl_transport_ops ops
    int hx_shape(hx_shaped *s, const hetccl_transport_ops *inner, void *ctx, hx_rate *rate)
    void hx_unshape(hx_shaped *s)

cdef dict _links = {}  # bytes a second -> address of the process's link, which lives as long as the process


def shape(TransportTable inner, uint64_t bytes_s):
    """A table like `inner` through which all tables shaped alike in this process together move `bytes_s` each way."""
    cdef Shaped s = Shaped.__new__(Shaped)
    cdef hx_rate *rate = <hx_rate *><uintptr_t>_links.get(bytes_s, 0)
    if bytes_s == 0:
        raise errors.UsageError("a link needs a rate of at least one byte a second")
    if rate == NULL:
        rate = <hx_rate *>calloc(1, sizeof(hx_rate))
        if rate == NULL:
            raise MemoryError
        rate.bytes_s = bytes_s
        _links[bytes_s] = <uintptr_t>rate
    s.inner = inner
    s.made = True
    if hx_shape(&s.shaped, &inner.ops, inner.ctx, rate) != HETCCL_OK:
        raise errors.TransportError("no timer (timerfd) for a shaped link: raise the open-file limit (ulimit -n)")
    s.entry.ops, s.entry.ctx = &s.shaped.ops, &s.shaped
    return TransportTable(capsule(<uintptr_t>&s.entry, HETCCL_TRANSPORT_CAPSULE.decode(), s))


@cython.final
cdef class Shaped:
    """Owns a wrapped table; the capsule keeps it."""

    cdef hx_shaped shaped
    cdef hetccl_table entry
    cdef TransportTable inner
    cdef bint made

    def __dealloc__(self):
        if self.made:
            hx_unshape(&self.shaped)
