# SPDX-License-Identifier: Apache-2.0
"""The engine as Python sees it: compiled plans, a communicator's C half, works in flight. No policy lives here."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc

from hetccl.core._engine cimport *
from hetccl.core._plans cimport CompiledPlan, PlanCache
from hetccl.core._words cimport LONG_AGO, nanoseconds, text
from hetccl.native.combine cimport hetccl_can_scale, hetccl_dtype_size
from hetccl.spi cimport *
from hetccl.tables.ccl cimport CclTable
from hetccl.tables.device cimport DeviceTable
from hetccl.tables.transport cimport TransportTable

from threading import RLock

from hetccl import errors
from hetccl.tables.common import raise_for_status
from hetccl.types import Op, RedOp

cdef uint64_t SLICE_NS = 100000000  # how long a wait may go without looking for signals
cdef int SEND = Op.SEND, RECV = Op.RECV, PREMUL_SUM = RedOp.PREMUL_SUM
cdef set IN_FLIGHT = set()  # works that the completion thread has not seen: C alone knows them, whatever callers drop


@cython.no_gc_clear  # __dealloc__ calls through tables that `keep` holds
@cython.final
cdef class Core:
    """C half of one communicator on one rank.

    `planner` is that of `PlanCache`; `failure(status, text, ranks)` makes the exception
    for a status of spi.h.
    """

    cdef hx_comm *c
    cdef readonly PlanCache cache
    cdef object failure
    cdef list keep
    cdef public double timeout  # seconds, of operations that name none
    cdef bint closed, forked

    def __cinit__(self, int rank, int size, planner, failure, double timeout):
        self.c = hx_comm_new(rank, size)
        if self.c == NULL:
            raise MemoryError
        self.cache, self.keep = PlanCache(planner), []
        self.failure, self.timeout = failure, timeout

    def __dealloc__(self):
        if self.c != NULL and not self.forked:
            if not self.closed:
                hx_engine_remove(self.c)
            hx_comm_free(self.c)

    def set_device(self, DeviceTable device, CclTable ccl, uintptr_t ccl_comm, int island_rank, list local_mates,
                   int local_ranks, bint check, bint ordered):
        """Device and vendor library; `local_mates`: ranks of the island, this one too, that share the board, in turn."""
        cdef int i
        self.keep += [device, ccl]
        self.c.dev, self.c.dev_ctx = &device.ops, device.ctx
        self.c.ccl, self.c.ccl_ctx, self.c.ccl_comm = &ccl.ops, ccl.ctx, <void *>ccl_comm
        self.c.host_memory = (device.ops.caps & HETCCL_DEVICE_HOST_MEMORY) != 0
        self.c.streaming = (ccl.ops.caps & HETCCL_CCL_BLOCKING) == 0
        self.c.island_rank = island_rank
        self.c.n_island_local = len(local_mates)
        self.c.island_ranks = <int32_t *>calloc(max(1, len(local_mates)), sizeof(int32_t))
        for i, rank in enumerate(local_mates):
            self.c.island_ranks[i] = rank
        i = local_mates.index(self.c.rank)
        self.c.turn_before, self.c.ordered = local_mates[i - 1] if i else -1, ordered
        self.c.pauses, self.c.check, self.c.local_ranks = hetccl_wait_pauses(local_ranks), check, local_ranks
        device.ops.bind_thread(device.ctx)
        if not self.c.host_memory:
            device.check(device.ops.stream_create(device.ctx, &self.c.stream), "stream_create")

    def set_shared(self, size_t chunk_bytes, uintptr_t board, board_owner):
        """Bytes of a wire message, and the arrival board."""
        self.c.chunk_bytes = chunk_bytes
        self.c.board = <hx_board *>board
        self.keep.append(board_owner)

    def add_transport(self, TransportTable transport):
        if self.c.n_transports == 4:
            raise errors.UnsupportedError("a communicator uses at most 4 transports at once")
        self.keep.append(transport)
        self.c.transports[self.c.n_transports].ops = &transport.ops
        self.c.transports[self.c.n_transports].ctx = transport.ctx
        self.c.n_transports += 1

    def add_link(self, int peer, TransportTable transport, uintptr_t endpoint):
        """The link for collectives with `peer`."""
        self.c.peers[peer].ops, self.c.peers[peer].ctx = &transport.ops, transport.ctx
        self.c.peers[peer].ep = <void *>endpoint
        self.c.peers[peer].max_message = transport.ops.max_message
        self.c.peers[peer].slots = (transport.ops.caps & HETCCL_TRANSPORT_SLOTS) != 0
        self.c.peers[peer].answers = (transport.ops.caps & HETCCL_TRANSPORT_ANSWER) != 0

    def add_p2p_link(self, int peer, bint outgoing, TransportTable transport, uintptr_t endpoint):
        if hx_p2p_add_link(self.c, peer, outgoing, &transport.ops, transport.ctx, <void *>endpoint):
            raise MemoryError

    def has_p2p_link(self, int peer):
        return bool(hx_p2p_has_link(self.c, peer))

    def open_direct(self, *options):
        """Prepares the direct path; `options`: of hx_direct_options, in order. "", or why that cannot be. Sends nothing."""
        cdef char[512] said
        cdef hx_direct_options o = hx_direct_options(options[0], options[1], options[2], options[3])
        return "" if hx_direct_open(self.c, &o, said, sizeof(said)) == HETCCL_OK else text(said) or "out of memory"

    def agree_direct(self, bytes spinning):
        """All ranks can, and all use it from now on; by rank, whether kernels spin there. None: not all can."""
        if spinning is None:
            return hx_direct_close(self.c)
        hx_direct_agree(self.c, <const uint8_t *><const char *>spinning)

    @property
    def spins(self):  # whether this rank's kernels may wait for others'
        return bool(hx_direct_spins(self.c))

    def start(self):
        """Lets the progress thread serve this communicator."""
        hx_engine_add(self.c)

    cdef CompiledPlan plan(self, int op, int dtype, int redop, int root, size_t count, shape):
        if (op | dtype | redop) & ~0xFF:  # the fields of the cache's key
            raise errors.UsageError(f"operation {op}, dtype {dtype}, operator {redop}: hetccl.types says what there is")
        return self.cache.find(op, dtype, redop, root, count * hetccl_dtype_size(dtype), shape)

    cdef hx_work *collective(self, CompiledPlan plan, uintptr_t in_ptr, uintptr_t out_ptr, size_t count, double timeout,
                             double factor, bint ours) except NULL:
        cdef size_t es = hetccl_dtype_size(plan.p.dtype)
        cdef hx_work *w
        if plan.p.redop == PREMUL_SUM and not hetccl_can_scale(plan.p.dtype, factor):
            raise errors.UsageError(f"premul_sum: integers take whole factors, not {factor}")
        if factor != 1.0 and plan.p.redop != PREMUL_SUM:
            raise errors.UsageError(f"a factor ({factor}) belongs to premul_sum only")
        self.usable()
        w = hx_work_get(self.c, &plan.p)
        if w == NULL:
            raise MemoryError
        w.inp, w.out, w.count, w.factor = <char *>in_ptr, <char *>out_ptr, count, factor
        try:
            if not self.c.host_memory and count and not ours:
                if plan.p.in_blocks and self.on_host(in_ptr, plan.p.in_blocks * count * es):
                    w.user_in = w.inp
                if plan.p.out_blocks and self.on_host(out_ptr, plan.p.out_blocks * count * es):
                    w.user_out = w.out
        except BaseException:
            hx_work_put(self.c, w)
            raise
        w.deadline_ns = self.deadline(timeout)
        return w

    cdef bint on_host(self, uintptr_t ptr, size_t nbytes) except -1:
        """Whether memory is the host's (then it is staged); refuses other devices' memory."""
        cdef int rc = self.c.dev.owns(self.c.dev_ctx, <void *>ptr, nbytes)
        if rc == HETCCL_UNSUPPORTED:
            return True
        if rc != HETCCL_OK:
            raise errors.UsageError(f"a buffer is not memory of this rank's device: {text(self.c.dev.last_error(self.c.dev_ctx))}")
        return False

    cdef uint64_t deadline(self, double timeout):
        return hetccl_now_ns() + nanoseconds(timeout if timeout > 0 else self.timeout)

    cpdef int usable(self) except -1:
        if self.forked:
            raise errors.ClosedError("this communicator was made before a fork; only the parent may use it. "
                                     "Create a new one in the child, or start workers with 'spawn'")
        if self.closed:
            raise errors.ClosedError("this communicator is closed; create a new one")
        if self.c.failed:
            raise self.error(self.c.failed)
        return 0

    cdef object error(self, int status):
        return self.failure(status, text(self.c.fail_text), self.failed_ranks())

    cpdef int run(self, int op, uintptr_t in_ptr, uintptr_t out_ptr, size_t count, int dtype, int redop, int root,
                  double timeout, double factor=1.0, object shape=None, long long stream=-1, bint ours=False) except -1:
        """One collective, blocking unless it can be left to `stream`. Counts and `ours` are as in `Communicator.run`."""
        cdef CompiledPlan plan = self.plan(op, dtype, redop, root, count, shape)
        cdef hx_work *w = self.collective(plan, in_ptr, out_ptr, count, timeout, factor, ours)
        cdef int rc
        try:
            rc = self.begin(w, stream, 0)
        except BaseException:
            hx_work_put(self.c, w)
            raise
        self.c.n_ops[op & 15] += 1
        if rc == HETCCL_OK:
            return 0
        self.drive(w)
        rc = w.status
        hx_work_put(self.c, w)
        if rc:
            raise self.error(rc)
        return 0

    cdef int begin(self, hx_work *w, long long stream, bint asynchronous) except -1:
        """HETCCL_OK: all of it is enqueued. IN_PROGRESS: it must be driven."""
        cdef int rc
        w.caller, w.has_caller = <void *>stream, stream >= 0 and not self.c.host_memory
        with nogil:
            rc = hx_begin(self.c, w, asynchronous)
        if rc > HETCCL_IN_PROGRESS and not self.c.failed:
            raise_for_status(rc, "collective", text(w.text), "device")
        if rc > HETCCL_IN_PROGRESS:
            raise self.error(rc)
        return rc

    cdef int drive(self, hx_work *w) except -1:
        while True:
            with nogil:
                hx_drive(self.c, w, SLICE_NS)
            if w.finished:
                return 0
            try:
                PyErr_CheckSignals()
            except BaseException:
                # The other ranks are in the middle of it: what was interrupted cannot go on, and the memory must be left alone.
                with nogil:
                    hx_fail(self.c, HETCCL_ABORTED, b"interrupted by a signal")
                    while not w.finished:
                        hx_drive(self.c, w, SLICE_NS)
                raise

    cpdef Work post(self, int op, uintptr_t in_ptr, uintptr_t out_ptr, size_t count, int dtype, int redop, int root, int tag,
                    double timeout, keep, finish=None, double factor=1.0, shape=None, long long stream=-1, bint ours=False):
        """Starts an operation. `keep` is held until it has ended; then `finish` runs. Send, receive: `root` is the peer (-1: any)."""
        cdef hx_work *w
        cdef CompiledPlan plan
        cdef Work work = Work.__new__(Work)
        if op == SEND or op == RECV:
            w = self.point_to_point(op == SEND, in_ptr if op == SEND else out_ptr, count * hetccl_dtype_size(dtype), root, tag,
                                    timeout, stream)
            stream = -1
        else:
            plan = self.plan(op, dtype, redop, root, count, shape)
            w = self.collective(plan, in_ptr, out_ptr, count, timeout, factor, ours)
            keep = (keep, plan)
        work.core, work.w, work.keep, work.finish = self, w, keep, finish
        work.finishing = None if finish is None else RLock()
        w.owner = <void *>work
        IN_FLIGHT.add(work)
        try:
            self.begin(w, stream, 1)
        except BaseException:
            IN_FLIGHT.discard(work)
            raise
        hx_engine_kick()
        self.c.n_ops[op & 15] += 1
        return work

    cdef hx_work *point_to_point(self, bint sending, uintptr_t ptr, size_t nbytes, int peer, int tag, double timeout,
                                 long long stream) except NULL:
        cdef hx_work *w
        self.usable()
        w = hx_work_get(self.c, NULL)
        if w == NULL:
            raise MemoryError
        w.sending, w.peer, w.tag, w.nbytes = sending, peer, tag, nbytes
        w.inp = w.out = <char *>ptr
        w.p2p_ptr, w.p2p_staged, w.p2p_device = <char *>ptr, 0, 0
        w.deadline_ns = self.deadline(timeout)
        try:
            if not self.c.host_memory and nbytes and not self.on_host(ptr, nbytes):
                w.caller, w.has_caller = <void *>stream, stream >= 0
                raise_for_status(hx_p2p_stage(self.c, w), "staging", text(self.c.dev.last_error(self.c.dev_ctx)), "device")
        except BaseException:
            hx_work_put(self.c, w)
            raise
        return w

    def failed_ranks(self):
        return tuple([self.c.fail_ranks[i] for i in range(self.c.n_fail_ranks)])

    def fail(self, int status, str said, tuple ranks=()):
        """Marks the communicator dead; every work in flight ends with this status."""
        if not self.c.failed:
            self.c.n_fail_ranks = min(len(ranks), 8)
            for i, rank in enumerate(ranks[:8]):
                self.c.fail_ranks[i] = rank
        cdef const char *p
        held = said.encode()
        p = held
        with nogil:
            hx_fail(self.c, status, p)
            hx_kick(self.c)
            hx_engine_kick()

    def abort(self):
        self.c.aborted = 1
        self.fail(HETCCL_ABORTED, "abort() was called on this rank")

    @property
    def failed(self):
        """Status that killed the communicator, or 0."""
        return self.c.failed

    @property
    def in_call(self):
        """Seconds after the deadline while the driving thread sits in a call of a BLOCKING library, else None."""
        if not self.c.in_call:
            return None
        return (<double>hetccl_now_ns() - <double>self.c.call_deadline_ns) * 1e-9

    @property
    def pending(self):
        return self.c.pending
    @property
    def lane_abandoned(self):
        """True if a call of a vendor library without abort was left behind: the process must leave by os._exit."""
        return bool(self.c.lane_abandoned)

    @property
    def address(self):  # of the C half, for `_state`
        return <uintptr_t>self.c

    def shut(self, double patience):
        """Ends works in flight. False if a thread is still inside after `patience` seconds. Communicates nothing."""
        cdef int rc
        self.closed = True
        with nogil:
            hx_engine_remove(self.c)
            rc = hx_comm_quiesce(self.c, nanoseconds(patience))
        return rc == 0

    def mark_forked(self):
        self.forked = True


@cython.final
@cython.no_gc_clear  # the collector must not take `core` away before __dealloc__ has given `w` back
cdef class Work:
    """One operation in flight."""
    cdef Core core
    cdef hx_work *w
    cdef object keep, error, finish, finishing
    cdef list callbacks
    cdef bint completed
    cdef public object attachment  # for layers above: whatever must live as long as the work

    def __dealloc__(self):
        if self.w != NULL and not self.core.forked:
            hx_work_put(self.core.c, self.w)

    def wait(self, timeout=None, long long stream=-1):
        """Blocks until the operation has ended, at most `timeout` seconds (None: its own deadline). Raises what it died of.

        When the time is up `TimedOutError` is raised and the operation goes on. Where all is enqueued `stream` waits instead.
        """
        if stream >= 0 and self.w.streamed and self.core.c.failed == 0:
            return raise_for_status(hx_wait_on_stream(self.w, <void *>stream), "stream_wait_event", "", "device")
        cdef uint64_t until = hetccl_now_ns() + (LONG_AGO if timeout is None else nanoseconds(timeout))
        cdef uint64_t now, some
        while not self.w.finished:
            now = hetccl_now_ns()
            if now >= until:
                raise errors.TimedOutError(f"the operation had not ended after {timeout} s; it goes on", phase="wait", missing=())
            some = min(SLICE_NS, until - now)
            with nogil:
                hx_drive(self.core.c, self.w, some)
            if not self.w.finished:
                PyErr_CheckSignals()
        self.settle()
        error = self.exception()
        if error is not None:
            raise error

    cdef settle(self):
        """Runs `finish` once, in whoever comes first of the completion thread and the waiters; the others wait for it."""
        if self.finish is None:
            return
        with self.finishing:
            try:
                if self.finish is not None and self.w.status == 0:
                    self.finish()
            except Exception as error:
                self.error = error
            self.finish = None

    @property
    def stream(self):  # on which all is enqueued, so that nothing but the device's work is left; -1: none, or it has failed
        return <long long><uintptr_t>self.w.stream if self.w.streamed and not self.core.c.failed else -1

    def is_done(self):
        return bool(self.w.finished) and self.finish is None

    def exception(self):
        """What the operation died of, None while it runs or if it went well."""
        if self.is_done() and self.error is None and self.w.status:
            self.error = self.core.error(self.w.status)
        return self.error

    @property
    def source_rank(self):  # that a receive got its message from
        return self.w.source

    def add_done_callback(self, fn):
        """Calls fn(work) on the completion thread when the operation has ended; at once if it has."""
        if self.completed:
            fn(self)
        elif self.callbacks is None:
            self.callbacks = [fn]
        else:
            self.callbacks.append(fn)

    cdef complete(self):
        self.settle()
        self.keep, self.completed = None, True
        callbacks, self.callbacks = self.callbacks, None
        IN_FLIGHT.discard(self)
        for fn in callbacks or ():
            try:
                fn(self)
            except Exception:
                import logging

                logging.getLogger("hetccl").exception("a callback of a completed operation raised")


def complete_some(double timeout):
    """Hands completed works to their owners; waits up to `timeout` seconds for the first. For the completion thread."""
    cdef hx_work *w
    cdef Work work
    cdef uint64_t ns = <uint64_t>(timeout * 1e9)
    while True:
        with nogil:
            w = hx_completed_pop(ns)
        if w == NULL:
            return
        work = <Work>w.owner  # held here: complete() may drop the last other reference
        work.complete()
        ns = 0


def stop_engine():
    with nogil:
        hx_engine_stop()


def after_fork():
    hx_engine_after_fork()
