# SPDX-License-Identifier: Apache-2.0
"""Memory for the executor's trace, and its events as tuples."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *lock, void *attributes)
    int pthread_mutex_destroy(pthread_mutex_t *lock)
    int pthread_mutex_lock(pthread_mutex_t *lock)
    int pthread_mutex_unlock(pthread_mutex_t *lock)

cdef extern from "trace.h" nogil:
    ctypedef struct hx_event:
        uint32_t sequence
        int32_t what
        int32_t index
        int32_t peer
        int64_t segment
        int64_t a
        int64_t b
        int64_t n
        int64_t m
    ctypedef struct hx_trace:
        pthread_mutex_t lock
        uint64_t capacity
        uint64_t used
        uint64_t lost
        hx_event *events


@cython.final
cdef class Trace:
    """Room for `capacity` events of one communicator, which must not outlive it."""

    cdef hx_trace t

    def __cinit__(self, uint64_t capacity):
        self.t.events = <hx_event *>calloc(capacity if capacity else 1, sizeof(hx_event))
        if self.t.events == NULL:
            raise MemoryError
        self.t.capacity = capacity
        pthread_mutex_init(&self.t.lock, NULL)

    def __dealloc__(self):
        if self.t.events != NULL:
            pthread_mutex_destroy(&self.t.lock)
            free(self.t.events)

    @property
    def address(self):
        return <uintptr_t>&self.t

    def take(self):
        """(events so far, how many found no room). The room is free again."""
        cdef uint64_t i
        cdef hx_event *e
        pthread_mutex_lock(&self.t.lock)
        try:
            found = []
            for i in range(self.t.used):
                e = &self.t.events[i]
                found.append((e.sequence, e.what, e.index, e.peer, e.segment, e.a, e.b, e.n, e.m))
            lost, self.t.used, self.t.lost = self.t.lost, 0, 0
        finally:
            pthread_mutex_unlock(&self.t.lock)
        return found, lost
