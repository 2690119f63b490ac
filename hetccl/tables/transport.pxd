# SPDX-License-Identifier: Apache-2.0
from hetccl.spi cimport hetccl_transport_ops


cdef class TransportTable:
    cdef hetccl_transport_ops ops  # a normalised copy: no NULL in it
    cdef void *ctx
    cdef readonly object owner  # the capsule; keeps the plug-in's table alive
    cdef int check(self, int status, str call) except? -1
