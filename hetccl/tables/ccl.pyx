# SPDX-License-Identifier: Apache-2.0
"""Wrapper of `hetccl_ccl_ops`."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t, uintptr_t
from libc.string cimport memset
from posix.unistd cimport usleep

from hetccl.spi cimport *
from hetccl.tables.common cimport check_head, dtype_number, redop_number, table_in, text_of

import time

from hetccl import errors
from hetccl.tables.common import raise_for_status
from hetccl.types import DType, RedOp

cdef extern from "normalize.h" nogil:
    int hetccl_stub_vccl(void *c, const hetccl_ccl_args *a)
    int hetccl_normalize_ccl(hetccl_ccl_ops *out, const hetccl_ccl_ops *table)


@cython.final
cdef class CclTable:
    """A vendor's collective library inside one island. Communicators, buffers and streams are addresses (int)."""

    def __cinit__(self, table):
        cdef hetccl_table *found = table_in(table, HETCCL_CCL_CAPSULE)
        cdef const hetccl_ccl_ops *ops = <const hetccl_ccl_ops *>found.ops
        check_head(hetccl_normalize_ccl(&self.ops, ops), "ccl", ops.version, ops.size)
        self.ctx = found.ctx
        self.owner = table

    @property
    def caps(self):
        """Bits HETCCL_CCL_* of spi.h."""
        return self.ops.caps

    @property
    def blocking(self):
        """True if calls return only when the result is there."""
        return bool(self.ops.caps & HETCCL_CCL_BLOCKING)

    @property
    def move_mask(self):
        """Bit `dtype`: the library moves elements of that type."""
        return self.ops.move_mask

    @property
    def calls(self):
        """Which optional calls the library has: bit 0 all_to_all, bit 1 send and recv."""
        return (self.ops.all_to_all != hetccl_stub_vccl) | (
            (self.ops.send != hetccl_stub_vccl and self.ops.recv != hetccl_stub_vccl) << 1)

    def moves(self, dtype):
        """True if the library moves elements of `dtype`."""
        return bool(self.ops.move_mask >> dtype_number(dtype) & 1)

    def reduce_mask(self, dtype):
        """Bit `redop`: the library reduces `dtype` with that operator."""
        return self.ops.reduce_mask[dtype_number(dtype)]

    def reduces(self, dtype, redop):
        """True if the library reduces `dtype` with `redop`."""
        return bool(self.ops.reduce_mask[dtype_number(dtype)] >> redop_number(redop) & 1)

    def last_error(self):
        """Text of this thread's last failure."""
        return text_of(self.ops.last_error(self.ctx))

    def unique_id(self):
        """Bytes that name a new vendor communicator; called on one rank of the island."""
        cdef unsigned char[8192] buffer
        cdef uint32_t length = sizeof(buffer)
        cdef int status
        with nogil:
            status = self.ops.unique_id(self.ctx, buffer, &length)
        self.check(status, "unique_id")
        if length > sizeof(buffer):
            raise errors.PluginLoadError(f"unique_id says {length} bytes; at most {sizeof(buffer)} are allowed")
        return (<const char *>buffer)[:length]

    def init(self, int rank, int size, bytes unique_id, double timeout=300.0, check=None):
        """Joins a communicator of `size` ranks; returns its handle. Blocks up to `timeout` seconds until all joined, or
        until `check`, which is called twice a second, raises."""
        cdef hetccl_ccl_init_args args
        cdef void *comm = NULL
        cdef int status
        cdef uint32_t pause_us = 20
        memset(&args, 0, sizeof(args))
        args.size = sizeof(args)
        args.rank = rank
        args.n_ranks = size
        args.id_len = <uint32_t>len(unique_id)
        args.id = <const char *>unique_id
        args.timeout_s = timeout
        deadline = time.monotonic() + timeout
        looked = time.monotonic()
        with nogil:
            status = self.ops.init_post(self.ctx, &args, &comm)
        self.check(status, "init_post")
        while True:
            with nogil:
                status = self.ops.init_test(self.ctx, comm)
            if status == HETCCL_OK:
                return <uintptr_t>comm
            try:
                if status != HETCCL_IN_PROGRESS:
                    self.check(status, "init_test")
                PyErr_CheckSignals()
                now = time.monotonic()
                if check is not None and now - looked >= 0.5:
                    check()
                    looked = now
                if now >= deadline:
                    raise errors.TimedOutError(
                        f"joining a vendor communicator as rank {rank} of {size}: not all ranks came within "
                        f"{timeout:g} s; look for a rank that has not started or has failed",
                        phase="island", missing=())
            except BaseException:
                with nogil:
                    self.ops.abort(self.ctx, comm)
                    self.ops.destroy(self.ctx, comm)
                raise
            with nogil:
                usleep(pause_us)
            pause_us = min(pause_us * 2, 5000)

    def call(self, str op, uintptr_t comm, uintptr_t send=0, uintptr_t recv=0, size_t count=0, dtype=DType.FLOAT32,
             redop=RedOp.SUM, int peer=0, uintptr_t stream=0):
        """Runs collective `op` ("all_reduce", "send", ...). `count` as in spi.h; `peer` is the root or the other rank.

        A BLOCKING library may block until all ranks of the island have called; others enqueue on `stream`.
        """
        cdef hetccl_ccl_args args
        cdef int (*function)(void *, const hetccl_ccl_args *) noexcept nogil
        cdef int status
        if op == "all_reduce":
            function = self.ops.all_reduce
        elif op == "reduce_scatter":
            function = self.ops.reduce_scatter
        elif op == "all_gather":
            function = self.ops.all_gather
        elif op == "broadcast":
            function = self.ops.broadcast
        elif op == "reduce":
            function = self.ops.reduce
        elif op == "all_to_all":
            function = self.ops.all_to_all
        elif op == "send":
            function = self.ops.send
        elif op == "recv":
            function = self.ops.recv
        else:
            raise errors.UsageError(f"{op!r} is no operation of a vendor library; it has all_reduce, reduce_scatter, "
                                    "all_gather, broadcast, reduce, all_to_all, send and recv")
        memset(&args, 0, sizeof(args))
        args.size = sizeof(args)
        args.dtype = dtype_number(dtype)
        args.redop = redop_number(redop)
        args.peer = peer
        args.send = <const void *>send
        args.recv = <void *>recv
        args.count = count
        args.comm = <void *>comm
        args.stream = <void *>stream
        with nogil:
            status = function(self.ctx, &args)
        self.check(status, op)

    def group_start(self):
        """Begins a group of calls (HETCCL_CCL_GROUP)."""
        self.check(self.ops.group_start(self.ctx), "group_start")

    def group_end(self):
        """Runs the group's calls; may block as they do."""
        cdef int status
        with nogil:
            status = self.ops.group_end(self.ctx)
        self.check(status, "group_end")

    def async_error(self, uintptr_t comm):
        """Raises what has gone wrong in the background, if anything has."""
        self.check(self.ops.async_error(self.ctx, <void *>comm), "async_error")

    def abort(self, uintptr_t comm):
        """Makes running calls of other threads return (HETCCL_CCL_ABORT). Never blocks."""
        cdef int status
        with nogil:
            status = self.ops.abort(self.ctx, <void *>comm)
        self.check(status, "abort")

    def destroy(self, uintptr_t comm):
        """Frees the communicator, after its last call has ended. May block until the other ranks do so, too."""
        cdef int status
        with nogil:
            status = self.ops.destroy(self.ctx, <void *>comm)
        self.check(status, "destroy")

    cdef int check(self, int status, str call) except? -1:
        if status > HETCCL_IN_PROGRESS or status < 0:
            raise_for_status(status, call, self.last_error(), "ccl")
        return status
