# SPDX-License-Identifier: Apache-2.0
"""Where each rank's block lies: equal blocks of `count` elements, or the v forms' blocks of given lengths and places.

A plan of the v forms is bound with a count of 1: its slices are in elements, and a block of scratch is as wide as the
longest block.
"""

from __future__ import annotations

import zlib
from itertools import accumulate

from hetccl.core.algorithms.common import Places, Shared
from hetccl.core.plan import Buffer, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Island
from hetccl.types import Op

__all__ = ["Blocks", "packed", "transfer"]


class Blocks:
    """The blocks of one rank's buffers, and the scratch blocks that its plan has used so far."""

    def __init__(self, shared: Shared, rank: int, size: int, places: Places | None) -> None:
        self.counts = shared.counts
        self.width = max(shared.counts, default=0) if shared.counts else 0
        self._places = places or packed(shared, rank, size)
        self._dummy: Slice | None = None
        self.device = self.host = 0  # scratch blocks in use

    def at(self, buffer: Buffer, place: int, which: int) -> Slice:
        """Block `which` at its `place` in IN, OUT, or a copy of IN in scratch."""
        if not self.counts:
            return Slice(int(buffer), place, 0, 0, 1, 1)
        start = (self._places.outputs if buffer == Buffer.OUT else self._places.inputs)[place]
        return Slice(int(buffer), 0, start, 0, start + self.counts[which], 0)

    def scratch(self, buffer: Buffer, which: int) -> Slice:
        """Fresh scratch for block `which`."""
        if buffer == Buffer.DEVICE_SCRATCH:
            block, self.device = self.device, self.device + 1
        else:
            block, self.host = self.host, self.host + 1
        return self.scratch_at(buffer, block, which)

    def scratch_at(self, buffer: Buffer, block: int, which: int) -> Slice:
        if not self.counts:
            return Slice(int(buffer), block, 0, 0, 1, 1)
        return Slice(int(buffer), block * self.width, 0, 0, self.counts[which], 0)

    def dummy(self, which: int) -> Slice:
        """Device scratch for what nobody reads."""
        if self._dummy is None:
            self._dummy = self.scratch(Buffer.DEVICE_SCRATCH, which)
        return self.scratch_at(Buffer.DEVICE_SCRATCH, self._dummy.block // max(self.width, 1), which)

    def extent(self, buffer: Buffer, whiches: list[int]) -> int:
        """How far the blocks `whiches`, which lie at places 0, 1, ..., reach: in counts."""
        if not self.counts:
            return len(whiches)
        return max((self.at(buffer, place, which).b for place, which in enumerate(whiches)), default=0)

    def plan(
        self, shared: Shared, rank: int, names: tuple[str, str], b: PlanBuilder, segment: int, inputs: list[int],
        outputs: list[int], divisor: float = 1.0, scale: float = 1.0,
    ) -> Plan:  # fmt: skip
        """The finished plan. `inputs` and `outputs`: which blocks this rank's buffers hold."""
        out = self.extent(Buffer.OUT, outputs)
        return Plan(
            shared.op,
            shared.dtype,
            shared.redop,
            shared.root,
            rank,
            *names,
            1,
            segment,
            tuple(b.steps),
            tuple(b.flows),
            in_blocks=self.extent(Buffer.IN, inputs),
            out_blocks=out,
            device_blocks=self.device * (self.width if self.counts else 1),
            host_blocks=self.host * (self.width if self.counts else 1),
            divisor=divisor,
            scale_divisor=scale,
            reads_out=bool(self.counts) and sum(self.counts[which] for which in outputs) < out,
            digest=zlib.crc32(repr(self.counts).encode()) if self.counts else 0,
        )


def packed(shared: Shared, rank: int, size: int) -> Places:
    """Blocks one after the other, in the order of ranks."""
    counts = shared.counts
    if shared.op == Op.ALL_TO_ALL:
        return Places(_starts(counts[rank * size : (rank + 1) * size]), _starts(counts[rank::size]))
    many, one = _starts(counts), (0,)
    return Places(one, many) if shared.op in (Op.ALL_GATHER, Op.GATHER) else Places(many, one)


def transfer(
    b: PlanBuilder, blocks: Blocks, island: Island, shared: Shared, me: int, ends: tuple[int, int], src: Slice,
    dst: Slice, which: int, wait: int = -1,
) -> int:  # fmt: skip
    """Moves a block from island rank ends[0] to ends[1]. Every rank of the island has the step; `src` counts on the
    first only, `dst` on the second. A library without send and receive broadcasts. Returns the step's index."""
    length = blocks.scratch_at(Buffer.DEVICE_SCRATCH, 0, which)
    nowhere = Slice(-1)
    as_bytes = not island.moves(shared.dtype)
    if island.transfers:
        return b.island(
            StepKind.TRANSFER, src if me == ends[0] else nowhere, dst if me == ends[1] else nowhere, length,
            root=ends[0], to=ends[1], wait=wait, as_bytes=as_bytes,
        )  # fmt: skip
    if me == ends[0]:
        dst = src
    elif me != ends[1]:
        dst = blocks.dummy(which)
    return b.island(
        StepKind.BROADCAST, src if me == ends[0] else dst, dst, length, root=ends[0], wait=wait, as_bytes=as_bytes
    )


def _starts(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))[:-1]
