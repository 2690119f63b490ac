# SPDX-License-Identifier: Apache-2.0
"""What the plans in rounds share: over a ring or a tree of islands, or in one round through one head an island."""

from __future__ import annotations

from dataclasses import dataclass

from hetccl.core.algorithms.blocks import Blocks
from hetccl.core.algorithms.common import Places, Shared, segment_of_blocks
from hetccl.core.algorithms.rounds import (
    Schedule,
    blocks_slice,
    carrier,
    need_all_at_border,
    need_mesh,
    ring,
    star,
    tree,
)
from hetccl.core.plan import Buffer, PlanBuilder, Slice
from hetccl.core.topology import Topology

__all__ = ["HEADS", "RING", "TREE", "InRounds", "Way"]


@dataclass(frozen=True)
class Way:
    """`by_heads`: the fastest border rank of each island carries all of its island's blocks."""

    name: str
    schedule: Schedule
    by_heads: bool = False


RING, TREE, HEADS = Way("ring", ring), Way("tree", tree), Way("heads", star, by_heads=True)


class InRounds:
    """The plan of one rank while it is made."""

    def __init__(self, topology: Topology, shared: Shared, rank: int, places: Places | None, way: Way) -> None:
        self.topology, self.shared, self.rank = topology, shared, rank
        self.name, self.schedule, self.by_heads = way.name, way.schedule, way.by_heads
        self.mine, self.me = topology.place(rank)
        self.isl = topology.islands[self.mine]
        self.b, self.blocks = PlanBuilder(), Blocks(shared, rank, topology.size, places)
        (need_mesh if self.by_heads else need_all_at_border)(topology, shared, self.name)
        self.head = topology.border.head(self.mine)
        self.segment = 0 if self.by_heads else segment_of_blocks(topology, shared)
        self.whole = self.segment == 0 and not shared.counts  # blocks lie side by side within a segment

    def carrier(self, island: int, r: int) -> int:
        """Who carries the block of rank `r` in an island."""
        return self.topology.border.head(island) if self.by_heads else carrier(self.topology, island, r)

    def scratch(self, buffer: Buffer, first: int, n: int) -> Slice:
        """New room for `n` blocks from that of rank `first` on, in scratch of the device or the host."""
        found = self.blocks.scratch(buffer, first)
        if n == 1:
            return found
        if buffer == Buffer.DEVICE_SCRATCH:
            self.blocks.device += n - 1
        else:
            self.blocks.host += n - 1
        return blocks_slice(buffer, found.block, n)
