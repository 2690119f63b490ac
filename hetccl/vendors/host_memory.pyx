# SPDX-License-Identifier: Apache-2.0
"""The device table of ordinary host memory, for every vendor whose library works on it. All work is done at once."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from hetccl.native.combine cimport hetccl_combine
from hetccl.spi cimport *

from hetccl.tables import capsule

__all__ = ["device_table"]

cdef extern from * nogil:
    """
    #include <stdlib.h>
    #include <sys/mman.h>

    /* last_error is asked by the thread that failed. */
    static _Thread_local const char *hetccl_host_text = "";

    static inline int hetccl_host_fail(int status, const char *text)
    {
        hetccl_host_text = text;
        return status;
    }

    /* On a cache line; from 2 MiB on, in huge pages where the kernel has some. */
    static inline void *hetccl_host_allocate(size_t nbytes)
    {
        const size_t huge = (size_t)2 << 20;
        void *p = NULL;
        if (posix_memalign(&p, nbytes >= huge ? huge : 64, nbytes ? nbytes : 1) != 0)
            return NULL;
        if (nbytes >= huge)
            madvise(p, nbytes, MADV_HUGEPAGE);
        return p;
    }
    """
    int hetccl_host_fail(int status, const char *text)
    void *hetccl_host_allocate(size_t nbytes)
    const char *hetccl_host_text

cdef hetccl_device_ops _ops
cdef hetccl_table _table


def device_table():
    """Capsule for `Vendor.device_table`: host memory, trivial streams and events, and the reduce and scale kernels."""
    return capsule(<uintptr_t>&_table, "device")


cdef int bind_thread(void *ctx) noexcept nogil:
    return HETCCL_OK


cdef const char *last_error(void *ctx) noexcept nogil:
    return hetccl_host_text


cdef int alloc(void *ctx, size_t nbytes, void **ptr) noexcept nogil:
    ptr[0] = hetccl_host_allocate(nbytes)
    return HETCCL_OK if ptr[0] != NULL else hetccl_host_fail(HETCCL_NO_MEMORY, "alloc: out of memory")


cdef int release(void *ctx, void *ptr) noexcept nogil:
    free(ptr)
    return HETCCL_OK


cdef int owns(void *ctx, const void *ptr, size_t nbytes) noexcept nogil:
    return HETCCL_OK                        # ordinary memory is this device's memory


cdef int register(void *ctx, void *ptr, size_t nbytes) noexcept nogil:
    return HETCCL_OK


cdef int unregister(void *ctx, void *ptr) noexcept nogil:
    return HETCCL_OK


cdef int copy(void *ctx, void *dst, const void *src, size_t nbytes, void *stream) noexcept nogil:
    memcpy(dst, src, nbytes)
    return HETCCL_OK


cdef int fill(void *ctx, void *dst, int byte, size_t nbytes, void *stream) noexcept nogil:
    memset(dst, byte, nbytes)
    return HETCCL_OK


# Nothing is ever pending: one handle, the table's own address, stands for every stream and event.
cdef int handle_create(void *ctx, void **handle) noexcept nogil:
    handle[0] = <void *>&_table
    return HETCCL_OK


cdef int handle_use(void *ctx, void *handle) noexcept nogil:
    return HETCCL_OK


cdef int handles_use(void *ctx, void *first, void *second) noexcept nogil:
    return HETCCL_OK


cdef int reduce(void *ctx, const hetccl_reduce_args *args) noexcept nogil:
    cdef void *dst = args.dst
    cdef int status
    if args.size < sizeof(hetccl_reduce_args) or args.n_src < 1 or args.n_src > 1 << 20:
        return hetccl_host_fail(HETCCL_INVALID, "reduce_async: arguments of another version, or no source")
    status = hetccl_combine(&dst, 1, args.src, <int>args.n_src, args.count, args.dtype, args.redop, args.scale)
    if status == HETCCL_OK:
        return status
    return hetccl_host_fail(status, "reduce_async: this element type, operator or divisor cannot be combined")


cdef int scale(void *ctx, const hetccl_reduce_args *args) noexcept nogil:
    cdef void *dst = args.dst
    cdef int status
    if args.size < sizeof(hetccl_reduce_args) or args.n_src != 1:
        return hetccl_host_fail(HETCCL_INVALID, "scale_async: arguments of another version, or not one source")
    status = hetccl_combine(&dst, 1, args.src, 1, args.count, args.dtype, 0, args.scale)  # one source: no operator
    return status if status == HETCCL_OK else hetccl_host_fail(status, "scale_async: this type cannot be scaled")


cdef void _fill():
    memset(&_ops, 0, sizeof(_ops))
    _ops.version = HETCCL_SPI_VERSION
    _ops.size = sizeof(_ops)
    _ops.caps = HETCCL_DEVICE_HOST_MEMORY | HETCCL_DEVICE_KERNELS
    _ops.bind_thread = bind_thread
    _ops.last_error = last_error
    _ops.alloc = _ops.host_alloc = alloc
    _ops.free = _ops.host_free = release
    _ops.owns = owns
    _ops.host_register = register
    _ops.host_unregister = unregister
    _ops.copy_async = copy
    _ops.memset_async = fill
    _ops.stream_create = _ops.event_create = handle_create
    _ops.stream_destroy = _ops.event_destroy = handle_use
    _ops.stream_sync = _ops.event_sync = _ops.event_query = handle_use
    _ops.stream_wait_event = _ops.event_record = handles_use
    _ops.reduce_async = reduce
    _ops.scale_async = scale
    _table.ops = &_ops
    _table.ctx = NULL


_fill()
