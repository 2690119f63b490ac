# SPDX-License-Identifier: Apache-2.0
"""Collectives of the ranks of one host over one shared region. The `host` and `sim` vendors are built on this."""

cimport cython
from libc.stdint cimport uint64_t, uintptr_t

from hetccl.native.island cimport *
from hetccl.spi cimport (
    HETCCL_ABORTED,
    HETCCL_INVALID,
    HETCCL_MISMATCH,
    HETCCL_OK,
    HETCCL_TIMED_OUT,
    HETCCL_UNSUPPORTED,
)

import os

from hetccl.errors import (
    AbortedError,
    ClosedError,
    HetcclError,
    MismatchError,
    TimedOutError,
    UnsupportedError,
    UsageError,
)
from hetccl.native.island_join import new_id, shared_region

__all__ = ["RANKS_MAX", "Island", "join", "new_id"]

RANKS_MAX = HETCCL_ISLAND_RANKS_MAX


def join(bytes island_id, int rank, int size, double timeout, int local_ranks=0, check=None, int threads=1):
    """Joins an island; returns the address of its `hetccl_island`. Whoever takes it calls `hetccl_island_destroy`.

    Blocks up to `timeout` seconds until all ranks have come; later on a call that sees no progress for that long fails.
    `local_ranks`: processes that share the cores, if more than `size`. `threads` carry this rank's part of a large
    operation. `check` is called twice a second while ranks are
    missing, and what it raises ends the wait. Raises `TimedOutError` with the missing
    ranks, `PeerLostError`, `UsageError`.
    """
    if not 1 <= size <= HETCCL_ISLAND_RANKS_MAX:
        raise UsageError(f"an island has 1 to {HETCCL_ISLAND_RANKS_MAX} ranks, not {size}")
    if not 0 < timeout <= 1e9:
        raise UsageError(f"the timeout must be positive and at most 1e9 seconds, not {timeout}")
    cdef hetccl_island *island = NULL
    cdef int fd = shared_region(island_id, rank, size, hetccl_island_region_bytes(size), timeout, check)
    cdef int status = hetccl_island_open(fd, rank, size, local_ranks, <uint64_t>(timeout * 1e9), &island)
    os.close(fd)
    if status == HETCCL_MISMATCH:
        raise MismatchError(f"island of {size} ranks: the ranks run versions of hetccl whose regions differ")
    if status != HETCCL_OK:
        raise HetcclError(f"island of {size} ranks: its region of {hetccl_island_region_bytes(size)} bytes could not "
                          f"be mapped (status {status}); is there a limit on address space?", code=status)
    hetccl_island_set_threads(island, threads)
    return <uintptr_t>island


