# SPDX-License-Identifier: Apache-2.0
"""What each rank of the soak passes to a job and must find after it, and the memory that it lies in."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import draws

from hetccl.testing import oracle
from hetccl.types import DType, Op, RedOp

PERIOD = 4099  # data repeat with a prime period: no shard, chunk or segment boundary falls together with it
GUARD = 64  # bytes on both sides of every buffer that nobody may touch
MARK = 0xA5  # what they hold, and what lies between the blocks of a v form
GAP = 3  # elements


class Memory:
    """A buffer between guards, on the host or on the vendor's device."""

    def __init__(self, comm: Any, nbytes: int, itemsize: int, shift: int, device: bool) -> None:
        import numpy as np

        self.nbytes, self.start = nbytes, GUARD + shift * itemsize
        self.host = np.full(self.start + nbytes + GUARD, MARK, np.uint8)
        vendor = comm._joined.vendor
        self.array = None
        if device and vendor.name.startswith("sim"):
            from hetccl.vendors.sim.array import SimArray

            self.array = SimArray.from_numpy(vendor, self.host)
            self.ptr = self.array.ptr + self.start
        else:
            self.ptr = self.host.ctypes.data + self.start

    def write(self, data: Any, at: int = 0) -> None:
        raw = data.view("u1") if data.size else data[:0].view("u1")
        self.host[self.start + at : self.start + at + raw.size] = raw
        if self.array is not None:
            self.array.copy_from(self.host)

    def read(self, kind: Any) -> Any:
        raw = self._all()
        return raw[self.start : self.start + self.nbytes].copy().view(kind)

    def intact(self) -> bool:
        raw = self._all()
        return bool((raw[: self.start] == MARK).all() and (raw[self.start + self.nbytes :] == MARK).all())

    def _all(self) -> Any:
        return self.host if self.array is None else self.array.to_numpy()


@dataclass(frozen=True)
class Part:
    """A buffer of a job on one rank: what it holds, and where each block begins, in elements."""

    image: Any
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Case:
    """A collective on one rank. None: the rank passes no such buffer. In place, `inside` says where the smaller of both
    lies in the larger, in elements; -1: this rank works on two buffers."""

    given: Part | None
    want: Part | None
    inside: int


def case(job: draws.Collective, rank: int, size: int) -> Case:
    """Input, right output and how they lie."""
    op, root = job.op, job.root
    if op in (Op.ALL_REDUCE, Op.REDUCE):
        given, want = (Part(total(job, who, size, job.count)) for who in (rank, -1))
        if op == Op.REDUCE and rank != root:
            return Case(given, None, -1)
        return Case(given, want, 0 if job.in_place else -1)
    if op == Op.BROADCAST:
        return Case(*(Part(block(job, who, 0, job.count)) for who in (rank, root)), 0)
    if op == Op.REDUCE_SCATTER:
        lengths = job.counts or (job.count,) * size
        given, answer = (cut(total(job, who, size, sum(lengths)), lengths) for who in (rank, -1))
        blocks = laid(job, given)
        return Case(blocks, Part(answer[rank]), blocks.starts[rank] if job.in_place else -1)
    if op in (Op.ALL_GATHER, Op.GATHER):
        lengths = job.counts or (job.count,) * size
        mine = Part(block(job, rank, 0, lengths[rank]))
        if op == Op.GATHER and rank != root:
            return Case(mine, None, -1)
        all_of = laid(job, [block(job, r, 0, n) for r, n in enumerate(lengths)])
        return Case(mine, all_of, all_of.starts[rank] if job.in_place else -1)
    if op == Op.SCATTER:
        lengths = job.counts or (job.count,) * size
        mine = Part(block(job, root, rank, lengths[rank]))
        if rank != root:
            return Case(None, mine, -1)
        all_of = laid(job, [block(job, root, q, n) for q, n in enumerate(lengths)])
        return Case(all_of, mine, all_of.starts[rank] if job.in_place else -1)
    if op == Op.ALL_TO_ALL:
        lengths = job.counts or (job.count,) * size * size
        sent = laid(job, [block(job, rank, q, lengths[rank * size + q]) for q in range(size)])
        return Case(sent, laid(job, [block(job, q, rank, lengths[q * size + rank]) for q in range(size)]), -1)
    raise ValueError(op)


def laid(job: draws.Collective, blocks: Sequence[Any]) -> Part:
    """Blocks one after the other, or in the opposite order with gaps between."""
    import numpy as np

    gap = GAP if job.gaps else 0
    starts, at = [0] * len(blocks), 0
    for r in reversed(range(len(blocks))) if job.gaps else range(len(blocks)):
        starts[r], at = at, at + len(blocks[r]) + gap
    image = np.full(at * job.dtype.itemsize, MARK, np.uint8).view(oracle.storage(job.dtype))
    for start, data in zip(starts, blocks, strict=True):
        image[start : start + len(data)] = data
    return Part(image, tuple(starts))


def cut(whole: Any, lengths: Sequence[int]) -> list[Any]:
    import numpy as np

    return np.split(whole, np.cumsum(lengths)[:-1])


def total(job: draws.Collective, rank: int, size: int, count: int) -> Any:
    """What a rank puts into a reduction; rank -1: the answer."""
    return stretched(reduction(job.dtype, job.redop, rank, size), count, job.salt)


def block(job: draws.Collective, source: int, place: int, count: int) -> Any:
    """What only moves: the block at a place of rank `source`'s input."""
    return stretched(bits(job.dtype, source), count, job.salt + 17 * place)


def factor(job: draws.Collective, rank: int) -> float:
    return oracle.factor(job.dtype, rank) if job.redop == RedOp.PREMUL_SUM and job.op in draws.REDUCING else 1.0


def text(job: draws.Message) -> Any:
    return stretched(bits(job.dtype, job.source), job.count, job.salt)


def stretched(period: Any, count: int, salt: int) -> Any:
    """`count` elements of the repeated period, begun at another place for each salt: old data are never right."""
    import numpy as np

    return np.resize(np.roll(period, salt), count) if count else period[:0]


@cache
def reduction(dtype: DType, redop: RedOp, rank: int, size: int) -> Any:
    """A rank's input; rank -1: the answer."""
    return oracle.expected(dtype, redop, size, PERIOD) if rank < 0 else oracle.data(dtype, redop, rank, size, PERIOD)


@cache
def bits(dtype: DType, rank: int) -> Any:
    return oracle.moved(dtype, rank, PERIOD)
