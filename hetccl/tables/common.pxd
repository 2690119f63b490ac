# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, uint32_t

from hetccl.spi cimport hetccl_table


cdef hetccl_table *table_in(object capsule, const char *name) except NULL
cdef int check_head(int status, str kind, uint32_t version, uint32_t size) except -1
cdef int32_t dtype_number(dtype) except -1
cdef int32_t redop_number(redop) except -1
cdef str text_of(const char *text)
