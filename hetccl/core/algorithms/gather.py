# SPDX-License-Identifier: Apache-2.0
"""gather: every block enters the root's island once, and goes on to the root by the vendor's send and receive."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks, transfer
from hetccl.core.algorithms.common import Places, Shared, block_segment
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(n-n_root)s border bytes, all into the root's island. The count is one rank's; block r of the root's OUT is
    rank r's input."""
    root_island, root_index = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    n, single, at_root = topology.size, len(topology.islands) == 1, rank == shared.root
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    given = blocks.at(Buffer.IN, 0, rank)
    segment = block_segment(topology, shared)
    if mine != root_island:
        ready = -1
        if isl.staged:
            staged = blocks.scratch(Buffer.HOST_SCRATCH, rank)
            ready = b.island(StepKind.COPY, given, staged)
            given = staged
        b.border([Flow(FlowKind.SEND, Channel.RESULT, (entry(topology, shared.root, rank),), src=given)], ready)
    else:
        if at_root:
            b.island(StepKind.COPY, given, blocks.at(Buffer.OUT, rank, rank))
        for j, r in enumerate(isl.ranks):
            if r != shared.root:
                there = blocks.at(Buffer.OUT, r, r) if at_root else given
                transfer(b, blocks, isl, shared, me, (j, root_index), given, there, r)
        flows, copies, held = [], [], {}
        far = [q for q in range(n) if topology.place(q)[0] != root_island]
        for q in far:
            if entry(topology, shared.root, q) != rank:
                continue
            dst = blocks.at(Buffer.OUT, q, q) if at_root else blocks.scratch(Buffer.DEVICE_SCRATCH, q)
            held[q] = dst
            if isl.staged:
                copies.append((blocks.scratch(Buffer.HOST_SCRATCH, q), dst))
                dst = copies[-1][0]
            flows.append(Flow(FlowKind.RECV, Channel.RESULT, (q,), dst=dst))
        wait = b.border(flows)
        for src, dst in copies:
            b.island(StepKind.COPY, src, dst, wait=wait)
            wait = -1
        for q in far:
            holder = entry(topology, shared.root, q)
            if holder != shared.root:
                there = blocks.at(Buffer.OUT, q, q) if at_root else given
                ends = (topology.place(holder)[1], root_index)
                transfer(b, blocks, isl, shared, me, ends, held.get(q, given), there, q, wait if holder == rank else -1)
    names = ("island", "island") if single else ("direct", "bandwidth")
    return blocks.plan(shared, rank, names, b, segment, [rank], list(range(n)) if at_root else [])


def entry(topology: Topology, root: int, q: int) -> int:
    """The rank of the root's island that is linked with rank q of another island: the root itself if it can be."""
    if topology.linked(root, q):
        return root
    ranks = topology.island_of(root).ranks
    return ranks[topology.place(q)[1] % len(ranks)]
