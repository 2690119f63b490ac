# SPDX-License-Identifier: Apache-2.0
"""The tables of the `host` vendor: ordinary memory, work done at once, and the collectives of `native/island.h`."""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from hetccl.native.combine cimport hetccl_can_combine, hetccl_combine
from hetccl.native.island cimport *
from hetccl.spi cimport *

from hetccl.tables import capsule

__all__ = ["ccl_table", "device_table"]

cdef extern from * nogil:
    """
    #include <stdio.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    #include "island.h"

    /* last_error is asked by the thread that failed. */
    static _Thread_local char host_text[256];

    static inline int host_fail(int status, const char *text)
    {
        snprintf(host_text, sizeof host_text, "%s", text);
        return status;
    }

    /* Passes a status of an island on; after a failure says which rank it was about. */
    static inline int host_told(int status, const char *call, const hetccl_island *island)
    {
        if (status == HETCCL_OK)
            return status;
        if (status == HETCCL_TIMED_OUT)
            snprintf(host_text, sizeof host_text, "%s: rank %d of the island did nothing until the deadline", call,
                     hetccl_island_waiting_for(island));
        else if (status == HETCCL_ABORTED)
            snprintf(host_text, sizeof host_text, "%s: rank %d of the island aborted", call,
                     hetccl_island_aborted_by(island));
        else if (status == HETCCL_UNSUPPORTED)
            snprintf(host_text, sizeof host_text, "%s: the element type has no such operator", call);
        else if (status == HETCCL_MISMATCH)
            snprintf(host_text, sizeof host_text, "%s: the peer's message has another length", call);
        else
            snprintf(host_text, sizeof host_text,
                     "%s: an argument is out of range, or the communicator belongs to the process that forked", call);
        return status;
    }

    /* On a cache line; from 2 MiB on, in huge pages where the kernel has some. */
    static inline void *host_allocate(size_t nbytes)
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
    int host_fail(int status, const char *text)
    int host_told(int status, const char *call, const hetccl_island *island)
    void *host_allocate(size_t nbytes)
    const char *host_text


# ------------------------------------------------------------------------------------------------------- device

cdef int bind_thread(void *ctx) noexcept nogil:
    return HETCCL_OK


cdef const char *last_error(void *ctx) noexcept nogil:
    return host_text


cdef int alloc(void *ctx, size_t nbytes, void **ptr) noexcept nogil:
    ptr[0] = host_allocate(nbytes)
    return HETCCL_OK if ptr[0] != NULL else host_fail(HETCCL_NO_MEMORY, b"alloc: out of memory")


cdef int release(void *ctx, void *ptr) noexcept nogil:
    free(ptr)
    return HETCCL_OK


cdef int owns(void *ctx, const void *ptr, size_t nbytes) noexcept nogil:
    return HETCCL_OK  # ordinary memory is this device's memory


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
    handle[0] = <void *>&_device_table
    return HETCCL_OK


cdef int handle_use(void *ctx, void *handle) noexcept nogil:
    return HETCCL_OK


cdef int handles_use(void *ctx, void *first, void *second) noexcept nogil:
    return HETCCL_OK


cdef int reduce(void *ctx, const hetccl_reduce_args *args) noexcept nogil:
    cdef int status
    cdef void *dst
    if args.size < sizeof(hetccl_reduce_args) or args.n_src < 1 or args.n_src > 1 << 20:
        return host_fail(HETCCL_INVALID, b"reduce_async: arguments of another version, or no source")
    dst = args.dst
    status = hetccl_combine(&dst, 1, args.src, <int>args.n_src, args.count, args.dtype, args.redop, args.scale)
    if status == HETCCL_UNSUPPORTED:
        return host_fail(status, b"reduce_async: the element type has no such operator")
    if status != HETCCL_OK:
        return host_fail(status, b"reduce_async: element type, operator or divisor is not valid")
    return HETCCL_OK


cdef int scale(void *ctx, const hetccl_reduce_args *args) noexcept nogil:
    cdef int status
    cdef void *dst
    if args.size < sizeof(hetccl_reduce_args) or args.n_src != 1:
        return host_fail(HETCCL_INVALID, b"scale_async: arguments of another version, or not one source")
    dst = args.dst
    status = hetccl_combine(&dst, 1, args.src, 1, args.count, args.dtype, 0, args.scale)  # one source: no operator
    return status if status == HETCCL_OK else host_fail(status, b"scale_async: element type or divisor is not valid")


# ---------------------------------------------------------------------------------------------------------- ccl

cdef inline hetccl_island *island_of(const hetccl_ccl_args *args) noexcept nogil:
    return <hetccl_island *>args.comm if args.size >= sizeof(hetccl_ccl_args) else NULL


cdef int all_reduce(void *ctx, const hetccl_ccl_args *args) noexcept nogil:
    cdef hetccl_island *island = island_of(args)
    return host_told(hetccl_island_all_reduce(island, args.send, args.recv, args.count, args.dtype, args.redop),
                     b"all_reduce", island)


cdef int reduce_scatter(void *ctx, const hetccl_ccl_args *args) noexcept nogil:
    cdef hetccl_island *island = island_of(args)
    return host_told(hetccl_island_reduce_scatter(island, args.send, args.recv, args.count, args.dtype, args.redop),
                     b"reduce_scatter", island)


cdef int all_gather(void *ctx, const hetccl_ccl_args *args) noexcept nogil:
    cdef hetccl_island *island = island_of(args)
    return host_told(hetccl_island_all_gather(island, args.send, args.recv, args.count, args.dtype),
                     b"all_gather", island)


cdef int broadcast(void *ctx, const hetccl_ccl_args *args) noexcept nogil:
    cdef hetccl_island *island = island_of(args)
    return host_told(hetccl_island_broadcast(island, args.send, args.recv, args.count, args.dtype, args.peer),
                     b"broadcast", island)


cdef int reduce_to(void *ctx, const hetccl_ccl_args *args) noexcept nogil:
    cdef hetccl_island *island = island_of(args)
    return host_told(hetccl_island_reduce(island, args.send, args.recv, args.count, args.dtype, args.redop, args.peer),
                     b"reduce", island)


cdef int all_to_all(void *ctx, const hetccl_ccl_args *args) noexcept nogil:
    cdef hetccl_island *island = island_of(args)
    return host_told(hetccl_island_all_to_all(island, args.send, args.recv, args.count, args.dtype),
                     b"all_to_all", island)


cdef int send(void *ctx, const hetccl_ccl_args *args) noexcept nogil:
    cdef hetccl_island *island = island_of(args)
    return host_told(hetccl_island_send(island, args.send, args.count, args.dtype, args.peer), b"send", island)


cdef int recv(void *ctx, const hetccl_ccl_args *args) noexcept nogil:
    cdef hetccl_island *island = island_of(args)
    return host_told(hetccl_island_recv(island, args.recv, args.count, args.dtype, args.peer), b"recv", island)


cdef int async_error(void *ctx, void *comm) noexcept nogil:
    return host_told(hetccl_island_error(<hetccl_island *>comm), b"async_error", <hetccl_island *>comm)


cdef int abort(void *ctx, void *comm) noexcept nogil:
    hetccl_island_abort(<hetccl_island *>comm)
    return HETCCL_OK


cdef int destroy(void *ctx, void *comm) noexcept nogil:
    hetccl_island_destroy(<hetccl_island *>comm)
    return HETCCL_OK


# ------------------------------------------------------------------------------------------------------- tables

cdef hetccl_device_ops _device
cdef hetccl_ccl_ops _ccl
cdef hetccl_table _device_table, _ccl_table


def device_table():
    """Capsule of the device table: host memory."""
    return capsule(<uintptr_t>&_device_table, "device")


def ccl_table():
    """Capsule of the collective library's table. Communicators come from `hetccl.native.island.join`."""
    return capsule(<uintptr_t>&_ccl_table, "ccl")


