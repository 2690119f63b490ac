# SPDX-License-Identifier: Apache-2.0
"""all_to_all: the vendor's inside each island; between islands every block travels once, straight or, where two ranks
have no link, by way of an island mate of its sender that has one."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks, transfer
from hetccl.core.algorithms.carriage import NOWHERE, Carriage
from hetccl.core.algorithms.common import Places, Shared, segment_of_blocks
from hetccl.core.plan import Buffer, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Island, Topology

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """sum n_c(n-n_c)k border bytes, n_c(n-n_c)k each way through island c; a block counts once a link on its way. The
    count is one pair's; block q of IN goes to rank q, block q of OUT comes from there."""
    mine, me = topology.place(rank)
    isl, border = topology.islands[mine], topology.border
    n, single = topology.size, len(topology.islands) == 1
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    segment = segment_of_blocks(topology, shared)
    at_once = isl.contiguous and isl.swaps and not segment and not shared.counts
    if isl.size == 1 or not at_once:  # the vendor's library moves the rank's own block, too
        which = rank * n + rank
        b.island(StepKind.COPY, blocks.at(Buffer.IN, rank, which), blocks.at(Buffer.OUT, rank, which))
    carriage = Carriage(topology, b, blocks, shared, rank)
    for q in range(n):  # the order in which blocks cross
        home = topology.place(q)[0]
        leaves = home != mine
        if border.mesh and not leaves and q != rank and border.at_border(q):
            continue  # comes to q straight from another island
        for r in range(n):
            away = topology.place(r)[0]
            if away == home or (border.mesh and leaves and away != mine):
                continue
            src = blocks.at(Buffer.IN, q, r * n + q) if r == rank else NOWHERE
            dst = blocks.at(Buffer.OUT, r, r * n + q) if q == rank else NOWHERE
            carriage.add(r * n + q, r, q, border.pair_path(r, q), src, dst)
    carriage.depart()
    if isl.size > 1:
        _inside(b, blocks, isl, shared, rank, me, n, at_once)
    carriage.cross()
    carriage.arrive()
    names = ("island", "island") if single else ("direct", "bandwidth")
    inputs, outputs = [rank * n + q for q in range(n)], [q * n + rank for q in range(n)]
    return blocks.plan(shared, rank, names, b, segment, inputs, outputs)


def _inside(
    b: PlanBuilder, blocks: Blocks, isl: Island, shared: Shared, rank: int, me: int, n: int, whole: bool
) -> None:
    """Blocks between ranks of one island: one vendor call if they lie side by side, else one after the other."""
    if whole:
        first = isl.ranks[0]
        b.island(
            StepKind.ALL_TO_ALL, b.whole(Buffer.IN, first), b.whole(Buffer.OUT, first),
            as_bytes=not isl.moves(shared.dtype),
        )  # fmt: skip
        return
    for i, r in enumerate(isl.ranks):
        for j, q in enumerate(isl.ranks):
            if r == q:
                continue
            src, dst = blocks.at(Buffer.IN, q, r * n + q), blocks.at(Buffer.OUT, r, r * n + q)
            transfer(b, blocks, isl, shared, me, (i, j), src, dst, r * n + q)
