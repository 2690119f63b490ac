# SPDX-License-Identifier: Apache-2.0
"""What all algorithms share: the class of operation they plan, and reductions inside an island, native or composed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetccl.core.plan import Buffer, Lane, Plan, PlanBuilder, Slice, Step, StepKind
from hetccl.core.topology import Island, Topology
from hetccl.errors import UnsupportedError
from hetccl.types import DType, Op, RedOp

__all__ = [
    "Algorithm",
    "ReducePlace",
    "Shared",
    "averages_by",
    "combine_pieces",
    "combining_op",
    "gather_pieces",
    "island_broadcast",
    "needs_segments",
    "prescaled",
    "reduce_to",
    "segment_elements",
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
    segment_bytes: int = 0  # 0: the algorithm's own choice


Algorithm = Callable[[Topology, Shared, int], Plan]


def combining_op(shared: Shared) -> RedOp:
    """The operator that partial results are combined with: an average is a sum that is scaled."""
    return RedOp.SUM if shared.redop == RedOp.AVG else shared.redop


def averages_by(shared: Shared, size: int) -> tuple[float, float]:
    """(divisor of every input before the first sum, divisor of the result): a sum of halves would overflow."""
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
    if all(i.size == 1 and i.host_memory for i in topology.islands):
        return 0
    return min(i.segment_bytes for i in topology.islands)


def prescaled(
    b: PlanBuilder, island: Island, shared: Shared, blocks: int, divisor: float, shift: int = 0
) -> tuple[Buffer, int]:
    """Scales the inputs into scratch where the average asks for it. Returns the buffer to read and scratch blocks
    used."""
    if divisor == 1.0:
        return Buffer.IN, 0
    if not island.host_memory and not island.kernels:
        raise UnsupportedError(
            f"avg of {shared.dtype.label} needs a device kernel to scale, which vendor {island.vendor} has not; "
            "use sum and divide",
            vendor=island.vendor,
        )
    for block in range(blocks):
        b.island(StepKind.SCALE, b.whole(Buffer.IN, block), b.whole(Buffer.DEVICE_SCRATCH, block), shift=shift)
    return Buffer.DEVICE_SCRATCH, blocks


def island_broadcast(
    b: PlanBuilder, island: Island, shared: Shared, buffer: Slice, root: int, wait: int = -1, shift: int = 0
) -> int:
    """Vendor broadcast in place. Nothing to do in an island of one rank."""
    if island.size == 1:
        return -1
    return b.island(
        StepKind.BROADCAST, buffer, buffer, root=root, wait=wait, shift=shift, as_bytes=not island.moves(shared.dtype)
    )


def gather_pieces(b: PlanBuilder, island: Island, shared: Shared, src: Slice, scratch: int, shift: int) -> int:
    """Every island rank gets every other's `src` into scratch blocks scratch.. (in rank order), moved as bytes."""
    last = -1
    for j in range(island.size):
        dst = src.on(Buffer.DEVICE_SCRATCH, scratch + j)
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


def reduce_to(b: PlanBuilder, island: Island, shared: Shared, me: int, place: ReducePlace, shift: int = 0) -> None:
    """Reduces `src` of all island ranks to `dst` on the root: by the vendor's library, or, where that cannot, by
    moving the bytes and combining on the host in rank order."""
    op = combining_op(shared)
    if island.reduces(shared.dtype, op):
        b.island(StepKind.REDUCE, place.src, place.dst, root=place.root, shift=shift)
        return
    gather_pieces(b, island, shared, place.src, place.scratch, shift)
    if me == place.root:
        combine_pieces(b, island, place.dst, place.scratch, place.host, shift)


def combine_pieces(b: PlanBuilder, island: Island, dst: Slice, scratch: int, host: int, shift: int = 0) -> None:
    """dst = operator over the gathered pieces, on the host."""
    if island.host_memory:
        b.island(StepKind.COMBINE, dst.on(Buffer.DEVICE_SCRATCH, scratch), dst, n_src=island.size, shift=shift)
        return
    last = -1
    for j in range(island.size):
        piece = dst.on(Buffer.DEVICE_SCRATCH, scratch + j)
        last = b.island(StepKind.COPY, piece, dst.on(Buffer.HOST_SCRATCH, host + j), shift=shift)
    sums = dst.on(Buffer.HOST_SCRATCH, host)
    b.steps.append(Step(StepKind.COMBINE, Lane.BORDER, sums, sums, sums, wait=last, n_src=island.size, shift=shift))
    b.island(StepKind.COPY, sums, dst, wait=len(b.steps) - 1, shift=shift)
