# SPDX-License-Identifier: Apache-2.0
"""all_reduce: inside one island by the vendor's library, between islands by owners (bandwidth) or by exchange
(latency)."""

from __future__ import annotations

from itertools import pairwise
from math import lcm

from hetccl.core.algorithms.common import (
    Places,
    ReducePlace,
    Shared,
    averages_by,
    combine_pieces,
    combining_op,
    gather_pieces,
    island_broadcast,
    needs_segments,
    prescaled,
    reduce_to,
    segment_elements,
)
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Lane, Plan, PlanBuilder, Slice, StepKind
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
            b.island(StepKind.SCALE, out, out)
    scale = before if before != 1.0 else after
    segment = segment_elements(topology, shared, 1, isl.segment_bytes if device_blocks else 0)
    return _plan(isl, shared, rank, "island", "island", b, segment, device_blocks, host_blocks, divisor, scale)


def exchange(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """Latency class: the heads of the islands send each other everything and combine alike. C(C-1)S border bytes."""
    isl = topology.island_of(rank)
    me = topology.place(rank)[1]
    b = PlanBuilder()
    before, after = averages_by(shared, topology.size)
    buffer = prescaled(b, isl, shared, [b.whole(Buffer.IN)], before)
    src, out = b.whole(buffer), b.whole(Buffer.OUT)
    device_blocks = host_blocks = int(buffer != Buffer.IN)
    if isl.size > 1:
        reduce_to(b, isl, shared, me, ReducePlace(src, out, 0, device_blocks, host_blocks))
        if not isl.reduces(shared.dtype, combining_op(shared)):
            device_blocks, host_blocks = device_blocks + isl.size, host_blocks + isl.size
        src = out
    ready = len(b.steps) - 1 if b.steps else -1
    if me == 0:
        dst = out
        if isl.staged:
            ready = b.island(StepKind.COPY, src, src.on(Buffer.HOST_SCRATCH))
            src = dst = src.on(Buffer.HOST_SCRATCH)
            host_blocks = max(host_blocks, 1)
        heads = tuple(i.ranks[0] for i in topology.islands if i.index != isl.index)
        done = b.border(
            [Flow(FlowKind.EXCHANGE, Channel.CONTRIBUTE, heads, src, dst, isl.index, finish=after != 1.0)],
            _island_only(b, ready),
        )
        if isl.staged:
            done = b.island(StepKind.COPY, dst, out, wait=done)
        island_broadcast(b, isl, shared, out, 0, done if not isl.staged else -1)
    else:
        island_broadcast(b, isl, shared, out, 0)
    return _plan(isl, shared, rank, "exchange", "latency", b, 0, device_blocks, host_blocks, after, before)


def owners(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """Bandwidth class (arXiv 2605.31000): reduce_scatter inside, partials to each element's owner and the sum back,
    all_gather inside. 2(C-1)S border bytes, equal shares of the elements."""
    c_n = len(topology.islands)
    isl = topology.island_of(rank)
    me = topology.place(rank)[1]
    b = PlanBuilder(units=lcm(*(i.size for i in topology.islands)) * c_n)
    before, after = averages_by(shared, topology.size)
    shift = 1 if isl.size > 1 else 0  # island calls of the next segment go before the border of this one
    buffer = prescaled(b, isl, shared, [b.whole(Buffer.IN)], before, shift)
    src = b.whole(buffer)
    device_blocks = host_blocks = int(buffer != Buffer.IN)
    width = b.units // isl.size  # units of one shard
    mine = b.range(Buffer.OUT, me * width, (me + 1) * width)
    ready = len(b.steps) - 1 if b.steps else -1
    if isl.size > 1:
        if isl.reduces(shared.dtype, combining_op(shared)):
            body = b.body(Buffer.OUT, 0, width)
            b.island(StepKind.REDUCE_SCATTER, src, b.body(Buffer.OUT, me * width, (me + 1) * width), body, shift=shift)
            tail = b.tail(Buffer.OUT)
            ready = b.island(StepKind.REDUCE, tail.on(buffer), tail, root=isl.size - 1, shift=shift)
        else:
            gather_pieces(b, isl, src, device_blocks, shift)
            combine_pieces(b, isl, mine, device_blocks, host_blocks, shift)
            ready = len(b.steps) - 1
            device_blocks, host_blocks = device_blocks + isl.size, host_blocks + isl.size
    partial_buffer, result_buffer, block = (Buffer.OUT if isl.size > 1 else buffer), Buffer.OUT, 0
    if isl.staged:
        block = host_blocks
        ready = b.island(StepKind.COPY, mine.on(partial_buffer), mine.on(Buffer.HOST_SCRATCH, block), shift=shift)
        partial_buffer = result_buffer = Buffer.HOST_SCRATCH
        host_blocks += 1
    flows = []
    for first, last, holders in pieces(topology, b.units):
        if holders[isl.index] != rank:
            continue
        for owner in range(c_n):
            step = (last - first) // c_n
            part = b.range(partial_buffer, first + owner * step, first + (owner + 1) * step)
            part = part.on(partial_buffer, block)
            flows += _owner_flows(part, part.on(result_buffer, block), holders, owner, isl.index, after != 1.0)
    # what the peers wait for goes first; the order within a kind stays that of the pieces, the same at both ends
    flows.sort(key=lambda f: (FlowKind.SEND, FlowKind.OWN, FlowKind.RECV).index(f.kind))
    done = b.border(flows, _island_only(b, ready))
    if isl.staged:
        done = b.island(StepKind.COPY, mine.on(Buffer.HOST_SCRATCH, block), mine, wait=done)
    if isl.size > 1:
        body = b.body(Buffer.OUT, 0, width)
        own = b.body(Buffer.OUT, me * width, (me + 1) * width)
        wait = done if not isl.staged else -1
        b.island(StepKind.ALL_GATHER, own, b.whole(Buffer.OUT), body, wait=wait, as_bytes=not isl.moves(shared.dtype))
        island_broadcast(b, isl, shared, b.tail(Buffer.OUT), isl.size - 1)
    segment = segment_elements(topology, shared, b.units, needs_segments(topology))
    return _plan(isl, shared, rank, "owners", "bandwidth", b, segment, device_blocks, host_blocks, after, before)


def pieces(topology: Topology, units: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """The common refinement of all islands' shards: (first unit, last unit, the holder in each island)."""
    cuts = sorted({i * (units // isl.size) for isl in topology.islands for i in range(isl.size + 1)})
    return [
        (lo, hi, tuple(isl.ranks[lo // (units // isl.size)] for isl in topology.islands)) for lo, hi in pairwise(cuts)
    ]


def _owner_flows(src: Slice, dst: Slice, holders: tuple[int, ...], owner: int, island: int, finish: bool) -> list[Flow]:
    if owner == island:
        peers = tuple(r for i, r in enumerate(holders) if i != island)
        return [Flow(FlowKind.OWN, Channel.CONTRIBUTE, peers, src, dst, island, give_back=True, finish=finish)]
    to = (holders[owner],)
    return [Flow(FlowKind.SEND, Channel.CONTRIBUTE, to, src), Flow(FlowKind.RECV, Channel.RESULT, to, dst=dst)]


def _island_only(b: PlanBuilder, step: int) -> int:
    """A border step waits only for steps of the island lane; its own lane is in order anyway."""
    while step >= 0 and b.steps[step].lane != Lane.ISLAND:
        step -= 1
    return step


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
