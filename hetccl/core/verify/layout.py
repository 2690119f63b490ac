# SPDX-License-Identifier: Apache-2.0
"""Where the slices of one rank's plan lie, exactly as the executor computes addresses (hx_address), and who may write
there."""

from __future__ import annotations

from typing import NamedTuple

from hetccl.core.plan import Buffer, Plan, Slice, slice_range
from hetccl.core.verify.memory import Fault, Region
from hetccl.core.verify.spec import Sizes
from hetccl.core.verify.values import Values

__all__ = ["Layout", "Place"]


class Place(NamedTuple):
    """Elements [lo, hi) of a region."""

    region: Region
    lo: int
    hi: int

    def of(self, length: int) -> Place:
        return Place(self.region, self.lo, self.lo + length)


class Layout:
    """Memory of one rank in one operation. The v forms are bound with a count of 1: their slices are in elements."""

    def __init__(self, plan: Plan, sizes: Sizes, in_place: bool, values: Values) -> None:
        rank = plan.rank
        self.plan, self.count, self.sizes = plan, sizes.count, sizes
        self.lengths = plan.segments(sizes.count)
        self.segment = plan.segment if plan.segment and plan.segment < sizes.count else max(sizes.count, 1)
        self.depth = max((s.shift for s in plan.steps), default=0) + 1
        at_in, at_out = sizes.in_place(rank) if in_place else (0, 0)
        out = Region("output")
        if sizes.spec.one_buffer:
            inp = out
        elif in_place and sizes.spec.in_place:
            inp = out = Region("buffer")
        else:
            inp = Region("input")
        self._input = Place(inp, at_in, at_in + sizes.extent(rank, out=False))
        inp.fill(self._input.lo, self._input.hi, values.input(rank), 0)
        self.output = Place(out, at_out, at_out + sizes.extent(rank, out=True))
        # neighbours are one: a call may write many blocks
        self._writable: list[tuple[int, int]] = []
        for lo, hi in sorted((at_out + lo, at_out + hi) for lo, hi in sizes.blocks(rank, out=True) if hi > lo):
            if self._writable and self._writable[-1][1] == lo:
                lo = self._writable.pop()[0]
            self._writable.append((lo, hi))
        self._scratch = {b: Region(b.name.lower()) for b in (Buffer.DEVICE_SCRATCH, Buffer.HOST_SCRATCH)}

    def length(self, s: Slice, segment: int) -> int:
        lo, hi = slice_range(s, self.lengths[segment], self.plan.units)
        return hi - lo

    def offset(self, s: Slice, segment: int) -> int:
        """The first element of a slice, counted from the beginning of its buffer."""
        lo, _ = slice_range(s, self.lengths[segment], self.plan.units)
        if s.buffer in (Buffer.IN, Buffer.OUT):
            return s.block * self.count + segment * self.segment + lo
        return (segment % self.depth * self._blocks(s) + s.block) * self.segment + lo

    def place(self, s: Slice, segment: int, length: int = -1) -> Place:
        """Where a slice lies. With `length`, that many elements from its start."""
        if s.buffer in (Buffer.IN, Buffer.OUT):
            home = self._input if s.buffer == Buffer.IN else self.output
            where, base, first, last = home.region, home.lo, home.lo, home.hi
        elif s.buffer in (Buffer.DEVICE_SCRATCH, Buffer.HOST_SCRATCH):
            where, base = self._scratch[Buffer(s.buffer)], 0
            slot = segment % self.depth * self._blocks(s)
            first, last = slot * self.segment, (slot + self._blocks(s)) * self.segment
        else:
            raise Fault("uses a slice that names no buffer")
        lo = base + self.offset(s, segment)
        place = Place(where, lo, lo + (length if length >= 0 else self.length(s, segment)))
        if place.hi > place.lo and not (s.block >= 0 and first <= place.lo and place.hi <= last):
            raise Fault(f"reaches {where.name}[{place.lo}:{place.hi}], but only [{first}:{last}] is its to use")
        return place

    def _blocks(self, s: Slice) -> int:
        return self.plan.device_blocks if s.buffer == Buffer.DEVICE_SCRATCH else self.plan.host_blocks

    def stride(self, s: Slice) -> int:
        """Elements between blocks of a buffer."""
        return self.count if s.buffer in (Buffer.IN, Buffer.OUT) else self.segment

    def check_writable(self, place: Place) -> None:
        if place.hi <= place.lo or place.region in self._scratch.values():
            return
        mine = place.region is self.output.region and any(
            lo <= place.lo and place.hi <= hi for lo, hi in self._writable
        )
        if not mine:
            raise Fault(f"writes {place.region.name}[{place.lo}:{place.hi}], which is not output")
