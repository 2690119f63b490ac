# SPDX-License-Identifier: Apache-2.0
"""all_gather: each block enters every other island once and is spread there by the vendor's library."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks
from hetccl.core.algorithms.common import Places, Shared, block_segment, island_broadcast
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)ns border bytes, (n-n_c)s into island c. The count is one rank's; block r of OUT is rank r's input."""
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    n, single = topology.size, len(topology.islands) == 1
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    given, own = blocks.at(Buffer.IN, 0, rank), blocks.at(Buffer.OUT, rank, rank)
    segment = block_segment(topology, shared)
    b.island(StepKind.COPY, given, own)
    ready, source = -1, given
    if isl.staged and not single:
        source = blocks.scratch(Buffer.HOST_SCRATCH, rank)
        ready = b.island(StepKind.COPY, given, source)
    if isl.size > 1 and isl.contiguous and segment == 0 and not shared.counts:
        whole = b.whole(Buffer.OUT, isl.ranks[0])
        b.island(StepKind.ALL_GATHER, own, whole, b.whole(Buffer.OUT, rank), as_bytes=not isl.moves(shared.dtype))
    else:
        for j, r in enumerate(isl.ranks):
            island_broadcast(b, isl, shared, blocks.at(Buffer.OUT, r, r), j)
    flows, arrivals = [], []
    for q in range(n):
        q_island, q_index = topology.place(q)
        if q == rank:
            to = [(i, i.ranks[me % i.size]) for i in topology.islands if i.index != mine]
            flows += [Flow(FlowKind.SEND, Channel.RESULT, (r,), src=source) for _, r in to]
        elif q_island != mine and q_index % isl.size == me:
            dst = blocks.at(Buffer.OUT, q, q)
            if isl.staged:
                arrivals.append((blocks.scratch(Buffer.HOST_SCRATCH, q), dst))
                dst = arrivals[-1][0]
            flows.append(Flow(FlowKind.RECV, Channel.RESULT, (q,), dst=dst))
    wait = b.border(flows, ready)
    for staged, dst in arrivals:
        b.island(StepKind.COPY, staged, dst, wait=wait)
        wait = -1
    for q in range(n):
        q_island, q_index = topology.place(q)
        if q_island != mine:
            island_broadcast(b, isl, shared, blocks.at(Buffer.OUT, q, q), q_index % isl.size, wait)
            wait = -1
    names = ("island", "island") if single else ("direct", "bandwidth")
    return blocks.plan(shared, rank, names, b, segment, [rank], list(range(n)))
