# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter: each block is reduced inside every island, and one partial an island goes straight to the block's
rank."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks
from hetccl.core.algorithms.common import (
    Places,
    ReducePlace,
    Shared,
    averages_by,
    block_segment,
    combining_op,
    prescaled,
    reduce_to,
)
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology
from hetccl.types import RedOp

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, (n-n_c)s out of island c. The count is one rank's; block r of IN goes to rank r."""
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    n, single = topology.size, len(topology.islands) == 1
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    out = blocks.at(Buffer.OUT, 0, rank)
    before, after = averages_by(shared, n)
    divisor = after
    averages = single and isl.size > 1 and shared.redop == RedOp.AVG and isl.reduces(shared.dtype, RedOp.AVG)
    if averages:
        before, after, divisor = 1.0, 1.0, 0.0
    native = isl.size > 1 and (averages or isl.reduces(shared.dtype, combining_op(shared)))
    segment = block_segment(topology, shared)
    buffer = prescaled(b, isl, shared, [blocks.at(Buffer.IN, q, q) for q in range(n)], before)
    if buffer != Buffer.IN:
        blocks.device = blocks.host = -(-blocks.extent(Buffer.IN, list(range(n))) // max(blocks.width, 1))
    mine_at: Slice = blocks.at(buffer, rank, rank)  # my block's partial of my island
    outgoing: list[tuple[int, Slice]] = []  # (rank, partial of its block) that I send
    fast = native and isl.contiguous and segment == 0 and not shared.counts
    if isl.size == 1:
        outgoing = [(q, blocks.at(buffer, q, q)) for q in range(n) if q != rank]
    else:
        mine_at = out
        if fast:
            b.island(StepKind.REDUCE_SCATTER, b.whole(buffer, isl.ranks[0]), out, out)
        if not fast or not single:
            outgoing = _reduced_blocks(topology, b, blocks, shared, rank, buffer, native, fast)
    ready = max((i for i, s in enumerate(b.steps) if s.lane == 0), default=-1)
    target = out
    if not single and isl.staged:
        staged = []
        for q, src in [*outgoing, (rank, mine_at)]:
            dst = blocks.scratch(Buffer.HOST_SCRATCH, q)
            ready = b.island(StepKind.COPY, src, dst)
            staged.append((q, dst))
        mine_at = target = staged[-1][1]
        outgoing = staged[:-1]
    if not single:
        peers = tuple(i.ranks[me % i.size] for i in topology.islands if i.index != mine)
        flows = [Flow(FlowKind.SEND, Channel.CONTRIBUTE, (q,), src=src) for q, src in outgoing]
        flows.append(Flow(FlowKind.OWN, Channel.CONTRIBUTE, peers, mine_at, target, mine, finish=after != 1.0))
        done = b.border(flows, ready)
        if isl.staged:
            b.island(StepKind.COPY, target, out, wait=done)
    else:
        if isl.size == 1:
            b.island(StepKind.COPY, mine_at, out)
        if after != 1.0:
            b.island(StepKind.SCALE, out, out)
    names = ("island", "island") if single else ("direct", "bandwidth")
    scale = before if before != 1.0 else after
    return blocks.plan(shared, rank, names, b, segment, list(range(n)), [rank], divisor, scale)


def _reduced_blocks(
    topology: Topology, b: PlanBuilder, blocks: Blocks, shared: Shared, rank: int, buffer: Buffer, native: bool,
    fast: bool,
) -> list[tuple[int, Slice]]:  # fmt: skip
    """Reduces every block to one rank of this island: its own rank, or the one that sends it. Returns what I send."""
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    outgoing = []
    scratch = blocks.device
    blocks.device += 0 if native else isl.size
    for q in range(topology.size):
        q_island, q_index = topology.place(q)
        if q_island == mine and fast:
            continue
        root, src = q_index % isl.size, blocks.at(buffer, q, q)
        if q == rank:
            dst = blocks.at(Buffer.OUT, 0, rank)
        elif root == me:
            dst = blocks.scratch(Buffer.DEVICE_SCRATCH, q)
            outgoing.append((q, dst))
        else:
            dst = blocks.dummy(q)  # a library may scribble into the output of ranks that are not its root
        if native:
            b.island(StepKind.REDUCE, src, dst, root=root)
            continue
        reduce_to(b, isl, shared, me, ReducePlace(src, dst, root, scratch, blocks.host, blocks.width))
        if root == me and not isl.host_memory:
            blocks.host += isl.size
    return outgoing