@cython.final
cdef class Island:
    """One rank's end of an island. Buffers are addresses (int); `count`, `dtype` and `redop` are as in `island.h`.

    Not for two threads at once, but for `abort`, `error` and `waiting_for`. After `TimedOutError` or `AbortedError` the
    island is dead on all ranks.
    """

    cdef hetccl_island *island
    cdef readonly int rank
    cdef readonly int size
    cdef double seconds

    def __init__(self, bytes island_id, int rank, int size, double timeout, int local_ranks=0, int threads=1):
        if self.island != NULL:
            raise UsageError("this island is open already")
        self.island = <hetccl_island *><uintptr_t>join(island_id, rank, size, timeout, local_ranks, None, threads)
        self.rank, self.size, self.seconds = rank, size, timeout

    def __dealloc__(self):
        hetccl_island_destroy(self.island)

    def close(self):
        """Unmaps the region; says nothing to the peers. Idempotent."""
        hetccl_island_destroy(self.island)
        self.island = NULL

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def timeout(self):
        """Seconds without progress after which a call fails."""
        return self.seconds

    @timeout.setter
    def timeout(self, double seconds):
        if not 0 < seconds <= 1e9:
            raise UsageError(f"the timeout must be positive and at most 1e9 seconds, not {seconds}")
        self.seconds = seconds
        if self.island != NULL:
            hetccl_island_set_timeout(self.island, <uint64_t>(seconds * 1e9))

    @property
    def address(self):
        """Of the `hetccl_island`; it stays this object's."""
        return <uintptr_t>self.island

    @property
    def waiting_for(self):
        """Rank that the running or the last failed call waits for; -1: none."""
        return hetccl_island_waiting_for(self.island)

    @property
    def error(self):
        """Status: 0 (HETCCL_OK) while the island lives."""
        return hetccl_island_error(self.island)

    def abort(self):
        """Ends the island on all ranks; running calls raise `AbortedError`. Any thread; never blocks."""
        hetccl_island_abort(self.island)

    def all_reduce(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int redop):
        cdef int status
        with nogil:
            status = hetccl_island_all_reduce(self.island, <const void *>send, <void *>recv, count, dtype, redop)
        self.check(status, "all_reduce")

    def reduce_scatter(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int redop):
        cdef int status
        with nogil:
            status = hetccl_island_reduce_scatter(self.island, <const void *>send, <void *>recv, count, dtype, redop)
        self.check(status, "reduce_scatter")

    def all_gather(self, uintptr_t send, uintptr_t recv, size_t count, int dtype):
        cdef int status
        with nogil:
            status = hetccl_island_all_gather(self.island, <const void *>send, <void *>recv, count, dtype)
        self.check(status, "all_gather")

    def broadcast(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int root):
        cdef int status
        with nogil:
            status = hetccl_island_broadcast(self.island, <const void *>send, <void *>recv, count, dtype, root)
        self.check(status, "broadcast")

    def reduce(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int redop, int root):
        cdef int status
        with nogil:
            status = hetccl_island_reduce(self.island, <const void *>send, <void *>recv, count, dtype, redop, root)
        self.check(status, "reduce")

    def all_to_all(self, uintptr_t send, uintptr_t recv, size_t count, int dtype):
        cdef int status
        with nogil:
            status = hetccl_island_all_to_all(self.island, <const void *>send, <void *>recv, count, dtype)
        self.check(status, "all_to_all")

    def barrier(self):
        cdef int status
        with nogil:
            status = hetccl_island_barrier(self.island)
        self.check(status, "barrier")

    def send(self, uintptr_t data, size_t count, int dtype, int peer):
        cdef int status
        with nogil:
            status = hetccl_island_send(self.island, <const void *>data, count, dtype, peer)
        self.check(status, "send")

    def recv(self, uintptr_t data, size_t count, int dtype, int peer):
        cdef int status
        with nogil:
            status = hetccl_island_recv(self.island, <void *>data, count, dtype, peer)
        self.check(status, "recv")

    cdef int check(self, int status, str call) except -1:
        if status == HETCCL_OK:
            return 0
        where = f"{call} of rank {self.rank} in an island of {self.size}"
        peer = hetccl_island_waiting_for(self.island)
        if status == HETCCL_TIMED_OUT:
            raise TimedOutError(f"{where}: rank {peer} did nothing for {self.seconds:g} s; look whether it is alive "
                                "and called the same operation", phase="island", missing=(peer,))
        if status == HETCCL_ABORTED:
            raise AbortedError(f"{where}: rank {hetccl_island_aborted_by(self.island)} aborted the island",
                               rank=hetccl_island_aborted_by(self.island))
        if status == HETCCL_UNSUPPORTED:
            raise UnsupportedError(f"{where}: this element type has no such operator")
        if status == HETCCL_MISMATCH:
            raise MismatchError(f"{where}: the peer sent a message of another length")
        if hetccl_island_error(self.island) == HETCCL_INVALID:
            raise ClosedError(f"{where}: it is closed, or this process is a fork of the one that opened it")
        raise UsageError(f"{where}: an argument is out of range")
