# SPDX-License-Identifier: Apache-2.0
"""all_reduce in rounds: reduce_scatter inside each island, partials of the parts to their islands round by round, the
results back the same way, all_gather inside."""

from __future__ import annotations

from hetccl.core.algorithms.common import (
    Places,
    Shared,
    averages_by,
    island_only,
    needs_segments,
    prescaled,
    segment_elements,
)
from hetccl.core.algorithms.rounds import Schedule, need_mesh, pieces_of, reversed_rounds
from hetccl.core.algorithms.rounds import ring as ring_schedule
from hetccl.core.algorithms.rounds import tree as tree_schedule
from hetccl.core.algorithms.shards import Shards
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["ring", "tree"]


def ring(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """2(C-1)S border bytes in 2(C-1) rounds; each rank talks to the islands before and after its own only."""
    return _in_rounds(topology, shared, rank, ring_schedule, "ring")


def tree(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """2(C-1)S border bytes in 2 ceil(log2 C) rounds."""
    return _in_rounds(topology, shared, rank, tree_schedule, "tree")


def _in_rounds(topology: Topology, shared: Shared, rank: int, schedule: Schedule, name: str) -> Plan:
    need_mesh(topology, shared, name)
    isl = topology.island_of(rank)
    scale = _scale(topology)
    b = PlanBuilder(units=topology.border.units * scale)
    before, after = averages_by(shared, topology.size)
    # island calls, and copies to pinned memory, of the next segment go before the border of this one
    shift = 1 if isl.size > 1 or isl.staged else 0
    buffer = prescaled(b, isl, shared, [b.whole(Buffer.IN)], before, shift)
    device = host = int(buffer != Buffer.IN)
    shards = Shards(topology, b, rank, scale)
    shard = shards.mine(Buffer.OUT)
    ready = len(b.steps) - 1 if b.steps else -1
    if isl.size > 1:
        last, used = shards.partials(shared, buffer, device, shift)
        ready = max(ready, last)
        device, host = device + used, host + used
    done = -1
    if shard is not None:
        partial, result, block = (Buffer.OUT if isl.size > 1 else buffer), Buffer.OUT, 0
        if isl.staged:
            block = host
            ready = b.island(StepKind.COPY, shard.on(partial), shard.on(Buffer.HOST_SCRATCH, block), shift=shift)
            partial = result = Buffer.HOST_SCRATCH
        done = _border(topology, b, rank, schedule, (partial, result, block), after != 1.0, island_only(b, ready))
        if isl.staged:
            done = b.island(StepKind.COPY, shard.on(Buffer.HOST_SCRATCH, block), shard, wait=done)
    if isl.staged:
        host += 1
    if isl.size > 1:
        shards.spread(shared, done if not isl.staged else -1)
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
    topology: Topology, b: PlanBuilder, rank: int, schedule: Schedule, where: tuple[Buffer, Buffer, int], finish: bool,
    ready: int,
) -> int:  # fmt: skip
    """The rounds of one rank. Each piece of its shard is cut into one part an island, all equal: whoever owns them,
    partials pass through all islands. Returns the last step."""
    c_n, mine = len(topology.islands), topology.place(rank)[0]
    partial, result, block = where
    pieces = pieces_of(topology, rank, _scale(topology))
    held: dict[tuple[int, int], Slice] = {}  # (piece, part): where its partial is

    def part(piece: int, owner: int, buffer: Buffer) -> Slice:
        first, end, _ = pieces[piece]
        step = (end - first) // c_n
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
        if flows:
            done, ready = b.border(flows, ready), -1
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
        done = b.border(flows, ready) if flows else done
    return done


def _scale(topology: Topology) -> int:
    """Units of the plan in one of the border's, so that every piece can be cut into equal parts."""
    c_n, border = len(topology.islands), topology.border
    return 1 if all((hi - lo) % c_n == 0 for lo, hi, _ in border.pieces()) else c_n
