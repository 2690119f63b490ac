# SPDX-License-Identifier: Apache-2.0
"""What all algorithms share: the class of operation they plan, and reductions inside an island, native or composed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetccl.core.plan import Buffer, Lane, Plan, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Island, Topology
from hetccl.types import DType, Op, RedOp

__all__ = [
    "ONE_SEGMENT",
    "OWN_FACTOR",
    "Algorithm",
    "Places",
    "ReducePlace",
    "Shared",
    "averages_by",
    "combine_pieces",
    "combining_op",
    "divided",
    "gather_pieces",
    "in_scratch",
    "island_broadcast",
    "island_only",
    "needs_segments",
    "prescaled",
    "reduce_to",
    "segment_elements",
    "segment_of_blocks",
]

HALF_TYPES = frozenset(
    {
        DType.FLOAT16,
        DType.BFLOAT16,
        DType.FLOAT8_E4M3FN,
        DType.FLOAT8_E5M2,
        DType.FLOAT8_E4M3FNUZ,
        DType.FLOAT8_E5M2FNUZ,
    }
)


@dataclass(frozen=True)
class Shared:
    """The part of a collective that is equal on all ranks and decides its plan."""

    op: Op
    dtype: DType
    redop: RedOp
    root: int = 0
    segment_bytes: int = 0  # 0: the algorithm's own choice; ONE_SEGMENT: blocks lie side by side
    counts: tuple[int, ...] = ()  # lengths of the blocks where they differ; all_to_all: of pair (i, j) at i * size + j


@dataclass(frozen=True)
class Places:
    """Where the blocks of the v forms begin in this rank's buffers, in elements."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


Algorithm = Callable[[Topology, Shared, int, Places | None], Plan]
ONE_SEGMENT = -1
OWN_FACTOR = 0.0  # in place of a divisor: multiply by the rank's own factor


def combining_op(shared: Shared) -> RedOp:
    """The operator that partial results are combined with: an average is a sum that is scaled."""
    return RedOp.SUM if shared.redop in (RedOp.AVG, RedOp.PREMUL_SUM) else shared.redop


def averages_by(shared: Shared, size: int) -> tuple[float, float]:
    """(divisor of every input before the first sum, divisor of the result): a sum of halves would overflow."""
    if shared.redop == RedOp.PREMUL_SUM:
        return OWN_FACTOR, 1.0
    if shared.redop != RedOp.AVG:
        return 1.0, 1.0
    return (float(size), 1.0) if shared.dtype in HALF_TYPES else (1.0, float(size))


