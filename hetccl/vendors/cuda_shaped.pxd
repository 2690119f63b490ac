# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int8_t, int16_t

from hetccl.dynlib cimport Library
from hetccl.spi cimport hetccl_table


cdef extern from "cuda_device.h" nogil:
    enum:
        HETCCL_CUDA_CODES
        HETCCL_CUDA_TYPES
    ctypedef struct hetccl_cuda_device:
        hetccl_table table
        int index
        int invalid_is_host
        char name[32]
        int16_t status_of[1024]
        int8_t memory_of[16]
        void *set_device
        void *get_device
        void *clear_error
        void *error_text
        void *alloc
        void *host_alloc
        void *host_register
        void *free
        void *host_free
        void *host_unregister
        void *stream_destroy
        void *stream_sync
        void *stream_query
        void *event_destroy
        void *event_query
        void *event_sync
        void *copy
        void *fill
        void *stream_create
        void *event_create
        void *stream_wait_event
        void *event_record
        void *attributes
        void *capturing
        void *capture_mode
        void *launch
        void *memory_handle
        void *kernel[19][9]
        void *resident[19]
        void *words[19]
        void *device_address
        void *stream_create_first
        int first_priority
    void hetccl_cuda_fill_table(hetccl_cuda_device *d)


cdef class CudaRuntime:
    cdef readonly Library library
    cdef readonly object shape

    cdef void *find(self, str call, bint required=*) except? NULL
    cdef int check(self, int code, str call) except -1


cdef class CudaShapedDevice:
    cdef hetccl_cuda_device *d
    cdef readonly CudaRuntime runtime
    cdef readonly object table
    cdef readonly str no_kernels
