# SPDX-License-Identifier: Apache-2.0
"""scatter: every block leaves the root's island once, straight to its rank."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks, transfer
from hetccl.core.algorithms.common import Places, Shared, block_segment
from hetccl.core.algorithms.gather import entry
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(n-n_root)s border bytes, all out of the root's island. The count is one rank's; block r of the root's IN goes
    to rank r."""
    root_island, root_index = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    n, single, at_root = topology.size, len(topology.islands) == 1, rank == shared.root
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    out = blocks.at(Buffer.OUT, 0, rank)
    segment = block_segment(topology, shared)
    if mine != root_island:
        target = out if not isl.staged else blocks.scratch(Buffer.HOST_SCRATCH, rank)
        source = entry(topology, shared.root, rank)
        done = b.border([Flow(FlowKind.RECV, Channel.RESULT, (source,), dst=target)])
        if isl.staged:
            b.island(StepKind.COPY, target, out, wait=done)
    else:
        leaving: list[tuple[int, Slice]] = []  # (rank, its block) that I send
        for q in range(n):
            if topology.place(q)[0] == root_island:
                continue
            src = blocks.at(Buffer.IN, q, q) if at_root else out
            sender = entry(topology, shared.root, q)
            if sender != shared.root:
                there = blocks.scratch(Buffer.DEVICE_SCRATCH, q) if sender == rank else out
                transfer(b, blocks, isl, shared, me, (root_index, topology.place(sender)[1]), src, there, q)
                src = there
            if sender == rank:
                leaving.append((q, src))
        if isl.staged:
            staged = [(q, src, blocks.scratch(Buffer.HOST_SCRATCH, q)) for q, src in leaving]
            for _, src, dst in staged:
                b.island(StepKind.COPY, src, dst)
            leaving = [(q, dst) for q, _, dst in staged]
        ready = len(b.steps) - 1
        for j, r in enumerate(isl.ranks):
            if r != shared.root:
                src = blocks.at(Buffer.IN, r, r) if at_root else out
                transfer(b, blocks, isl, shared, me, (root_index, j), src, out, r)
        if at_root:
            b.island(StepKind.COPY, blocks.at(Buffer.IN, rank, rank), out)
        b.border([Flow(FlowKind.SEND, Channel.RESULT, (q,), src=src) for q, src in leaving], ready)
    names = ("island", "island") if single else ("direct", "bandwidth")
    return blocks.plan(shared, rank, names, b, segment, list(range(n)) if at_root else [], [rank])
