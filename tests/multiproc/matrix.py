# SPDX-License-Identifier: Apache-2.0
"""Every operation x dtype x operator x size on one mix of islands, against the exact oracle. Runs in each rank."""

from __future__ import annotations

import os
import random
import sys
from typing import Any, NamedTuple

sys.path.insert(0, os.path.dirname(__file__))
import uneven

import hetccl
from hetccl.testing import oracle
from hetccl.types import DType, Op, RedOp

REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
MOVING = (Op.BROADCAST, Op.ALL_GATHER, Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL)
SIZES = (0, 1, 7, 1024, 1_000_003)
LARGE = 100_000
PERIOD = 4099  # data repeat with a prime period: no shard, chunk or segment boundary falls together with it


class Cell(NamedTuple):
    op: Op
    dtype: DType
    redop: RedOp
    count: int
    uneven: bool = False


def operators(dtype: DType) -> tuple[RedOp, ...]:
    """Those that every reducing operation takes."""
    return (*oracle.reducible(dtype), *(() if dtype == DType.BOOL else (RedOp.PREMUL_SUM,)))


def cells() -> list[Cell]:
    found: list[Cell] = []
    for dtype in DType:
        for count in SIZES:
            found += [Cell(op, dtype, redop, count) for op in REDUCING for redop in operators(dtype)]
            found += [Cell(op, dtype, RedOp.SUM, count) for op in MOVING]
            found += [Cell(Op.REDUCE_SCATTER, dtype, redop, count, True) for redop in operators(dtype)[:3]]
            found += [Cell(op, dtype, RedOp.SUM, count, True) for op in uneven.MOVING]
    return found


def chosen(share: float, large_share: float, seed: int) -> list[Cell]:
    """A seeded part of the product; of the large sizes a part of its own, since they take nearly all the time."""
    draw = random.Random(seed)
    return [c for c in cells() if draw.random() < (large_share if c.count > LARGE else share)]


def body(rank: int, size: int, share: float, large_share: float, seed: int) -> dict[str, Any]:
    """Runs the chosen cells; returns how many, and the first faults as text."""
    faults: list[str] = []
    todo = chosen(share, large_share, seed)
    with hetccl.init() as comm:
        for number, cell in enumerate(todo):
            unaligned, in_place = number % 2 == 1, number % 3 == 0
            if cell.uneven:
                fault = uneven.run_cell(comm, *cell[:4], rank, size, gaps=in_place)
            else:
                fault = run_cell(comm, cell, rank, size, unaligned, in_place)
            if fault:
                faults.append(fault)
        return {"cells": len(todo), "faults": faults[:20], "stats": comm.stats()}


def run_cell(comm: Any, cell: Cell, rank: int, size: int, unaligned: bool, in_place: bool) -> str:
    """One operation; the text of what is wrong, or ""."""
    import numpy as np

    op, dtype, redop, count, _ = cell
    if count > LARGE and op in (Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER):
        count = count // size
    root = (count + int(dtype)) % size
    inp, out, want = buffers(op, dtype, redop, count, rank, size, root)
    a = placed(inp, unaligned)
    before = a.copy()
    if op == Op.BROADCAST:
        result = a
    elif in_place and (op == Op.ALL_REDUCE or (op == Op.REDUCE and rank == root)):
        result = a
    elif in_place and (op == Op.ALL_GATHER or (op == Op.GATHER and rank == root)):
        result = placed(np.zeros(count * size, a.dtype), unaligned)
        result[rank * count : (rank + 1) * count] = a
        a = result[rank * count : (rank + 1) * count]
        before = a.copy()
    else:
        result = placed(out, unaligned)
    factor = oracle.factor(dtype, rank) if redop == RedOp.PREMUL_SUM else 1.0
    addresses = (x.ctypes.data if x.size else 0 for x in (a, result))
    comm.run(op, *addresses, count, dtype, redop, root, factor=factor)
    where = f"{op.label} {dtype.label} {redop.label} count {count} root {root} {'in place' if in_place else ''}"
    if result.tobytes() != want.tobytes():
        bad = np.nonzero(result != want)[0]
        at = int(bad[0]) if bad.size else -1
        return f"rank {rank}: {where}: {bad.size} wrong, first at {at}: {result[at]!r} instead of {want[at]!r}"
    if a is not result and a.tobytes() != before.tobytes():
        return f"rank {rank}: {where}: the input was changed"
    return ""


def buffers(op: Op, dtype: DType, redop: RedOp, count: int, rank: int, size: int, root: int) -> tuple[Any, Any, Any]:
    """(input, empty output, right answer); empty where a rank has none."""
    import numpy as np

    def long(array: Any, n: int) -> Any:
        return np.resize(array, n) if n else array[:0]

    kind = oracle.storage(dtype)
    none = np.zeros(0, kind)
    if op in REDUCING:
        total = count * (size if op == Op.REDUCE_SCATTER else 1)
        inp = long(oracle.data(dtype, redop, rank, size, PERIOD), total)
        if op == Op.REDUCE and rank != root:
            return inp, none, none
        want = long(oracle.expected(dtype, redop, size, PERIOD), total)
        if op == Op.REDUCE_SCATTER:
            want = want[rank * count : (rank + 1) * count]
        return inp, np.zeros(count, kind), want
    mine = long(oracle.moved(dtype, rank, PERIOD), count)
    if op == Op.BROADCAST:
        return mine, mine, long(oracle.moved(dtype, root, PERIOD), count)
    if op in (Op.SCATTER, Op.ALL_TO_ALL):
        # block q of rank r's input has the salt q + 1
        def block(r: int, q: int) -> Any:
            return long(oracle.moved(dtype, r, PERIOD, q + 1), count)

        inp = np.concatenate([block(rank, q) for q in range(size)])
        if op == Op.ALL_TO_ALL:
            return inp, np.zeros(count * size, kind), np.concatenate([block(q, rank) for q in range(size)])
        return inp if rank == root else none, np.zeros(count, kind), block(root, rank)
    if op == Op.GATHER and rank != root:
        return mine, none, none
    gathered = [long(oracle.moved(dtype, r, PERIOD), count) for r in range(size)]
    return mine, np.zeros(count * size, kind), np.concatenate(gathered)


def placed(array: Any, unaligned: bool) -> Any:
    """A copy, one element past an aligned address where asked."""
    import numpy as np

    raw = np.empty(array.size + 17, array.dtype)
    start = (-(raw.ctypes.data // array.dtype.itemsize)) % 16 + (1 if unaligned else 0)
    view = raw[start : start + array.size]
    view[...] = array
    return view
