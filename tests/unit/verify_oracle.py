# SPDX-License-Identifier: Apache-2.0
"""Judges a run of the reference interpreter against what an operation promises."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import reduce

from verify_cases import REDUCING, ROOTED, held, places_of

from hetccl.core.algorithms.common import Shared
from hetccl.core.plan import Plan
from hetccl.core.topology import Topology
from hetccl.core.verify.reference import FOLD, Outcome, run_plans
from hetccl.types import Op, RedOp

Blocks = list[tuple[int, list[float]]]  # (first element, the elements) of each block of a buffer


def judge(
    top: Topology, shared: Shared, plans: Sequence[Plan], count: int, seed: int, *, in_place: bool = False, chunk: int
    = 3, slots: int = 2,
) -> Outcome:  # fmt: skip
    """Runs plans and checks every output element. Raises `AssertionError` or `Stuck`."""
    n = top.size
    draw = random.Random(seed * 1000 + count)
    length = shared.counts or [count] * (n * n)
    starts = [_starts(top, shared, r, count) for r in range(n)]
    alone = {Op.BROADCAST: (True, False), Op.SCATTER: (True, False), Op.REDUCE: (False, True), Op.GATHER: (False, True)}
    at_root = alone.get(shared.op, (False, False))
    inputs: list[Blocks] = []
    for r in range(n):
        mine = [(s, length[b]) for s, b in zip(starts[r][0], held(shared, r, n, False), strict=True)]
        if at_root[0] and r != shared.root:
            mine = []
        inputs.append([(start, [draw.uniform(0.5, 2.0) for _ in range(many)]) for start, many in mine])
    factors = [draw.choice((0.5, 2.0, 3.0)) for _ in range(n)]
    together: list[tuple[int, int] | None] = [None] * n
    if shared.op == Op.BROADCAST:
        together = [(0, 0)] * n
    elif in_place:
        together = [_in_place(shared, starts[r], r) for r in range(n)]
    given = [_flat(blocks) for blocks in inputs]
    result = run_plans(
        top, plans, given, count, seed=seed, chunk=chunk, slots=slots, in_place=together, factors=factors
    )
    for r, out in enumerate(result.outputs):
        if at_root[1] and r != shared.root:
            assert not out
            continue
        for place, start in enumerate(starts[r][1]):
            expected = expect(shared, inputs, factors, r, place)
            for i, (x, y) in enumerate(zip(out[start : start + len(expected)], expected, strict=True)):
                assert math.isclose(x, y, rel_tol=1e-9), f"rank {r}, block {place}, element {i}: {x}, expected {y}"
        if not in_place:
            lengths = [length[b] for b in held(shared, r, n, True)]
            covered = {start + i for start, many in zip(starts[r][1], lengths, strict=True) for i in range(many)}
            assert all(i in covered or x != x for i, x in enumerate(out)), f"rank {r} wrote between its blocks"
        if shared.op == Op.ALL_REDUCE and len(top.islands) > 1:
            assert out == result.outputs[0], f"rank {r} holds other bits than rank 0"
    return result


def expect(shared: Shared, inputs: Sequence[Blocks], factors: Sequence[float], rank: int, place: int) -> list[float]:
    """The block at a place of a rank's output."""
    if shared.op in (Op.ALL_GATHER, Op.GATHER):
        return inputs[place][0][1]
    if shared.op == Op.ALL_TO_ALL:
        return inputs[place][rank][1]
    if shared.op in ROOTED and shared.op not in REDUCING:
        return inputs[shared.root][rank if shared.op == Op.SCATTER else 0][1]
    parts = [blocks[rank if shared.op == Op.REDUCE_SCATTER else 0][1] for blocks in inputs]
    if shared.redop == RedOp.PREMUL_SUM:
        parts = [[x * f for x in part] for part, f in zip(parts, factors, strict=True)]
    fold = FOLD[RedOp.SUM if shared.redop in (RedOp.AVG, RedOp.PREMUL_SUM) else shared.redop]
    total = [reduce(fold, column) for column in zip(*parts, strict=True)]
    return [x / len(inputs) for x in total] if shared.redop == RedOp.AVG else total


def _starts(top: Topology, shared: Shared, rank: int, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Where the blocks of input and output begin."""
    if shared.counts:
        found = places_of(top, shared)[rank]
        return found.inputs, found.outputs
    return tuple([i * count for i, _ in enumerate(held(shared, rank, top.size, out))] for out in (False, True))


def _in_place(shared: Shared, starts: tuple[Sequence[int], Sequence[int]], rank: int) -> tuple[int, int] | None:
    """Where input and output begin in their common memory, as a caller may pass it; None: all_to_all has no such
    form."""
    if shared.op == Op.ALL_TO_ALL:
        return None
    if shared.op in ROOTED and rank != shared.root:
        return None
    if shared.op in (Op.ALL_GATHER, Op.GATHER):
        return starts[1][rank], 0
    if shared.op in (Op.REDUCE_SCATTER, Op.SCATTER):
        return 0, starts[0][rank]
    return 0, 0


def _flat(blocks: Blocks) -> list[float]:
    """A buffer; what lies between blocks is not a number."""
    memory = [math.nan] * max((start + len(block) for start, block in blocks), default=0)
    for start, block in blocks:
        memory[start : start + len(block)] = block
    return memory
