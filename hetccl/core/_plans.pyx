# SPDX-License-Identifier: Apache-2.0
"""A plan in C arrays, as the executor reads it."""

cimport cython
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc, free

from hetccl.core._engine cimport HX_FAN, hx_flow, hx_slice, hx_step

from hetccl import errors


cdef Py_ssize_t SHAPES = 256  # plans of block lengths that are kept, the oldest goes first


@cython.final
cdef class PlanCache:
    """Compiled plans of a communicator. `planner.limits(op)` gives the last size in bytes of each bucket of an operation,
    `planner.plan(op, dtype, redop, root, bucket, shape)` makes the plan of a class."""

    def __cinit__(self, planner):
        cdef int op
        self.plans, self.shaped, self.planner = {}, {}, planner
        for op in range(OPS):
            self.n_limits[op] = -1

    cdef int learn(self, int op) except -1:
        found = self.planner.limits(op)
        if len(found) > LIMITS:
            raise errors.InternalError(f"{len(found)} buckets of sizes of operation {op}, but at most {LIMITS} can be")
        for i, limit in enumerate(found):
            self.limits[op][i] = limit
        self.n_limits[op] = len(found)
        return 0

    cdef CompiledPlan find(self, int op, int dtype, int redop, int root, uint64_t nbytes, shape):
        """`shape` is None, or says how long each rank's block is and where it lies (the v forms)."""
        cdef int bucket = 0
        if shape is None and 0 <= op < OPS:
            if self.n_limits[op] < 0:
                self.learn(op)
            while bucket < self.n_limits[op] and nbytes > self.limits[op][bucket]:
                bucket += 1
        cdef uint64_t key = (<uint64_t>root << 32) | (<uint64_t>bucket << 24) | (redop << 16) | (dtype << 8) | op
        if shape is None and self.last is not None and key == self.last_key:
            self.hits += 1
            return self.last  # without a Python number for the key: a repeated call allocates nothing
        plans = self.plans if shape is None else self.shaped
        exact = key if shape is None else (key, shape)
        found = plans.get(exact)
        if found is not None:
            self.hits += 1
            if shape is None:
                self.last, self.last_key = found, key
            return <CompiledPlan>found
        self.misses += 1
        found = CompiledPlan(self.planner.plan(op, dtype, redop, root, bucket, shape))
        if shape is not None and len(plans) >= SHAPES:
            del plans[next(iter(plans))]  # works in flight hold theirs
        plans[exact] = found
        return <CompiledPlan>found


@cython.final
cdef class CompiledPlan:
    """A `Plan` in C arrays."""

    def __cinit__(self, plan):
        cdef int i, lane
        self.plan = plan
        self.p.op, self.p.dtype, self.p.redop, self.p.root = plan.op, plan.dtype, plan.redop, plan.root
        self.p.units, self.p.segment = plan.units, plan.segment
        self.p.in_blocks, self.p.out_blocks = plan.in_blocks, plan.out_blocks
        self.p.device_blocks, self.p.host_blocks = plan.device_blocks, plan.host_blocks
        self.p.divisor, self.p.scale_divisor = plan.divisor, plan.scale_divisor
        self.p.reads_out, self.p.digest, self.p.device_sums = plan.reads_out, plan.digest, plan.device_sums
        self.p.crosses = plan.plan_class != "island"
        self.p.number = plan.number
        self.p.n_calls = sum(step.kind.is_call for step in plan.steps)
        self.p.n_steps, self.p.n_flows = len(plan.steps), len(plan.flows)
        self.p.steps = <hx_step *>calloc(max(1, self.p.n_steps), sizeof(hx_step))
        self.p.flows = <hx_flow *>calloc(max(1, self.p.n_flows), sizeof(hx_flow))
        if self.p.steps == NULL or self.p.flows == NULL:
            raise MemoryError
        signals = plan.signals() | set(plan.lane(0)[len(plan.lane(0)) - 1:])  # the last tells when a segment's scratch is free again
        for i, flow in enumerate(plan.flows):
            self.fill_flow(&self.p.flows[i], flow)
        for i, step in enumerate(plan.steps):
            self.fill_step(&self.p.steps[i], step, i in signals)
        for lane in range(2):
            order = plan.lane(lane)
            self.p.lane_len[lane] = len(order)
            self.p.lane_steps[lane] = <int32_t *>calloc(max(1, len(order)), sizeof(int32_t))
            if self.p.lane_steps[lane] == NULL:
                raise MemoryError
            for i, index in enumerate(order):
                self.p.lane_steps[lane][i] = index
        self.p.max_shift = max((s.shift for s in plan.steps), default=0)

    def __dealloc__(self):
        free(self.p.steps)
        free(self.p.flows)
        free(self.p.lane_steps[0])
        free(self.p.lane_steps[1])

    cdef fill_step(self, hx_step *to, step, bint signal):
        cdef int i, k
        if step.n_src > 256:
            raise errors.UnsupportedError(
                f"a reduction that the vendor's library lacks is composed for islands of up to 256 ranks, this one has {step.n_src}")
        to.kind, to.lane, to.shift, to.wait_step = step.kind, step.lane, step.shift, step.wait
        to.signal, to.root, to.to, to.as_bytes, to.group = signal, step.root, step.to, step.as_bytes, step.group
        to.n_src, to.stride = step.n_src, step.stride
        to.first_flow, to.n_flows = step.first_flow, step.n_flows
        to.src, to.dst, to.len = slice_of(step.src), slice_of(step.dst), slice_of(step.len)
        latest = {}  # the last flow so far of each use of a channel
        for i in range(step.first_flow, step.first_flow + step.n_flows):
            uses = self.plan.flows[i].uses
            before = sorted({latest[use] for use in uses if use in latest})
            self.p.flows[i].n_after = len(before)
            for k, flow in enumerate(before):
                self.p.flows[i].after[k] = flow
            latest.update(dict.fromkeys(uses, i))

    cdef fill_flow(self, hx_flow *to, flow):
        cdef int i
        if len(flow.peers) >= HX_FAN:
            raise errors.UnsupportedError(f"at most {HX_FAN} islands can take part, here are {len(flow.peers) + 1}")
        to.kind, to.channel, to.n_peers = flow.kind, flow.channel, len(flow.peers)
        to.position, to.give_back, to.finish = flow.position, flow.give_back, flow.finish
        to.src, to.dst = slice_of(flow.src), slice_of(flow.dst)
        for i, peer in enumerate(flow.peers):
            to.peer[i] = peer


cdef hx_slice slice_of(s):
    cdef hx_slice out
    out.buffer, out.block, out.a, out.at, out.b, out.bt = s.buffer, s.block, s.a, s.at, s.b, s.bt
    return out
