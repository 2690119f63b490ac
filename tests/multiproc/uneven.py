# SPDX-License-Identifier: Apache-2.0
"""The v forms against the exact oracle: blocks of unequal lengths, some of them empty, with and without gaps."""

from __future__ import annotations

from typing import Any

from hetccl.core.buffers import Buffer
from hetccl.testing import oracle
from hetccl.types import DType, Op, RedOp

MOVING = (Op.ALL_GATHER, Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL)
PERIOD = 4099
MARK = 0x5A  # what gaps must still hold afterwards


def run_cell(comm: Any, op: Op, dtype: DType, redop: RedOp, count: int, rank: int, size: int, gaps: bool) -> str:
    """One operation on blocks of about `count` elements; the text of what is wrong, or ""."""
    import numpy as np

    count = min(count, 200_003 // size)
    root = (count + int(dtype)) % size
    lengths = [count * (r * 3 % 4) // 2 + (r % 2) * (count > 0) for r in range(size)]
    kind = oracle.storage(dtype)
    where = f"{op.label}_v {dtype.label} {redop.label} lengths {lengths} root {root} {'with gaps' if gaps else ''}"
    if op == Op.ALL_TO_ALL:
        matrix = [[count * ((i + 2 * j) % 3) // 2 for j in range(size)] for i in range(size)]
        inp, starts = spread([moved(dtype, rank, matrix[rank][q], q) for q in range(size)], kind, gaps)
        want, ends = spread([moved(dtype, q, matrix[q][rank], rank) for q in range(size)], kind, gaps)
        out = empty(want)
        comm.all_to_all_v(buffer(inp, dtype), buffer(out, dtype), matrix, starts, ends)
    elif op == Op.REDUCE_SCATTER:
        data = np.resize(oracle.data(dtype, redop, rank, size, PERIOD), sum(lengths)) if sum(lengths) else []
        answer = np.resize(oracle.expected(dtype, redop, size, PERIOD), sum(lengths)) if sum(lengths) else []
        cuts = np.cumsum(lengths)[:-1]
        inp, starts = spread(np.split(np.asarray(data, kind), cuts), kind, gaps)
        want = np.split(np.asarray(answer, kind), cuts)[rank]
        out = empty(want)
        factor = oracle.factor(dtype, rank) if redop == RedOp.PREMUL_SUM else 1.0
        comm.reduce_scatter_v(buffer(inp, dtype), buffer(out, dtype), lengths, redop, starts, factor=factor)
    elif op == Op.SCATTER:
        inp, starts = spread([moved(dtype, root, n, q) for q, n in enumerate(lengths)], kind, gaps)
        want = moved(dtype, root, lengths[rank], rank)
        out = empty(want)
        given = buffer(inp, dtype) if rank == root else None
        comm.scatter_v(given, buffer(out, dtype), root, lengths, starts)
    else:
        inp = moved(dtype, rank, lengths[rank], 0)
        want, starts = spread([moved(dtype, r, n, 0) for r, n in enumerate(lengths)], kind, gaps)
        out = empty(want)
        if op == Op.ALL_GATHER:
            comm.all_gather_v(buffer(inp, dtype), buffer(out, dtype), lengths, starts)
        else:
            comm.gather_v(buffer(inp, dtype), buffer(out, dtype) if rank == root else None, root, lengths, starts)
            if rank != root:
                want = out
    if out.tobytes() != want.tobytes():
        bad = np.nonzero(out != want)[0]
        return f"rank {rank}: {where}: {bad.size} of {want.size} wrong, first at {bad[:1]}"
    return ""


def moved(dtype: DType, rank: int, count: int, salt: int) -> Any:
    import numpy as np

    data = oracle.moved(dtype, rank, PERIOD, salt + 1)
    return np.resize(data, count) if count else data[:0]


def spread(blocks: Any, kind: Any, gaps: bool) -> tuple[Any, list[int]]:
    """(memory with the blocks, where each begins): one after the other, or backwards with gaps between."""
    import numpy as np

    gap = 3 if gaps else 0
    starts, at = [0] * len(blocks), 0
    for r in reversed(range(len(blocks))) if gaps else range(len(blocks)):
        starts[r], at = at, at + len(blocks[r]) + gap
    memory = np.frombuffer(bytearray([MARK]) * (at * kind.itemsize), kind)
    for start, block in zip(starts, blocks, strict=True):
        memory[start : start + len(block)] = block
    return memory, starts


def empty(like: Any) -> Any:
    import numpy as np

    return np.frombuffer(bytearray([MARK]) * like.nbytes, like.dtype)


def buffer(array: Any, dtype: DType) -> Buffer:
    return Buffer(array.ctypes.data if array.size else 0, array.size, dtype, array)
