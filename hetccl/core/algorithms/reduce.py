# SPDX-License-Identifier: Apache-2.0
"""reduce: the vendor's inside each island, then along a chain of islands that ends at the root."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks, transfer
from hetccl.core.algorithms.common import (
    Places,
    ReducePlace,
    Shared,
    averages_by,
    combining_op,
    divided,
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
    """(C-1)S border bytes; where links allow, at most S through one island, else along a tree with few branches. Each
    island combines once: its own partial with what comes from the islands behind it. OUT exists on the root only."""
    border = topology.border
    root_island, root_index = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl, single = topology.islands[mine], len(topology.islands) == 1
    parents = border.chain(root_island)
    heads = [border.head(i.index) for i in topology.islands]
    if single or border.at_border(shared.root):
        heads[root_island] = shared.root
    head = topology.place(heads[mine])[1]
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
                host += divided(b, isl, out, b.whole(Buffer.HOST_SCRATCH, host))
    elif rank == heads[mine]:
        out = b.whole(Buffer.OUT)
        if isl.staged:
            out = b.whole(Buffer.HOST_SCRATCH, host)
            host += 1
            ready = b.island(StepKind.COPY, partial, out, shift=shift)
            partial = out
        elif rank != shared.root:
            out = b.whole(Buffer.DEVICE_SCRATCH, device)
            device += 1
        behind = [c for c, up in enumerate(parents) if up == mine]
        peers = tuple(heads[c] for c in behind)
        position = sum(c < mine for c in behind)
        if mine == root_island:
            flow = Flow(FlowKind.OWN, Channel.CONTRIBUTE, peers, partial, out, position, finish=after != 1.0)
        elif behind:
            flow = Flow(FlowKind.PASS, Channel.CONTRIBUTE, (*peers, heads[parents[mine]]), partial, out, position)
        else:
            flow = Flow(FlowKind.SEND, Channel.CONTRIBUTE, (heads[parents[mine]],), partial)
        done = b.border([flow], ready)
        if rank == shared.root and isl.staged:
            b.island(StepKind.COPY, out, b.whole(Buffer.OUT), wait=done)
        ready = done
    if mine == root_island and heads[mine] != shared.root:  # the root is not at the border: the sum goes on to it
        device = _hand_on(topology, b, shared, rank, (head, root_index), device, host, ready)
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


def _hand_on(
    topology: Topology, b: PlanBuilder, shared: Shared, rank: int, ends: tuple[int, int], device: int, host: int,
    done: int,
) -> int:  # fmt: skip
    """The sum, in the last block of scratch of the island's head, to the root. Returns the device blocks in use."""
    isl, me = topology.island_of(rank), topology.place(rank)[1]
    blocks = Blocks(shared, rank, topology.size, None)
    blocks.device = device
    total = b.whole(Buffer.DEVICE_SCRATCH, device - 1)
    if me == ends[0] and isl.staged:
        total = blocks.scratch(Buffer.DEVICE_SCRATCH, 0)
        b.island(StepKind.COPY, b.whole(Buffer.HOST_SCRATCH, host - 1), total, wait=done)
        done = -1
    out = b.whole(Buffer.OUT) if rank == shared.root else total
    transfer(b, blocks, isl, shared, me, ends, total, out, 0, wait=done if me == ends[0] else -1)
    return blocks.device
