# SPDX-License-Identifier: Apache-2.0
"""gather: every block enters the root's island once, and goes on to the root by the vendor's send and receive."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks, transfer
from hetccl.core.algorithms.carriage import NOWHERE, Carriage
from hetccl.core.algorithms.common import Places, Shared, segment_of_blocks
from hetccl.core.plan import Buffer, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(n-n_root)s border bytes, all into the root's island; a block counts once a link on its way. The count is one
    rank's; block r of the root's OUT is rank r's input."""
    root_island, root_index = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    n, single, at_root = topology.size, len(topology.islands) == 1, rank == shared.root
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    given = blocks.at(Buffer.IN, 0, rank)
    carriage = Carriage(topology, b, blocks, shared, rank)
    for q in range(n):
        if topology.place(q)[0] != root_island:
            there = blocks.at(Buffer.OUT, q, q) if at_root else NOWHERE
            carriage.add(q, q, shared.root, topology.border.path(q, shared.root), given, there)
    carriage.depart()
    if mine == root_island:
        if at_root:
            b.island(StepKind.COPY, given, blocks.at(Buffer.OUT, rank, rank))
        for j, r in enumerate(isl.ranks):
            if r != shared.root:
                there = blocks.at(Buffer.OUT, r, r) if at_root else NOWHERE
                transfer(b, blocks, isl, shared, me, (j, root_index), given, there, r)
    carriage.cross()
    carriage.arrive()
    names = ("island", "island") if single else ("direct", "bandwidth")
    segment = segment_of_blocks(topology, shared)
    return blocks.plan(shared, rank, names, b, segment, [rank], list(range(n)) if at_root else [])
