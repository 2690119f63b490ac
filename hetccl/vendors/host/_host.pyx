# SPDX-License-Identifier: Apache-2.0
"""The collectives of the `host` vendor: those of `native/island.h`. Its device table is `vendors/host_memory`."""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from hetccl.native.combine cimport hetccl_can_combine
from hetccl.native.island cimport *
from hetccl.spi cimport *

from hetccl.tables import capsule

__all__ = ["ccl_table"]

cdef extern from * nogil:
    """
    #include <stdio.h>
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
    """
    int host_fail(int status, const char *text)
    int host_told(int status, const char *call, const hetccl_island *island)
    const char *host_text


cdef const char *last_error(void *ctx) noexcept nogil:
    return host_text


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

cdef hetccl_ccl_ops _ccl
cdef hetccl_table _ccl_table


def ccl_table():
    """Capsule of the collective library's table. Communicators come from `hetccl.native.island.join`."""
    return capsule(<uintptr_t>&_ccl_table, "ccl")


cdef void _fill():
    cdef int dtype, redop
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
