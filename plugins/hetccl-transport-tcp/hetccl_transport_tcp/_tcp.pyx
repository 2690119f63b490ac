# SPDX-License-Identifier: Apache-2.0
"""The transport's table as Python holds it: made once a communicator, an endpoint added once a link."""
cimport cython
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_New, PyCapsule_SetContext
from cpython.ref cimport Py_DECREF, Py_INCREF
from hetccl.spi cimport HETCCL_CHANNELS, HETCCL_TRANSPORT_CAPSULE, hetccl_table
from libc.stdint cimport uint32_t, uintptr_t

cdef extern from "stream.h":
    ctypedef struct hetccl_tcp:
        hetccl_table table
    ctypedef struct hetccl_tcp_ep:
        pass
    hetccl_tcp *hetccl_tcp_new(size_t max_message, uint32_t most_part)
    void hetccl_tcp_free(hetccl_tcp *tcp)
    hetccl_tcp_ep *hetccl_tcp_open(hetccl_tcp *tcp, int peer, const int *fds, int n_fds, int side)
    void hetccl_tcp_close_all(hetccl_tcp *tcp)

cdef extern from "window.h":
    enum:
        HETCCL_TCP_MOST_BULK

CHANNELS = HETCCL_CHANNELS
MOST_SOCKETS = HETCCL_TCP_MOST_BULK


def link_sockets(int bulk):
    """How many sockets a link has whose window's data goes over `bulk` sockets a direction; 0: it has no window."""
    return HETCCL_CHANNELS + (1 + 2 * bulk if bulk else 0)


def is_link(int count):
    """Whether a link can have so many sockets."""
    cdef int bulk = (count - HETCCL_CHANNELS) // 2
    return 0 <= bulk <= HETCCL_TCP_MOST_BULK and count == link_sockets(bulk)


@cython.final
cdef class Streams:
    """All endpoints of one transport. Freed when neither it nor a capsule is left."""
    cdef hetccl_tcp *tcp
    cdef readonly size_t max_message

    def __cinit__(self, size_t max_message, uint32_t most_part=0):
        self.max_message = max_message
        self.tcp = hetccl_tcp_new(max_message, most_part)
        if self.tcp == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.tcp != NULL:
            hetccl_tcp_free(self.tcp)

    def capsule(self):
        """PyCapsule with the table, as transports/base.py wants it."""
        made = PyCapsule_New(&self.tcp.table, HETCCL_TRANSPORT_CAPSULE, _drop_owner)
        Py_INCREF(self)
        PyCapsule_SetContext(made, <void *>self)
        return made

    def open(self, int peer, fds, bint dialled=False):
        """Address of a new endpoint over connected sockets, as many as `link_sockets` says: one a channel, and for a window
        one for its words, and 1 to MOST_SOCKETS a direction, first those on which the rank that dialled sends. The
        descriptors belong to it from now on."""
        cdef int[HETCCL_CHANNELS + 1 + 2 * HETCCL_TCP_MOST_BULK] numbers
        if not is_link(len(fds)):
            raise ValueError(
                f"{HETCCL_CHANNELS} descriptors are needed, and for a window one and 1 to {HETCCL_TCP_MOST_BULK} pairs more; "
                f"{len(fds)} were given"
            )
        for i in range(len(fds)):
            numbers[i] = fds[i]
        cdef hetccl_tcp_ep *ep = hetccl_tcp_open(self.tcp, peer, numbers, <int>len(fds), not dialled)
        if ep == NULL:
            raise MemoryError
        return <uintptr_t>ep

    def close(self):
        """Closes every endpoint. A later call through the table answers HETCCL_ABORTED. Idempotent."""
        hetccl_tcp_close_all(self.tcp)


cdef void _drop_owner(object made) noexcept:
    cdef void *owner = PyCapsule_GetContext(made)
    if owner != NULL:
        Py_DECREF(<object>owner)
