# SPDX-License-Identifier: Apache-2.0
"""all_reduce: inside one island by the vendor's library, between islands by owners (bandwidth) or by exchange
(latency)."""

from __future__ import annotations

from hetccl.core.algorithms.common import (
    Places,
    ReducePlace,
    Shared,
    averages_by,
    combine_pieces,
    combining_op,
    divided,
    gather_pieces,
    island_broadcast,
    island_only,
    needs_segments,
    prescaled,
    reduce_to,
    segment_elements,
)
from hetccl.core.algorithms.shards import Shards
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Island, Topology
from hetccl.types import RedOp

__all__ = ["exchange", "island", "owners"]


def island(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """One island: one call of the vendor's library. What it lacks is moved as bytes and combined on the host."""
    isl = topology.islands[0]
    b = PlanBuilder()
    out, src = b.whole(Buffer.OUT), b.whole(Buffer.IN)
    before, after = averages_by(shared, topology.size)
    divisor, device_blocks, host_blocks = after, 0, 0
    if isl.size > 1 and shared.redop == RedOp.AVG and isl.reduces(shared.dtype, RedOp.AVG):
        b.island(StepKind.ALL_REDUCE, src, out)
        divisor = 0.0
    else:
        buffer = prescaled(b, isl, shared, [src], before)
        device_blocks = host_blocks = int(buffer != Buffer.IN)
        src = src.on(buffer)
        if isl.size == 1:
            b.island(StepKind.COPY, src, out)
        elif isl.reduces(shared.dtype, combining_op(shared)):
            b.island(StepKind.ALL_REDUCE, src, out)
        else:
            gather_pieces(b, isl, src, device_blocks, 0)
            combine_pieces(b, isl, out, device_blocks, host_blocks)
            device_blocks, host_blocks = device_blocks + isl.size, host_blocks + isl.size
        if after != 1.0:
            host_blocks += divided(b, isl, out, b.whole(Buffer.HOST_SCRATCH, host_blocks))
    scale = before if before != 1.0 else after
    segment = segment_elements(topology, shared, 1, isl.segment_bytes if device_blocks or host_blocks else 0)
    return _plan(isl, shared, rank, "island", "island", b, segment, device_blocks, host_blocks, divisor, scale)


def exchange(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """Latency class: the heads of the islands send each other everything and combine alike. C(C-1)S border bytes.
    Where links are missing, the head in the middle combines, and sends the result back, and of two islands the one that
    adds with least effort: 2(C-1)S."""
    isl = topology.island_of(rank)
    me = topology.place(rank)[1]
    b = PlanBuilder()
    before, after = averages_by(shared, topology.size)
    buffer = prescaled(b, isl, shared, [b.whole(Buffer.IN)], before)
    src, out = b.whole(buffer), b.whole(Buffer.OUT)
    device_blocks = host_blocks = int(buffer != Buffer.IN)
    border = topology.border
    head = topology.place(border.head(isl.index))[1]
    if isl.size > 1:
        reduce_to(b, isl, shared, me, ReducePlace(src, out, head, device_blocks, host_blocks))
        if not isl.reduces(shared.dtype, combining_op(shared)):
            device_blocks, host_blocks = device_blocks + isl.size, host_blocks + isl.size
        src = out
    ready = len(b.steps) - 1 if b.steps else -1
    if me == head:
        dst = out
        if isl.staged:
            ready = b.island(StepKind.COPY, src, src.on(Buffer.HOST_SCRATCH))
            src = dst = src.on(Buffer.HOST_SCRATCH)
            host_blocks = max(host_blocks, 1)
        heads = tuple(border.head(i.index) for i in topology.islands)
        if border.mesh and border.adder < 0:
            others = heads[: isl.index] + heads[isl.index + 1 :]
            flows = [Flow(FlowKind.EXCHANGE, Channel.CONTRIBUTE, others, src, dst, isl.index, finish=after != 1.0)]
        else:
            owner = border.adder if border.adder >= 0 else border.middle
            flows = _owner_flows(topology, src, dst, heads, owner, isl.index, after != 1.0)
        done = b.border(flows, island_only(b, ready))
        if isl.staged:
            done = b.island(StepKind.COPY, dst, out, wait=done)
        island_broadcast(b, isl, shared, out, head, done if not isl.staged else -1)
    else:
        island_broadcast(b, isl, shared, out, head)
    return _plan(isl, shared, rank, "exchange", "latency", b, 0, device_blocks, host_blocks, after, before)


def owners(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """Bandwidth class (arXiv 2605.31000): reduce_scatter inside, or reductions to the border ranks; partials to each
    element's owner and the sum back; all_gather inside, or broadcasts. 2(C-1)S border bytes. Where links are missing,
    partials are combined, and sums handed on, along a tree of islands."""
    isl, border = topology.island_of(rank), topology.border
    b = PlanBuilder(units=border.units)
    before, after = averages_by(shared, topology.size)
    # island calls, and copies to pinned memory, of the next segment go before the border of this one
    shift = 1 if isl.size > 1 or isl.staged else 0
    buffer = prescaled(b, isl, shared, [b.whole(Buffer.IN)], before, shift)
    device_blocks = host_blocks = int(buffer != Buffer.IN)
    shards = Shards(topology, b, rank)
    mine = shards.mine(Buffer.OUT)
    ready = len(b.steps) - 1 if b.steps else -1
    if isl.size > 1:
        last, used = shards.partials(shared, buffer, device_blocks, shift)
        ready = max(ready, last)
        device_blocks, host_blocks = device_blocks + used, host_blocks + used
    partial_buffer, result_buffer, block = (Buffer.OUT if isl.size > 1 else buffer), Buffer.OUT, 0
    done = -1
    if mine is not None:
        if isl.staged:
            block = host_blocks
            ready = b.island(StepKind.COPY, mine.on(partial_buffer), mine.on(Buffer.HOST_SCRATCH, block), shift=shift)
            partial_buffer = result_buffer = Buffer.HOST_SCRATCH
        flows = []
        for first, last, holders in border.pieces_of(rank):
            for owner, lo, hi in border.owned(first, last):
                part = b.range(partial_buffer, lo, hi).on(partial_buffer, block)
                flows += _owner_flows(
                    topology, part, part.on(result_buffer, block), holders, owner, isl.index, after != 1.0
                )
        if border.mesh:
            # what peers wait for goes first; the order within a kind stays that of the pieces, the same at both ends
            flows.sort(key=lambda f: (FlowKind.SEND, FlowKind.OWN, FlowKind.RECV).index(f.kind))
        done = b.border(flows, island_only(b, ready))
        if isl.staged:
            done = b.island(StepKind.COPY, mine.on(Buffer.HOST_SCRATCH, block), mine, wait=done)
    if isl.staged:
        host_blocks += 1
    if isl.size > 1:
        shards.spread(shared, done if not isl.staged else -1)
    segment = segment_elements(topology, shared, b.units, needs_segments(topology))
    return _plan(isl, shared, rank, "owners", "bandwidth", b, segment, device_blocks, host_blocks, after, before)


def _owner_flows(
    topology: Topology, src: Slice, dst: Slice, holders: tuple[int, ...], owner: int, island: int, finish: bool
) -> list[Flow]:
    """What a holder in `island` does for a part that `owner` combines."""
    below = topology.border.children(island, owner)
    peers = tuple(holders[c] for c in below)
    position = sum(c < island for c in below)
    if owner == island:
        return [Flow(FlowKind.OWN, Channel.CONTRIBUTE, peers, src, dst, position, give_back=True, finish=finish)]
    up = (holders[topology.border.parent(island, owner)],)
    if not peers:
        return [Flow(FlowKind.SEND, Channel.CONTRIBUTE, up, src), Flow(FlowKind.RECV, Channel.RESULT, up, dst=dst)]
    return [
        Flow(FlowKind.PASS, Channel.CONTRIBUTE, (*peers, *up), src, dst, position),
        Flow(FlowKind.FORWARD, Channel.RESULT, (*up, *peers), dst=dst),
    ]


def _plan(
    island: Island,
    shared: Shared,
    rank: int,
    algorithm: str,
    plan_class: str,
    b: PlanBuilder,
    segment: int,
    device_blocks: int,
    host_blocks: int,
    divisor: float,
    scale: float,
) -> Plan:
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        0,
        rank,
        algorithm,
        plan_class,
        b.units,
        segment,
        tuple(b.steps),
        tuple(b.flows),
        device_blocks=device_blocks,
        host_blocks=0 if island.host_memory else host_blocks,
        divisor=divisor,
        scale_divisor=scale,
    )
