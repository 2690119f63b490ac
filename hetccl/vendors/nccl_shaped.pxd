# SPDX-License-Identifier: Apache-2.0
from hetccl.dynlib cimport Library
from hetccl.vendors.nccl_calls cimport hetccl_nccl_library


cdef class NcclShapedCcl:
    cdef hetccl_nccl_library *lib
    cdef readonly Library library
    cdef readonly object shape
    cdef readonly object table

    cdef void *find(self, str call, bint required=*) except? NULL
