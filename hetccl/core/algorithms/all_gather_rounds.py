# SPDX-License-Identifier: Apache-2.0
"""all_gather in rounds over a ring or a tree of islands, and through one head an island. Each block enters every other
island once; there the vendor's library spreads it, and not before the block has landed."""

from __future__ import annotations

from hetccl.core.algorithms.common import Places, Shared, island_broadcast
from hetccl.core.algorithms.in_rounds import HEADS, RING, TREE, InRounds, Way
from hetccl.core.algorithms.rounds import Round, blocks_slice, carrier, runs, side_by_side
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["heads", "ring", "tree"]


def ring(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)ns border bytes in C-1 rounds; each rank talks to the islands before and after its own only."""
    return _Gather(topology, shared, rank, places, RING).plan()


def tree(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)ns border bytes in ceil(log2 C) rounds."""
    return _Gather(topology, shared, rank, places, TREE).plan()


def heads(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)ns border bytes in one round, and in few messages: the fastest border rank of each island sends and receives
    all of its island's. Fewest calls; one rank's link carries an island's traffic."""
    return _Gather(topology, shared, rank, places, HEADS).plan()


class _Gather(InRounds):
    """The plan of one rank while it is made."""

    def __init__(self, topology: Topology, shared: Shared, rank: int, places: Places | None, way: Way) -> None:
        super().__init__(topology, shared, rank, places, way)
        self.single = len(topology.islands) == 1
        self.rounds: list[Round] = [] if self.single else self.schedule(self.mine, len(topology.islands))
        self.staged: dict[int, Slice] = {}  # rank: where its block can be sent from, of a device

    def plan(self) -> Plan:
        b, blocks, isl = self.b, self.blocks, self.isl
        given, own = blocks.at(Buffer.IN, 0, self.rank), blocks.at(Buffer.OUT, self.rank, self.rank)
        b.island(StepKind.COPY, given, own)
        mine = () if self.single else self._pieces(self.mine, self.mine)
        ready = self._stage(mine) if not self.by_heads else -1
        self._spread(self.mine)
        if self.by_heads:  # the head's island comes together before it leaves
            ready = self._stage(mine)
            if ready < 0 and mine:
                ready = len(b.steps) - 1
        for turn in self.rounds:
            flows = [
                Flow(FlowKind.SEND, Channel.RESULT, (self.carrier(to, r),), src=self._at(r, n))
                for to, parts in turn.sends
                for part in parts
                for r, n in self._pieces(part, to)
            ]
            arrivals = []
            for source, parts in turn.receives:
                for r, n in [piece for part in parts for piece in self._pieces(part, source)]:
                    dst = self._out(r, n)
                    if isl.staged:
                        self.staged[r] = self.scratch(Buffer.HOST_SCRATCH, r, n)
                        arrivals.append((self.staged[r], dst))
                        dst = self.staged[r]
                    flows.append(Flow(FlowKind.RECV, Channel.RESULT, (self.carrier(source, r),), dst=dst))
            wait = b.border(flows, ready)
            ready = -1 if flows else ready
            for src, dst in arrivals:
                b.island(StepKind.COPY, src, dst, wait=wait)
                wait = -1
            for _, parts in turn.receives:
                for part in parts:
                    wait = self._spread(part, wait)
        names = ("island", "island") if self.single else (self.name, "bandwidth")
        everybody = list(range(self.topology.size))
        return blocks.plan(self.shared, self.rank, names, b, self.segment, [self.rank], everybody)

    def _pieces(self, part: int, other: int) -> list[tuple[int, int]]:
        """(first rank, how many) of the blocks of island `part` that this rank carries to or from island `other`."""
        ranks = self.topology.islands[part].ranks
        if self.by_heads:
            return runs(ranks, self.whole) if self.rank == self.head else []
        if part == self.mine:
            return [(self.rank, 1)]
        return [(r, 1) for r in self.topology.border.carried(self.rank, part)]

    def _together(self, part: int) -> bool:
        if self.by_heads:  # its own island: all ranks have their own blocks
            return self.isl.contiguous
        return side_by_side(self.topology, self.mine, part)

    def _out(self, r: int, n: int) -> Slice:
        return blocks_slice(Buffer.OUT, r, n) if n > 1 else self.blocks.at(Buffer.OUT, r, r)

    def _at(self, r: int, n: int) -> Slice:
        return self.staged.get(r) or self._out(r, n)

    def _stage(self, pieces: list[tuple[int, int]] | tuple[()]) -> int:
        """Copies what leaves from here to pinned memory where the border cannot read the device's."""
        ready = -1
        if self.isl.staged:
            for r, n in pieces:
                self.staged[r] = self.scratch(Buffer.HOST_SCRATCH, r, n)
                ready = self.b.island(StepKind.COPY, self._out(r, n), self.staged[r])
        elif pieces:
            ready = len(self.b.steps) - 1
        return ready

    def _spread(self, part: int, wait: int = -1) -> int:
        """The blocks of island `part` from those ranks of mine that carry them to all of mine. Returns what a step
        after that still has to wait for."""
        b, isl, theirs = self.b, self.isl, self.topology.islands[part]
        if isl.size == 1:
            return -1
        if self.by_heads and part != self.mine:
            for r, n in runs(theirs.ranks, self.whole):
                island_broadcast(b, isl, self.shared, self._out(r, n), isl.ranks.index(self.head), wait)
                wait = -1
        elif self.whole and self._together(part):
            first = theirs.ranks[0]
            own = b.whole(Buffer.OUT, first + self.me)
            b.island(
                StepKind.ALL_GATHER, own, b.whole(Buffer.OUT, first), own, wait=wait,
                as_bytes=not isl.moves(self.shared.dtype),
            )  # fmt: skip
        else:
            for r in theirs.ranks:
                root = isl.ranks.index(r if part == self.mine else carrier(self.topology, self.mine, r))
                island_broadcast(b, isl, self.shared, self.blocks.at(Buffer.OUT, r, r), root, wait)
                wait = -1
        return -1