cdef void _fill():
    cdef int dtype, redop
    memset(&_device, 0, sizeof(_device))
    _device.version = HETCCL_SPI_VERSION
    _device.size = sizeof(_device)
    _device.caps = HETCCL_DEVICE_HOST_MEMORY | HETCCL_DEVICE_KERNELS
    _device.bind_thread = bind_thread
    _device.last_error = last_error
    _device.alloc = _device.host_alloc = alloc
    _device.free = _device.host_free = release
    _device.owns = owns
    _device.host_register = register
    _device.host_unregister = unregister
    _device.copy_async = copy
    _device.memset_async = fill
    _device.stream_create = _device.event_create = handle_create
    _device.stream_destroy = _device.event_destroy = handle_use
    _device.stream_sync = _device.event_sync = _device.event_query = handle_use
    _device.stream_wait_event = _device.event_record = handles_use
    _device.reduce_async = reduce
    _device.scale_async = scale

    memset(&_ccl, 0, sizeof(_ccl))
    _ccl.version = HETCCL_SPI_VERSION
    _ccl.size = sizeof(_ccl)
    _ccl.caps = (HETCCL_CCL_BLOCKING | HETCCL_CCL_ABORT | HETCCL_CCL_NAN_PROPAGATES | HETCCL_CCL_MULTI_COMM
                 | HETCCL_CCL_IN_PLACE)
    for dtype in range(HETCCL_DTYPE_COUNT):
        _ccl.move_mask |= <uint64_t>1 << dtype
        for redop in range(HETCCL_REDOP_COUNT):
            # A sum of small floats is only finite if the inputs are divided first, which is the core's to do.
            if hetccl_can_combine(dtype, redop) and not (redop == HETCCL_AVG and is_small_float(dtype)):
                _ccl.reduce_mask[dtype] |= <uint32_t>1 << redop
    _ccl.last_error = last_error
    _ccl.all_reduce = all_reduce
    _ccl.reduce_scatter = reduce_scatter
    _ccl.all_gather = all_gather
    _ccl.broadcast = broadcast
    _ccl.reduce = reduce_to
    _ccl.all_to_all = all_to_all
    _ccl.send = send
    _ccl.recv = recv
    _ccl.async_error = async_error
    _ccl.abort = abort
    _ccl.destroy = destroy

    _device_table.ops = &_device
    _device_table.ctx = NULL
    _ccl_table.ops = &_ccl
    _ccl_table.ctx = NULL


cdef extern from "hetccl/spi.h" nogil:
    enum:
        HETCCL_AVG
        HETCCL_REDOP_COUNT
        HETCCL_FLOAT16
        HETCCL_BFLOAT16
        HETCCL_FLOAT8_E4M3FN


cdef inline bint is_small_float(int dtype) noexcept:
    return dtype == HETCCL_FLOAT16 or dtype == HETCCL_BFLOAT16 or dtype >= HETCCL_FLOAT8_E4M3FN


_fill()
