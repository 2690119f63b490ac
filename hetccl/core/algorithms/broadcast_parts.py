# SPDX-License-Identifier: Apache-2.0
"""broadcast by owners: all ranks of the root's island send a share each, every other island gets one part of it first
and hands that part to the rest."""

from __future__ import annotations

from math import lcm

from hetccl.core.algorithms.broadcast import chain
from hetccl.core.algorithms.common import Places, Shared, island_broadcast, needs_segments, segment_elements
from hetccl.core.algorithms.rounds import my_pieces
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["owners"]


def owners(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, S through the root's island and less through the others, over all border ranks at once."""
    c_n = len(topology.islands)
    if c_n == 1:
        return chain(topology, shared, rank, places)
    root_island, root_index = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    parts = [i for i in range(c_n) if i != root_island]
    b = PlanBuilder(units=lcm(*(i.size for i in topology.islands)) * len(parts))
    out = b.whole(Buffer.OUT)
    width = b.units // isl.size
    shard = b.range(Buffer.OUT, me * width, (me + 1) * width)
    buffer, ready = (Buffer.OUT if isl.host_memory else Buffer.HOST_SCRATCH), -1
    pieces = my_pieces(topology, b.units, mine, me)

    def part(piece: int, number: int) -> Slice:
        first, last, _ = pieces[piece]
        step = (last - first) // len(parts)
        return b.range(buffer, first + number * step, first + (number + 1) * step)

    def flow(kind: FlowKind, island: int, piece: int, number: int) -> Flow:
        peer, s = (pieces[piece][2][island],), part(piece, number)
        if kind == FlowKind.SEND:
            return Flow(kind, Channel.RESULT, peer, src=s)
        return Flow(kind, Channel.RESULT, peer, dst=s)

    every = range(len(pieces))
    if mine == root_island:
        ready = island_broadcast(b, isl, shared, out, root_index, shift=1 if isl.size > 1 else 0)
        if not isl.host_memory:
            ready = b.island(StepKind.COPY, shard, shard.on(buffer), shift=1 if isl.size > 1 else 0)
        b.border([flow(FlowKind.SEND, i, p, k) for k, i in enumerate(parts) for p in every], ready)
    else:
        here = parts.index(mine)
        done = b.border([flow(FlowKind.RECV, root_island, p, here) for p in every])
        others = [(k, i) for k, i in enumerate(parts) if i != mine]
        if others:
            done = b.border(
                [flow(FlowKind.SEND, i, p, here) for _, i in others for p in every]
                + [flow(FlowKind.RECV, i, p, k) for k, i in others for p in every]
            )
        if not isl.host_memory:
            b.island(StepKind.COPY, shard.on(buffer), shard, wait=done)
            done = -1
        if isl.size > 1:
            body = b.body(Buffer.OUT, 0, width)
            own = b.body(Buffer.OUT, me * width, (me + 1) * width)
            b.island(StepKind.ALL_GATHER, own, out, body, wait=done, as_bytes=not isl.moves(shared.dtype))
            island_broadcast(b, isl, shared, b.tail(Buffer.OUT), isl.size - 1)
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
        host_blocks=0 if isl.host_memory else 1,
    )
