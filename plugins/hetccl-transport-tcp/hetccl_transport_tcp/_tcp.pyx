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
        """Address of a new endpoint over connected sockets: one a channel, then one for the words of a window and 1 to
        MOST_SOCKETS for its data, or none. The descriptors belong to it from now on."""
        cdef int[HETCCL_CHANNELS + 1 + HETCCL_TCP_MOST_BULK] numbers
        cdef int more = len(fds) - HETCCL_CHANNELS
        if more != 0 and not 2 <= more <= 1 + HETCCL_TCP_MOST_BULK:
            raise ValueError(
                f"{HETCCL_CHANNELS} descriptors are needed, and 2 to {1 + HETCCL_TCP_MOST_BULK} more for a window; "
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
