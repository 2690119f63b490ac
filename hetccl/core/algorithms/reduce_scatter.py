# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter: each block is reduced inside every island, and one partial an island goes straight to the block's
rank."""

from __future__ import annotations

from hetccl.core.algorithms.common import (
    ReducePlace,
    Shared,
    averages_by,
    combining_op,
    needs_segments,
    prescaled,
    reduce_to,
    segment_elements,
)
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology
from hetccl.types import RedOp

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int) -> Plan:
    """(C-1)S border bytes, (n-n_c)s out of island c. The count is one rank's; block r of IN goes to rank r."""
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    n, single = topology.size, len(topology.islands) == 1
    b = PlanBuilder()
    out = b.whole(Buffer.OUT)
    before, after = averages_by(shared, n)
    divisor = after
    native = isl.size > 1 and isl.reduces(shared.dtype, combining_op(shared))
    averages = single and isl.size > 1 and shared.redop == RedOp.AVG and isl.reduces(shared.dtype, RedOp.AVG)
    if averages:
        before, after, divisor = 1.0, 1.0, 0.0
    segment = (
        0
        if single or all(i.host_memory for i in topology.islands)
        else segment_elements(topology, shared, 1, needs_segments(topology))
    )
    buffer, device_blocks = prescaled(b, isl, shared, n, before)
    host_blocks = 0
    mine_at: Slice = b.whole(buffer, rank)  # my block's partial of my island
    outgoing: list[tuple[int, Slice]] = []  # (rank, partial of its block) that I send
    fast = (native or averages) and isl.contiguous and segment == 0
    if isl.size == 1:
        outgoing = [(q, b.whole(buffer, q)) for q in range(n) if q != rank]
    else:
        mine_at = out
        if fast:
            b.island(StepKind.REDUCE_SCATTER, b.whole(buffer, isl.ranks[0]), out, out)
        dummy = device_blocks  # receives what other roots' reductions leave; a library may scribble there
        scratch = dummy + 1
        if not (fast and single):
            device_blocks += 1 if native or averages else 1 + isl.size
        for q in range(n):
            q_island, q_index = topology.place(q)
            if q_island == mine and fast:
                continue
            root = q_index % isl.size
            dst = b.whole(Buffer.DEVICE_SCRATCH, dummy)
            if q == rank:
                dst = out
            elif root == me:
                dst = b.whole(Buffer.DEVICE_SCRATCH, device_blocks)
                outgoing.append((q, dst))
                device_blocks += 1
            reduce_to(b, isl, shared, me, ReducePlace(b.whole(buffer, q), dst, root, scratch, host_blocks))
            if not native and not averages and root == me and not isl.host_memory:
                host_blocks += isl.size
    ready = max((i for i, s in enumerate(b.steps) if s.lane == 0), default=-1)
    target = out
    if not single and not isl.host_memory:
        staged = []
        for q, src in [*outgoing, (rank, mine_at)]:
            dst = b.whole(Buffer.HOST_SCRATCH, host_blocks)
            ready = b.island(StepKind.COPY, src, dst)
            host_blocks += 1
            staged.append((q, dst))
        mine_at = target = staged[-1][1]
        outgoing = staged[:-1]
    if not single:
        peers = tuple(i.ranks[me % i.size] for i in topology.islands if i.index != mine)
        flows = [Flow(FlowKind.SEND, Channel.CONTRIBUTE, (q,), src=src) for q, src in outgoing]
        flows.append(Flow(FlowKind.OWN, Channel.CONTRIBUTE, peers, mine_at, target, mine, finish=after != 1.0))
        done = b.border(flows, ready)
        if not isl.host_memory:
            b.island(StepKind.COPY, target, out, wait=done)
    else:
        if isl.size == 1:
            b.island(StepKind.COPY, b.whole(buffer, rank), out)
        if after != 1.0:
            b.island(StepKind.SCALE, out, out)
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        0,
        rank,
        "island" if single else "direct",
        "island" if single else "bandwidth",
        1,
        segment,
        tuple(b.steps),
        tuple(b.flows),
        in_blocks=n,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        divisor=divisor,
        scale_divisor=before if before != 1.0 else after,
    )
