# SPDX-License-Identifier: Apache-2.0
"""Memory for the executor's trace, and its events as tuples."""

cimport cython
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free


from hetccl.core._engine cimport hx_comm, hx_event, hx_trace, pthread_mutex_t


cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t *lock, void *attributes)
    int pthread_mutex_destroy(pthread_mutex_t *lock)
    int pthread_mutex_lock(pthread_mutex_t *lock)
    int pthread_mutex_unlock(pthread_mutex_t *lock)


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

    def attach(self, uintptr_t core):
        """To the communicator whose C half lies there."""
        (<hx_comm *>core).trace = &self.t

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
