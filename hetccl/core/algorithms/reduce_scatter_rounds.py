# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter in rounds over a ring or a tree of islands, and through one head an island. Each island reduces every
block once, and one partial of it leaves once; on its way other islands add theirs."""

from __future__ import annotations

from hetccl.core.algorithms.common import (
    Places,
    ReducePlace,
    Shared,
    averages_by,
    combining_op,
    island_broadcast,
    prescaled,
    reduce_to,
)
from hetccl.core.algorithms.in_rounds import HEADS, RING, TREE, InRounds, Way
from hetccl.core.algorithms.rounds import blocks_slice, reversed_rounds, runs, side_by_side
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Lane, Plan, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["heads", "ring", "tree"]


def ring(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes in C-1 rounds; each rank talks to the islands before and after its own only."""
    return _Scatter(topology, shared, rank, places, RING).plan()


def tree(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes in ceil(log2 C) rounds."""
    return _Scatter(topology, shared, rank, places, TREE).plan()


def heads(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes in one round, and in few messages: the fastest border rank of each island sends and receives
    all of its island's. Fewest calls; one rank's link carries an island's traffic."""
    return _Scatter(topology, shared, rank, places, HEADS).plan()


class _Scatter(InRounds):
    """The plan of one rank while it is made."""

    def __init__(self, topology: Topology, shared: Shared, rank: int, places: Places | None, way: Way) -> None:
        super().__init__(topology, shared, rank, places, way)
        self.native = self.isl.size > 1 and self.isl.reduces(shared.dtype, combining_op(shared))
        self.root = self.isl.ranks.index(self.head)
        self.merges = self.whole and all(i.size == 1 or i.reduces(shared.dtype, combining_op(shared))
                                         for i in topology.islands)  # fmt: skip
        self.held: dict[int, Slice] = {}  # first rank of a piece: where its partial is
        self.fresh: set[int] = set()  # pieces whose partial lies in the caller's input, which must stay as it is

    def plan(self) -> Plan:
        topology, b, blocks, isl = self.topology, self.b, self.blocks, self.isl
        before, after = averages_by(self.shared, topology.size)
        n = topology.size
        inputs = [blocks.at(Buffer.IN, q, q) for q in range(n)]
        if self.whole and before != 1.0:
            inputs = [blocks_slice(Buffer.IN, 0, n)]
        buffer = prescaled(b, isl, self.shared, inputs, before)
        if buffer != Buffer.IN:
            blocks.device = blocks.host = -(-blocks.extent(Buffer.IN, list(range(n))) // max(blocks.width, 1))
        self._reduce(buffer)
        ready = max((i for i, s in enumerate(b.steps) if s.lane == Lane.ISLAND), default=-1)
        if isl.staged:
            for first, count in self._all_pieces():
                src = self.held[first]
                self.held[first] = self.scratch(Buffer.HOST_SCRATCH, first, count)
                ready = b.island(StepKind.COPY, src, self.held[first])
            self.fresh.clear()
        done = self._border(after != 1.0, ready)
        self._deliver(done)
        scale = before if before != 1.0 else after
        names = (self.name, "bandwidth")
        return blocks.plan(self.shared, self.rank, names, b, self.segment, list(range(n)), [self.rank], after, scale)

    def _pieces(self, part: int) -> list[tuple[int, int]]:
        """(first rank, how many) of the blocks of island `part` that this rank carries."""
        ranks = self.topology.islands[part].ranks
        if self.by_heads:
            return runs(ranks, self.merges) if self.rank == self.head else []
        return [(r, 1) for r in self.topology.border.carried(self.rank, part)]

    def _all_pieces(self) -> list[tuple[int, int]]:
        return [piece for i in self.topology.islands for piece in self._pieces(i.index)]

    def _at(self, buffer: Buffer, first: int, n: int) -> Slice:
        return blocks_slice(buffer, first, n) if n > 1 else self.blocks.at(buffer, first, first)

    def _reduce(self, buffer: Buffer) -> None:
        """Every block's partial of my island to the rank of mine that carries it."""
        b, isl = self.b, self.isl
        if isl.size == 1:
            for first, n in self._all_pieces():
                self.held[first] = self._at(buffer, first, n)
                if buffer == Buffer.IN:
                    self.fresh.add(first)
            return
        if self.by_heads and self.merges:
            n = self.topology.size
            src = blocks_slice(buffer, 0, n)
            dst = self.scratch(Buffer.DEVICE_SCRATCH, 0, n)
            b.island(StepKind.REDUCE, src, dst, root=self.root)
            if self.rank == self.head:
                self.held = {f: blocks_slice(Buffer.DEVICE_SCRATCH, dst.block + f, k) for f, k in self._all_pieces()}
            return
        scratch = self.blocks.device
        self.blocks.device += 0 if self.native else isl.size
        for theirs in self.topology.islands:
            one_call = self.native and self.whole and not self.by_heads
            if one_call and side_by_side(self.topology, isl.index, theirs.index):
                at = theirs.ranks[0] + self.me
                dst = self._target(at, 1)
                b.island(StepKind.REDUCE_SCATTER, b.whole(buffer, theirs.ranks[0]), dst, dst)
                self.held[at] = dst
                continue
            for r in theirs.ranks:
                root = isl.ranks.index(self.carrier(isl.index, r))
                src = self.blocks.at(buffer, r, r)
                dst = self._target(r, 1) if root == self.me else self.blocks.dummy(r)
                if root == self.me:
                    self.held[r] = dst
                if self.native:  # a library may scribble into the output of ranks that are not its root
                    b.island(StepKind.REDUCE, src, dst, root=root)
                    continue
                place = ReducePlace(src, dst, root, scratch, self.blocks.host, self.blocks.width)
                reduce_to(b, isl, self.shared, self.me, place)
                if root == self.me and not isl.host_memory:
                    self.blocks.host += isl.size

    def _target(self, first: int, n: int) -> Slice:
        """Where the partial of a piece goes: straight to the output where it stays."""
        if first == self.rank and n == 1 and not (self.by_heads and self.isl.size > 1):
            return self.blocks.at(Buffer.OUT, 0, first)
        return self.scratch(Buffer.DEVICE_SCRATCH, first, n)

    def _border(self, finish: bool, ready: int) -> int:
        b, c_n = self.b, len(self.topology.islands)
        rounds = reversed_rounds(self.schedule, self.mine, c_n)
        last = max(i for i, r in enumerate(rounds) if any(self.mine in parts for _, parts in r.receives))
        done = -1
        for number, turn in enumerate(rounds):
            flows = [
                Flow(FlowKind.SEND, Channel.CONTRIBUTE, (self.carrier(to, first),), src=self.held[first])
                for to, parts in turn.sends
                for part in parts
                for first, _ in self._pieces(part)
            ]
            sources: dict[int, list[int]] = {}
            for source, parts in turn.receives:
                for part in parts:
                    sources.setdefault(part, []).append(source)
            for part, islands in sources.items():
                islands.sort()
                for first, n in self._pieces(part):
                    peers = tuple(self.carrier(i, first) for i in islands)
                    src = self.held[first]
                    if first in self.fresh:
                        self.fresh.discard(first)
                        self.held[first] = self._target(first, n)
                    ends = finish and part == self.mine and number == last
                    position = sum(i < self.mine for i in islands)
                    flows.append(
                        Flow(FlowKind.OWN, Channel.CONTRIBUTE, peers, src, self.held[first], position, finish=ends)
                    )
            if flows:
                done, ready = b.border(flows, ready), -1
        return done

    def _deliver(self, done: int) -> None:
        """The finished blocks of my island to their ranks."""
        b, isl, blocks = self.b, self.isl, self.blocks
        out = blocks.at(Buffer.OUT, 0, self.rank)
        if not self.by_heads or isl.size == 1:
            if self.held[self.rank] != out:
                b.island(StepKind.COPY, self.held[self.rank], out, wait=done)
            return
        for first, n in runs(isl.ranks, self.merges):
            there = self.scratch(Buffer.DEVICE_SCRATCH, first, n)
            wait = -1
            if self.rank == self.head:
                if not isl.staged:
                    there, wait = self.held[first], done
                else:
                    b.island(StepKind.COPY, self.held[first], there, wait=done)
            island_broadcast(b, isl, self.shared, there, self.root, wait)
            if first <= self.rank < first + n:
                at = there.block + (self.rank - first if n > 1 else 0)
                src = blocks.scratch_at(Buffer.DEVICE_SCRATCH, at // max(blocks.width, 1), self.rank)
                b.island(StepKind.COPY, src, out)