def segment_elements(island_sizes: Topology, shared: Shared, units: int, default: int = 0) -> int:
    """Elements of a segment: a multiple of what every plan divides it by. 0: one segment."""
    wanted = shared.segment_bytes or default
    if not wanted:
        return 0
    step = units * 16
    return max(1, wanted // shared.dtype.itemsize // step) * step


def needs_segments(topology: Topology) -> int:
    """Bytes of a segment where stages can overlap or memory is staged; 0 where the whole message is one segment."""
    if all(i.size == 1 and not i.staged for i in topology.islands):
        return 0
    return min(i.segment_bytes for i in topology.islands)


def segment_of_blocks(topology: Topology, shared: Shared) -> int:
    """Elements of a segment of operations on a block a rank; 0 where a block is one segment."""
    whole = all(i.host_memory for i in topology.islands) or needs_segments(topology) == 0
    if shared.segment_bytes == ONE_SEGMENT or len(topology.islands) == 1 or shared.counts or whole:
        return 0
    return segment_elements(topology, shared, 1, needs_segments(topology))


def prescaled(
    b: PlanBuilder, island: Island, shared: Shared, inputs: Sequence[Slice], divisor: float, shift: int = 0
) -> Buffer:
    """Scales the inputs into the same places of scratch where the operator asks for it, and says which buffer to read.

    On the device where it has a kernel for that; else by way of pinned memory, on the host.
    """
    if divisor == 1.0:
        return Buffer.IN
    there = [s.on(Buffer.DEVICE_SCRATCH, s.block) for s in inputs]
    if island.host_memory or (island.kernels and divisor != OWN_FACTOR):
        for src, dst in zip(inputs, there, strict=True):
            b.island(StepKind.SCALE, src, dst, shift=shift)
        return Buffer.DEVICE_SCRATCH
    pinned = [s.on(Buffer.HOST_SCRATCH, s.block) for s in inputs]
    wait = -1
    for src, dst in zip(inputs, pinned, strict=True):
        wait = b.island(StepKind.COPY, src, dst, shift=shift)
    done = -1
    for piece in pinned:
        done = b.border_step(StepKind.SCALE, piece, piece, wait=wait, shift=shift)
        wait = -1
    for src, dst in zip(pinned, there, strict=True):
        b.island(StepKind.COPY, src, dst, wait=done, shift=shift)
        done = -1
    return Buffer.DEVICE_SCRATCH


def divided(b: PlanBuilder, island: Island, out: Slice, pinned: Slice) -> int:
    """An average of one island: the sum in `out` divided in place, by way of `pinned` where the device has no kernel.
    Returns how many blocks of pinned memory that takes."""
    if island.host_memory or island.kernels:
        b.island(StepKind.SCALE, out, out)
        return 0
    ready = b.island(StepKind.COPY, out, pinned)
    done = b.border_step(StepKind.SCALE, pinned, pinned, wait=ready)
    b.island(StepKind.COPY, pinned, out, wait=done)
    return 1


def island_broadcast(
    b: PlanBuilder, island: Island, shared: Shared, buffer: Slice, root: int, wait: int = -1, shift: int = 0
) -> int:
    """Vendor broadcast in place. Nothing to do in an island of one rank."""
    if island.size == 1:
        return -1
    return b.island(
        StepKind.BROADCAST, buffer, buffer, root=root, wait=wait, shift=shift, as_bytes=not island.moves(shared.dtype)
    )


def island_only(b: PlanBuilder, step: int) -> int:
    """A border step waits only for steps of the island lane; its own lane is in order anyway."""
    while step >= 0 and b.steps[step].lane != Lane.ISLAND:
        step -= 1
    return step


def in_scratch(src: Slice, buffer: Buffer, block: int, width: int = 0) -> Slice:
    """The range of `src` in a block of scratch. `width`: of a block in the v forms, where ranges begin at 0."""
    if not width:
        return src.on(buffer, block)
    return Slice(int(buffer), block * width, 0, 0, src.b - src.a, 0)


def gather_pieces(b: PlanBuilder, island: Island, src: Slice, scratch: int, shift: int = 0, width: int = 0) -> int:
    """Every island rank gets every other's `src` into scratch blocks scratch.. (in rank order), moved as bytes."""
    last = -1
    for j in range(island.size):
        dst = in_scratch(src, Buffer.DEVICE_SCRATCH, scratch + j, width)
        last = b.island(StepKind.BROADCAST, src, dst, root=j, shift=shift, as_bytes=True)
    return last


@dataclass
class ReducePlace:
    """Where a reduction inside an island reads and writes, and which scratch it may use."""

    src: Slice
    dst: Slice  # device memory of the root
    root: int
    scratch: int  # first of island.size device scratch blocks, for the composed form
    host: int  # first of island.size host scratch blocks, likewise
    width: int = 0  # see in_scratch


def reduce_to(b: PlanBuilder, island: Island, shared: Shared, me: int, place: ReducePlace, shift: int = 0) -> None:
    """Reduces `src` of all island ranks to `dst` on the root: by the vendor's library, or, where that cannot, by
    moving the bytes and combining on the host in rank order."""
    op = combining_op(shared)
    if island.reduces(shared.dtype, op):
        b.island(StepKind.REDUCE, place.src, place.dst, root=place.root, shift=shift)
        return
    gather_pieces(b, island, place.src, place.scratch, shift, place.width)
    if me == place.root:
        combine_pieces(b, island, place.dst, place.scratch, place.host, shift, place.width)


def combine_pieces(
    b: PlanBuilder, island: Island, dst: Slice, scratch: int, host: int, shift: int = 0, width: int = 0
) -> None:
    """dst = operator over the gathered pieces, on the host."""
    stride = width or 1
    pieces = in_scratch(dst, Buffer.DEVICE_SCRATCH, scratch, width)
    if island.host_memory:
        b.island(StepKind.COMBINE, pieces, dst, n_src=island.size, stride=stride, shift=shift)
        return
    last = -1
    for j in range(island.size):
        piece = in_scratch(dst, Buffer.DEVICE_SCRATCH, scratch + j, width)
        last = b.island(StepKind.COPY, piece, in_scratch(dst, Buffer.HOST_SCRATCH, host + j, width), shift=shift)
    sums = in_scratch(dst, Buffer.HOST_SCRATCH, host, width)
    done = b.border_step(StepKind.COMBINE, sums, sums, wait=last, n_src=island.size, stride=stride, shift=shift)
    b.island(StepKind.COPY, sums, dst, wait=done, shift=shift)
