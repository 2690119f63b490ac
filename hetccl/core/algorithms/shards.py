# SPDX-License-Identifier: Apache-2.0
"""Shards: the elements of an all_reduce or a broadcast, dealt to an island's border ranks in proportion to speed."""

from __future__ import annotations

from itertools import pairwise

from hetccl.core.algorithms.common import Shared, combine_pieces, combining_op, gather_pieces, island_broadcast
from hetccl.core.plan import Buffer, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["Shards"]


class Shards:
    """How the elements are dealt to an island's border ranks. `scale`: units of the plan in one of the border's."""

    def __init__(self, topology: Topology, b: PlanBuilder, rank: int, scale: int = 1) -> None:
        self._island, self._b, self._me = topology.island_of(rank), b, topology.place(rank)[1]
        self._even = topology.border.even(self._island.index)
        cuts = [at * scale for at in topology.border.cuts(self._island.index)]
        self._of = {
            self._island.ranks.index(r): cut for r, cut in zip(self._island.borders, pairwise(cuts), strict=True)
        }

    def mine(self, buffer: Buffer) -> Slice | None:
        """This rank's shard; None if it is not at the border."""
        cut = self._of.get(self._me)
        return self._b.range(buffer, *cut) if cut else None

    def partials(self, shared: Shared, buffer: Buffer, scratch: int, shift: int) -> tuple[int, int]:
        """Each shard of the island's partial to its border rank: by the vendor's library, or, where that cannot, moved
        as bytes into the blocks `scratch`.. of device and host memory and combined. Returns the step after which this
        rank has its own (-1: it gets none so) and the blocks in use."""
        b, isl = self._b, self._island
        if isl.reduces(shared.dtype, combining_op(shared)):
            return self._reduce(buffer, shift), 0
        gather_pieces(b, isl, b.whole(buffer), scratch, shift)
        mine = self.mine(Buffer.OUT)
        if mine is None:
            return -1, isl.size
        combine_pieces(b, isl, mine, scratch, scratch, shift)
        return len(b.steps) - 1, isl.size

    def _reduce(self, buffer: Buffer, shift: int) -> int:
        b, last = self._b, -1
        if self._even:
            lo, hi = self._of[self._me]
            body = b.body(Buffer.OUT, 0, hi - lo)
            b.island(StepKind.REDUCE_SCATTER, b.whole(buffer), b.body(Buffer.OUT, lo, hi), body, shift=shift)
            tail = b.tail(Buffer.OUT)
            return b.island(StepKind.REDUCE, tail.on(buffer), tail, root=self._island.size - 1, shift=shift)
        for root, cut in self._of.items():
            shard = b.range(buffer, *cut)
            last = b.island(StepKind.REDUCE, shard, shard.on(Buffer.OUT), root=root, shift=shift)
        return last

    def spread(self, shared: Shared, wait: int) -> None:
        """Each border rank's shard of the sum to the whole island."""
        b, isl = self._b, self._island
        if self._even:
            lo, hi = self._of[self._me]
            b.island(
                StepKind.ALL_GATHER, b.body(Buffer.OUT, lo, hi), b.whole(Buffer.OUT), b.body(Buffer.OUT, 0, hi - lo),
                wait=wait, as_bytes=not isl.moves(shared.dtype),
            )  # fmt: skip
            island_broadcast(b, isl, shared, b.tail(Buffer.OUT), isl.size - 1)
            return
        for root, cut in self._of.items():
            island_broadcast(b, isl, shared, b.range(Buffer.OUT, *cut), root, wait)
            wait = -1
