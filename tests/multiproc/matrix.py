# SPDX-License-Identifier: Apache-2.0
"""Every operation x dtype x operator x size on one mix of islands, against the exact oracle. Runs in each rank."""

from __future__ import annotations

import random
from typing import Any

import hetccl
from hetccl.testing import oracle
from hetccl.types import DType, Op, RedOp

DTYPES = (
    DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT8, DType.INT32, DType.INT64, DType.UINT8,
)  # fmt: skip
REDOPS = (RedOp.SUM, RedOp.AVG, RedOp.MIN, RedOp.MAX, RedOp.PROD)
SIZES = (0, 1, 7, 1024, 1_000_003)
PERIOD = 4099  # data repeat with a prime period: no shard, chunk or segment boundary falls together with it

Cell = tuple[Op, DType, RedOp, int]


def cells() -> list[Cell]:
    found: list[Cell] = []
    for dtype in DTYPES:
        for count in SIZES:
            found += [(op, dtype, redop, count) for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER) for redop in REDOPS]
            found += [(op, dtype, RedOp.SUM, count) for op in (Op.BROADCAST, Op.ALL_GATHER)]
    return found


def chosen(share: float, large_share: float, seed: int) -> list[Cell]:
    """A seeded part of the product; of the large sizes a part of its own, since they take nearly all the time."""
    draw = random.Random(seed)
    return [c for c in cells() if draw.random() < (large_share if c[3] > 100_000 else share)]


def body(rank: int, size: int, share: float, large_share: float, seed: int) -> dict[str, Any]:
    """Runs the chosen cells; returns how many, and the first faults as text."""
    faults: list[str] = []
    todo = chosen(share, large_share, seed)
    with hetccl.init() as comm:
        for number, cell in enumerate(todo):
            fault = run_cell(comm, cell, rank, size, unaligned=number % 2 == 1, in_place=number % 3 == 0)
            if fault:
                faults.append(fault)
        return {"cells": len(todo), "faults": faults[:20], "stats": comm.stats()}


def run_cell(comm: Any, cell: Cell, rank: int, size: int, unaligned: bool, in_place: bool) -> str:
    """One operation; the text of what is wrong, or ""."""
    import numpy as np

    op, dtype, redop, count = cell
    root = (count + int(dtype)) % size
    inp, out, want = buffers(op, dtype, redop, count, rank, size, root)
    a = placed(inp, unaligned)
    before = a.copy()
    if op == Op.BROADCAST:
        result = a
    elif in_place and op == Op.ALL_REDUCE:
        result = a
    elif in_place and op == Op.ALL_GATHER:
        result = placed(np.zeros(count * size, a.dtype), unaligned)
        result[rank * count : (rank + 1) * count] = a
        a = result[rank * count : (rank + 1) * count]
        before = a.copy()
    else:
        result = placed(out, unaligned)
    comm.run(op, a.ctypes.data, result.ctypes.data, count, dtype, redop, root)
    where = f"{op.label} {dtype.label} {redop.label} count {count} root {root} {'in place' if in_place else ''}"
    if result.tobytes() != want.tobytes():
        bad = np.nonzero(result != want)[0]
        at = int(bad[0]) if bad.size else -1
        return f"rank {rank}: {where}: {bad.size} wrong, first at {at}: {result[at]!r} instead of {want[at]!r}"
    if a is not result and a.tobytes() != before.tobytes():
        return f"rank {rank}: {where}: the input was changed"
    return ""


def buffers(op: Op, dtype: DType, redop: RedOp, count: int, rank: int, size: int, root: int) -> tuple[Any, Any, Any]:
    """(input, empty output, right answer)"""
    import numpy as np

    def long(array: Any, n: int) -> Any:
        return np.resize(array, n) if n else array[:0]

    kind = oracle.storage(dtype)
    if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        total = count * (size if op == Op.REDUCE_SCATTER else 1)
        inp = long(oracle.data(dtype, redop, rank, size, PERIOD), total)
        want = long(oracle.expected(dtype, redop, size, PERIOD), total)
        if op == Op.REDUCE_SCATTER:
            want = want[rank * count : (rank + 1) * count]
        return inp, np.zeros(count, kind), want
    mine = long(oracle.moved(dtype, rank, PERIOD), count)
    if op == Op.BROADCAST:
        return mine, mine, long(oracle.moved(dtype, root, PERIOD), count)
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
