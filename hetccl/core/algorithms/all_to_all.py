# SPDX-License-Identifier: Apache-2.0
"""all_to_all: the vendor's inside each island; between islands every block travels once, straight or, where two ranks
have no link, by way of an island mate of its sender that has one."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks, transfer
from hetccl.core.algorithms.common import Places, Shared, block_segment
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Island, Topology

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """sum n_c(n-n_c)k border bytes, n_c(n-n_c)k each way through island c. The count is one pair's; block q of IN goes
    to rank q, block q of OUT comes from there."""
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    n, single = topology.size, len(topology.islands) == 1
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    far = [q for q in range(n) if topology.place(q)[0] != mine]
    segment = block_segment(topology, shared)
    own = blocks.at(Buffer.IN, rank, rank * n + rank)
    b.island(StepKind.COPY, own, blocks.at(Buffer.OUT, rank, rank * n + rank))
    leaving: list[tuple[int, int, Slice]] = []  # (from, to, block) that I send over the border
    for q in far:
        for j, r in enumerate(isl.ranks):
            sender, which = bearer(topology, r, q), r * n + q
            src = blocks.at(Buffer.IN, q, which) if r == rank else own
            if sender != r:
                there = blocks.scratch(Buffer.DEVICE_SCRATCH, which) if sender == rank else own
                transfer(b, blocks, isl, shared, me, (j, topology.place(sender)[1]), src, there, which)
                src = there
            if sender == rank:
                leaving.append((r, q, src))
    if isl.staged and far:
        staged = [(r, q, src, blocks.scratch(Buffer.HOST_SCRATCH, r * n + q)) for r, q, src in leaving]
        for _, _, src, dst in staged:
            b.island(StepKind.COPY, src, dst)
        leaving = [(r, q, dst) for r, q, _, dst in staged]
    ready = len(b.steps) - 1
    if isl.size > 1:
        _inside(b, blocks, isl, shared, rank, me, n, isl.contiguous and isl.swaps and not segment and not shared.counts)
    flows = [Flow(FlowKind.SEND, Channel.RESULT, (q,), src=src) for _, q, src in leaving]
    copies = []
    for q in far:
        dst = blocks.at(Buffer.OUT, q, q * n + rank)
        if isl.staged:
            copies.append((blocks.scratch(Buffer.HOST_SCRATCH, q * n + rank), dst))
            dst = copies[-1][0]
        flows.append(Flow(FlowKind.RECV, Channel.RESULT, (bearer(topology, q, rank),), dst=dst))
    wait = b.border(flows, ready)
    for src, dst in copies:
        b.island(StepKind.COPY, src, dst, wait=wait)
        wait = -1
    names = ("island", "island") if single else ("direct", "bandwidth")
    inputs, outputs = [rank * n + q for q in range(n)], [q * n + rank for q in range(n)]
    return blocks.plan(shared, rank, names, b, segment, inputs, outputs)


def bearer(topology: Topology, r: int, q: int) -> int:
    """The rank of r's island that carries r's block over the border to q."""
    if topology.linked(r, q):
        return r
    ranks = topology.island_of(r).ranks
    return ranks[topology.place(q)[1] % len(ranks)]


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
