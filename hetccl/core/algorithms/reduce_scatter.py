# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter: each block is reduced inside every island, and one partial an island goes straight to the block's
rank."""

from __future__ import annotations

from hetccl.core.algorithms.blocks import Blocks, transfer
from hetccl.core.algorithms.common import (
    Places,
    ReducePlace,
    Shared,
    averages_by,
    combining_op,
    divided,
    prescaled,
    reduce_to,
    segment_of_blocks,
)
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Lane, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology
from hetccl.types import RedOp

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, (n-n_c)s out of island c; where links are missing, partials are combined along a tree of
    islands. The count is one rank's; block r of IN goes to rank r."""
    mine = topology.place(rank)[0]
    isl, border = topology.islands[mine], topology.border
    n, single = topology.size, len(topology.islands) == 1
    b, blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
    out = blocks.at(Buffer.OUT, 0, rank)
    before, after = averages_by(shared, n)
    divisor = after
    averages = single and isl.size > 1 and shared.redop == RedOp.AVG and isl.reduces(shared.dtype, RedOp.AVG)
    if averages:
        before, after, divisor = 1.0, 1.0, 0.0
    native = isl.size > 1 and (averages or isl.reduces(shared.dtype, combining_op(shared)))
    segment = segment_of_blocks(topology, shared)
    holders = [q if single and topology.place(q)[0] == mine else border.carrier(mine, q) for q in range(n)]
    buffer = prescaled(b, isl, shared, [blocks.at(Buffer.IN, q, q) for q in range(n)], before)
    if buffer != Buffer.IN:
        blocks.device = blocks.host = -(-blocks.extent(Buffer.IN, list(range(n))) // max(blocks.width, 1))
    partials: dict[int, Slice] = {}  # by block: what this rank holds of my island's partials
    if isl.size == 1:
        partials = {q: blocks.at(buffer, q, q) for q in range(n)}
    else:
        fast = native and isl.contiguous and segment == 0 and not shared.counts
        if fast and all(holders[q] == q for q in isl.ranks):
            b.island(StepKind.REDUCE_SCATTER, b.whole(buffer, isl.ranks[0]), out, out)
            partials[rank] = out
        else:
            fast = False
        partials |= _reduced_blocks(topology, b, blocks, shared, rank, buffer, native, fast, holders)
    if single:
        if isl.size == 1:
            b.island(StepKind.COPY, partials[rank], out)
        if after != 1.0:
            blocks.host += divided(b, isl, out, blocks.scratch_at(Buffer.HOST_SCRATCH, blocks.host, rank))
    else:
        _cross(topology, b, blocks, shared, rank, partials, holders, after != 1.0)
    names = ("island", "island") if single else ("direct", "bandwidth")
    scale = before if before != 1.0 else after
    return blocks.plan(shared, rank, names, b, segment, list(range(n)), [rank], divisor, scale)


def _reduced_blocks(
    topology: Topology, b: PlanBuilder, blocks: Blocks, shared: Shared, rank: int, buffer: Buffer, native: bool,
    fast: bool, holders: list[int],
) -> dict[int, Slice]:  # fmt: skip
    """Reduces every block to its holder in this island. Returns what this rank holds. `fast`: own blocks are done."""
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    held = {}
    scratch = blocks.device
    blocks.device += 0 if native else isl.size
    for q in range(topology.size):
        if topology.place(q)[0] == mine and fast:
            continue
        root, src = topology.place(holders[q])[1], blocks.at(buffer, q, q)
        if root == me:
            dst = blocks.at(Buffer.OUT, 0, rank) if q == rank else blocks.scratch(Buffer.DEVICE_SCRATCH, q)
            held[q] = dst
        else:
            dst = blocks.dummy(q)  # a library may scribble into the output of ranks that are not its root
        if native:
            b.island(StepKind.REDUCE, src, dst, root=root)
            continue
        reduce_to(b, isl, shared, me, ReducePlace(src, dst, root, scratch, blocks.host, blocks.width))
        if root == me and not isl.host_memory:
            blocks.host += isl.size
    return held


def _cross(
    topology: Topology, b: PlanBuilder, blocks: Blocks, shared: Shared, rank: int, partials: dict[int, Slice],
    holders: list[int], finish: bool,
) -> None:  # fmt: skip
    """Partials to the carrier of their block in the block's own island, which combines, and on to its rank."""
    mine, me = topology.place(rank)
    isl, border = topology.islands[mine], topology.border
    out = blocks.at(Buffer.OUT, 0, rank)
    ready = max((i for i, s in enumerate(b.steps) if s.lane == Lane.ISLAND), default=-1)
    staged = dict(partials)
    targets = {q: out if q == rank else partials[q] for q in partials}  # where a sum lies in the end, on this rank
    if isl.staged:
        for q in [*(q for q in partials if q != rank), *(q for q in partials if q == rank)]:
            staged[q] = blocks.scratch(Buffer.HOST_SCRATCH, q)
            ready = b.island(StepKind.COPY, partials[q], staged[q])
    flows, sums = [], []
    for q in sorted(partials):
        home = topology.place(q)[0]
        below = border.children(mine, home)
        peers = tuple(border.carrier(c, q) for c in below)
        position = sum(c < mine for c in below)
        if home == mine:
            sums.append(q)
            dst = targets[q] if not isl.staged else staged[q]
            flows.append(Flow(FlowKind.OWN, Channel.CONTRIBUTE, peers, staged[q], dst, position, finish=finish))
            continue
        up = border.carrier(border.parent(mine, home), q)
        if peers:
            src = dst = staged[q]
            if src.buffer == Buffer.IN:  # the caller's input stays as it is
                dst = blocks.scratch(Buffer.DEVICE_SCRATCH, q)
            flows.append(Flow(FlowKind.PASS, Channel.CONTRIBUTE, (*peers, up), src, dst, position))
        else:
            flows.append(Flow(FlowKind.SEND, Channel.CONTRIBUTE, (up,), src=staged[q]))
    if border.mesh:
        flows.sort(key=lambda f: f.kind != FlowKind.SEND)  # what others wait for goes first
    done = b.border(flows, ready)
    if isl.staged:
        for q in sums:
            b.island(StepKind.COPY, staged[q], targets[q], wait=done)
            done = -1
    for q in isl.ranks:
        if holders[q] != q:
            ends = (topology.place(holders[q])[1], topology.place(q)[1])
            transfer(b, blocks, isl, shared, me, ends, targets.get(q, out), out, q, done)
            done = -1  # whoever has something to do at the border has done that before the first
