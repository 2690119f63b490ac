# SPDX-License-Identifier: Apache-2.0
"""all_gather: each block enters every other island once and is spread there by the vendor's library."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks
from hetccl.core.algorithms.common import Places, Shared, island_broadcast, segment_of_blocks
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)ns border bytes, (n-n_c)s into island c; where links are missing, blocks are handed on along a tree of
    islands. The count is one rank's; block r of OUT is rank r's input."""
    mine = topology.place(rank)[0]
    isl, border = topology.islands[mine], topology.border
    n, single = topology.size, len(topology.islands) == 1
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    given, own = blocks.at(Buffer.IN, 0, rank), blocks.at(Buffer.OUT, rank, rank)
    segment = segment_of_blocks(topology, shared)
    carried = [] if single else [q for q in range(n) if border.carrier(mine, q) == rank]
    at_once = isl.size > 1 and isl.contiguous and segment == 0 and not shared.counts
    if not (single and at_once):  # the vendor's library puts the rank's own block into place, too
        b.island(StepKind.COPY, given, own)
    ready, sources = -1, {rank: given}
    if isl.staged and rank in carried:
        sources[rank] = blocks.scratch(Buffer.HOST_SCRATCH, rank)
        ready = b.island(StepKind.COPY, given, sources[rank])
    if at_once:
        whole = b.whole(Buffer.OUT, isl.ranks[0])
        src = given if single else own
        spread = b.island(
            StepKind.ALL_GATHER, src, whole, b.whole(Buffer.OUT, rank), as_bytes=not isl.moves(shared.dtype)
        )
    else:
        for j, r in enumerate(isl.ranks):
            spread = island_broadcast(b, isl, shared, blocks.at(Buffer.OUT, r, r), j)
    for q in carried:  # of mates that are not at the border
        if q != rank and topology.place(q)[0] == mine:
            sources[q], ready = blocks.at(Buffer.OUT, q, q), spread
            if isl.staged:
                pinned = blocks.scratch(Buffer.HOST_SCRATCH, q)
                ready = b.island(StepKind.COPY, sources[q], pinned)
                sources[q] = pinned
    flows, arrivals = [], []
    for q in carried:
        home = topology.place(q)[0]
        onward = [border.carrier(c, q) for c in border.children(mine, home)]
        if home == mine:
            flows += [Flow(FlowKind.SEND, Channel.RESULT, (to,), src=sources[q]) for to in onward]
            continue
        dst = blocks.at(Buffer.OUT, q, q)
        if isl.staged:
            arrivals.append((blocks.scratch(Buffer.HOST_SCRATCH, q), dst))
            dst = arrivals[-1][0]
        kind = FlowKind.FORWARD if onward else FlowKind.RECV
        flows.append(Flow(kind, Channel.RESULT, (border.carrier(border.parent(mine, home), q), *onward), dst=dst))
    wait = b.border(flows, ready)
    for staged, dst in arrivals:
        b.island(StepKind.COPY, staged, dst, wait=wait)
        wait = -1
    for q in range(n):
        if topology.place(q)[0] != mine:
            holder = topology.place(border.carrier(mine, q))[1]
            island_broadcast(b, isl, shared, blocks.at(Buffer.OUT, q, q), holder, wait)
            wait = -1
    names = ("island", "island") if single else ("direct", "bandwidth")
    return blocks.plan(shared, rank, names, b, segment, [rank], list(range(n)))
