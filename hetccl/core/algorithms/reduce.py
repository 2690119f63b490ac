# SPDX-License-Identifier: Apache-2.0
"""reduce: the vendor's inside each island, then along a chain of islands that ends at the root."""

from __future__ import annotations

from hetccl.core.algorithms.common import (
    Places,
    ReducePlace,
    Shared,
    averages_by,
    combining_op,
    needs_segments,
    prescaled,
    reduce_to,
    segment_elements,
)
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology
from hetccl.types import RedOp

__all__ = ["chain"]


def chain(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, at most S through one island. Each island of the chain combines once: its own partial with
    what comes from the island behind it. OUT exists on the root only."""
    root_island, _ = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    order = [root_island] + [i.index for i in topology.islands if i.index != root_island]
    heads = [shared.root] + [topology.islands[i].ranks[0] for i in order[1:]]
    at, single = order.index(mine), len(order) == 1
    head = topology.place(heads[at])[1]
    b = PlanBuilder()
    before, after = averages_by(shared, topology.size)
    divisor = after
    averages = single and isl.size > 1 and shared.redop == RedOp.AVG and isl.reduces(shared.dtype, RedOp.AVG)
    if averages:
        before, after, divisor = 1.0, 1.0, 0.0
    native = averages or isl.reduces(shared.dtype, combining_op(shared))
    shift = 1 if isl.size > 1 else 0  # the reduction of the next segment goes before the border of this one
    buffer = prescaled(b, isl, shared, [b.whole(Buffer.IN)], before, shift)
    scaled = buffer != Buffer.IN
    device, host = int(scaled), int(scaled)
    partial = b.whole(buffer)
    if isl.size > 1:
        # a library may scribble into the output of ranks that are not its root
        target = b.whole(Buffer.OUT) if rank == shared.root else b.whole(Buffer.DEVICE_SCRATCH, device)
        device += 1
        if native:
            b.island(StepKind.REDUCE, partial, target, root=head, shift=shift)
        else:
            reduce_to(b, isl, shared, me, ReducePlace(partial, target, head, device, host), shift)
            device, host = device + isl.size, host + isl.size
        partial = target
    ready = max((i for i, s in enumerate(b.steps) if s.lane == 0), default=-1)
    if single:
        if rank == shared.root:
            out = b.whole(Buffer.OUT)
            if isl.size == 1:
                b.island(StepKind.COPY, partial, out)
            if after != 1.0:
                b.island(StepKind.SCALE, out, out)
    elif rank == heads[at]:
        out = b.whole(Buffer.OUT)
        if isl.staged:
            out = b.whole(Buffer.HOST_SCRATCH, host)
            host += 1
            ready = b.island(StepKind.COPY, partial, out, shift=shift)
            partial = out
        elif rank != shared.root:
            out = b.whole(Buffer.DEVICE_SCRATCH, device)
            device += 1
        behind, ahead = heads[at + 1 : at + 2], heads[at - 1]
        position = int(bool(behind) and mine > order[at + 1])
        if rank == shared.root:
            flow = Flow(FlowKind.OWN, Channel.CONTRIBUTE, tuple(behind), partial, out, position, finish=after != 1.0)
        elif behind:
            flow = Flow(FlowKind.PASS, Channel.CONTRIBUTE, (*behind, ahead), partial, out, position)
        else:
            flow = Flow(FlowKind.SEND, Channel.CONTRIBUTE, (ahead,), partial)
        done = b.border([flow], ready)
        if rank == shared.root and isl.staged:
            b.island(StepKind.COPY, out, b.whole(Buffer.OUT), wait=done)
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        shared.root,
        rank,
        "island" if single else "chain",
        "island" if single else "bandwidth",
        1,
        segment_elements(topology, shared, 1, isl.segment_bytes if single else needs_segments(topology)),
        tuple(b.steps),
        tuple(b.flows),
        out_blocks=int(rank == shared.root),
        device_blocks=device,
        host_blocks=0 if isl.host_memory else host,
        divisor=divisor,
        scale_divisor=before if before != 1.0 else after,
    )
