# SPDX-License-Identifier: Apache-2.0
"""broadcast by owners: all ranks of the root's island send a share each, every other island gets one part of it first
and hands that part to the rest."""

from __future__ import annotations

from hetccl.core.algorithms.broadcast import chain
from hetccl.core.algorithms.common import Places, Shared, island_broadcast, needs_segments, segment_elements
from hetccl.core.algorithms.rounds import need_mesh, pieces_of
from hetccl.core.algorithms.shards import Shards
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["owners"]


def owners(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, S through the root's island and less through the others, over all border ranks at once."""
    c_n = len(topology.islands)
    if c_n == 1:
        return chain(topology, shared, rank, places)
    need_mesh(topology, shared, "owners")
    root_island, root_index = topology.place(shared.root)
    mine = topology.place(rank)[0]
    isl = topology.islands[mine]
    others = [i for i in range(c_n) if i != root_island]
    b = PlanBuilder(units=topology.border.units * len(others))
    out = b.whole(Buffer.OUT)
    shards = Shards(topology, b, rank, len(others))
    shard = shards.mine(Buffer.OUT)
    buffer = Buffer.OUT if not isl.staged else Buffer.HOST_SCRATCH
    pieces = pieces_of(topology, rank, len(others))

    def part(piece: int, number: int) -> Slice:
        first, last, _ = pieces[piece]
        step = (last - first) // len(others)
        return b.range(buffer, first + number * step, first + (number + 1) * step)

    def flow(kind: FlowKind, island: int, piece: int, number: int) -> Flow:
        peer, s = (pieces[piece][2][island],), part(piece, number)
        if kind == FlowKind.SEND:
            return Flow(kind, Channel.RESULT, peer, src=s)
        return Flow(kind, Channel.RESULT, peer, dst=s)

    every = range(len(pieces))
    done = -1
    if mine == root_island:
        shift = 1 if isl.size > 1 else 0
        ready = island_broadcast(b, isl, shared, out, root_index, shift=shift)
        if shard is not None:
            if isl.staged:
                ready = b.island(StepKind.COPY, shard, shard.on(buffer), shift=shift)
            b.border([flow(FlowKind.SEND, i, p, k) for k, i in enumerate(others) for p in every], ready)
    elif shard is not None:
        here = others.index(mine)
        done = b.border([flow(FlowKind.RECV, root_island, p, here) for p in every])
        rest = [(k, i) for k, i in enumerate(others) if i != mine]
        if rest:
            done = b.border(
                [flow(FlowKind.SEND, i, p, here) for _, i in rest for p in every]
                + [flow(FlowKind.RECV, i, p, k) for k, i in rest for p in every]
            )
        if isl.staged:
            b.island(StepKind.COPY, shard.on(buffer), shard, wait=done)
            done = -1
    if mine != root_island and isl.size > 1:
        shards.spread(shared, done)
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        shared.root,
        rank,
        "owners",
        "bandwidth",
        b.units,
        segment_elements(topology, shared, b.units, needs_segments(topology)),
        tuple(b.steps),
        tuple(b.flows),
        in_blocks=1 if rank == shared.root else 0,
        host_blocks=int(isl.staged),
    )
