# SPDX-License-Identifier: Apache-2.0
"""all_reduce in rounds: reduce_scatter inside each island, partials of the parts to their islands round by round, the
results back the same way, all_gather inside."""

from __future__ import annotations

from math import lcm

from hetccl.core.algorithms.common import (
    Places,
    Shared,
    averages_by,
    combine_pieces,
    combining_op,
    gather_pieces,
    island_broadcast,
    needs_segments,
    prescaled,
    segment_elements,
)
from hetccl.core.algorithms.rounds import Schedule, my_pieces, reversed_rounds
from hetccl.core.algorithms.rounds import ring as ring_schedule
from hetccl.core.algorithms.rounds import tree as tree_schedule
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Lane, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["ring", "tree"]


def ring(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """2(C-1)S border bytes in 2(C-1) rounds; each rank talks to the islands before and after its own only."""
    return _in_rounds(topology, shared, rank, ring_schedule, "ring")


def tree(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """2(C-1)S border bytes in 2 ceil(log2 C) rounds."""
    return _in_rounds(topology, shared, rank, tree_schedule, "tree")


def _in_rounds(topology: Topology, shared: Shared, rank: int, schedule: Schedule, name: str) -> Plan:
    c_n = len(topology.islands)
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    b = PlanBuilder(units=lcm(*(i.size for i in topology.islands)) * c_n)
    before, after = averages_by(shared, topology.size)
    shift = 1 if isl.size > 1 else 0  # island calls of the next segment go before the border of this one
    buffer = prescaled(b, isl, shared, [b.whole(Buffer.IN)], before, shift)
    src = b.whole(buffer)
    device = host = int(buffer != Buffer.IN)
    width = b.units // isl.size
    shard = b.range(Buffer.OUT, me * width, (me + 1) * width)
    ready = len(b.steps) - 1 if b.steps else -1
    if isl.size > 1:
        if isl.reduces(shared.dtype, combining_op(shared)):
            body = b.body(Buffer.OUT, 0, width)
            b.island(StepKind.REDUCE_SCATTER, src, b.body(Buffer.OUT, me * width, (me + 1) * width), body, shift=shift)
            tail = b.tail(Buffer.OUT)
            ready = b.island(StepKind.REDUCE, tail.on(buffer), tail, root=isl.size - 1, shift=shift)
        else:
            gather_pieces(b, isl, src, device, shift)
            combine_pieces(b, isl, shard, device, host, shift)
            ready = len(b.steps) - 1
            device, host = device + isl.size, host + isl.size
    partial, result, block = (Buffer.OUT if isl.size > 1 else buffer), Buffer.OUT, 0
    if not isl.host_memory:
        block, host = host, host + 1
        ready = b.island(StepKind.COPY, shard.on(partial), shard.on(Buffer.HOST_SCRATCH, block), shift=shift)
        partial = result = Buffer.HOST_SCRATCH
    while ready >= 0 and b.steps[ready].lane != Lane.ISLAND:
        ready -= 1
    done = _border(topology, b, mine, me, schedule, (partial, result, block), after != 1.0, ready)
    if not isl.host_memory:
        done = b.island(StepKind.COPY, shard.on(Buffer.HOST_SCRATCH, block), shard, wait=done)
    if isl.size > 1:
        body = b.body(Buffer.OUT, 0, width)
        own = b.body(Buffer.OUT, me * width, (me + 1) * width)
        wait = done if isl.host_memory else -1
        b.island(StepKind.ALL_GATHER, own, b.whole(Buffer.OUT), body, wait=wait, as_bytes=not isl.moves(shared.dtype))
        island_broadcast(b, isl, shared, b.tail(Buffer.OUT), isl.size - 1)
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        0,
        rank,
        name,
        "bandwidth",
        b.units,
        segment_elements(topology, shared, b.units, needs_segments(topology)),
        tuple(b.steps),
        tuple(b.flows),
        device_blocks=device,
        host_blocks=0 if isl.host_memory else host,
        divisor=after,
        scale_divisor=before,
    )


def _border(
    topology: Topology, b: PlanBuilder, mine: int, me: int, schedule: Schedule, where: tuple[Buffer, Buffer, int],
    finish: bool, ready: int,
) -> int:  # fmt: skip
    """The rounds of one rank. Each piece of its shard is cut into one part an island. Returns the last step."""
    c_n = len(topology.islands)
    partial, result, block = where
    pieces = my_pieces(topology, b.units, mine, me)
    held: dict[tuple[int, int], Slice] = {}  # (piece, part): where its partial is

    def part(piece: int, owner: int, buffer: Buffer) -> Slice:
        first, last, _ = pieces[piece]
        step = (last - first) // c_n
        return b.range(buffer, first + owner * step, first + (owner + 1) * step).on(buffer, block)

    inward = reversed_rounds(schedule, mine, c_n)
    last = max(i for i, r in enumerate(inward) if any(mine in parts for _, parts in r.receives))
    done = -1
    for number, turn in enumerate(inward):
        flows: list[Flow] = []
        for p, (_, _, holders) in enumerate(pieces):
            for to, owners in turn.sends:
                for owner in owners:
                    src = held.get((p, owner), part(p, owner, partial))
                    flows.append(Flow(FlowKind.SEND, Channel.CONTRIBUTE, (holders[to],), src=src))
        for p, (_, _, holders) in enumerate(pieces):
            for source, owners in turn.receives:
                for owner in owners:
                    src, dst = held.get((p, owner), part(p, owner, partial)), part(p, owner, result)
                    ends = finish and owner == mine and number == last
                    position = int(source < mine)
                    flows.append(
                        Flow(
                            FlowKind.OWN, Channel.CONTRIBUTE, (holders[source],), src, dst, position, finish=ends
                        )
                    )  # fmt: skip
                    held[p, owner] = dst
        done = b.border(flows, ready)
        ready = -1
    for turn in schedule(mine, c_n):
        flows = [
            Flow(FlowKind.SEND, Channel.RESULT, (holders[to],), src=part(p, owner, result))
            for p, (_, _, holders) in enumerate(pieces)
            for to, owners in turn.sends
            for owner in owners
        ]
        flows += [
            Flow(FlowKind.RECV, Channel.RESULT, (holders[source],), dst=part(p, owner, result))
            for p, (_, _, holders) in enumerate(pieces)
            for source, owners in turn.receives
            for owner in owners
        ]
        done = b.border(flows)
    return done
