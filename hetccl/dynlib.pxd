# SPDX-License-Identifier: Apache-2.0


cdef class Library:
    cdef void *handle
    cdef readonly str name
    cdef readonly str path
    cdef readonly bint shared

    cdef void *find(self, str symbol) except? NULL
    cdef void *find_call(self, shape, str call, bint required) except? NULL
