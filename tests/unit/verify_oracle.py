# SPDX-License-Identifier: Apache-2.0
"""Judges a run of the reference interpreter against what an operation promises."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import reduce

from hetccl.core.algorithms.common import Shared
from hetccl.core.plan import Plan
from hetccl.core.topology import Topology
from hetccl.core.verify.reference import FOLD, Outcome, run_plans
from hetccl.types import Op, RedOp


def judge(
    top: Topology, shared: Shared, plans: Sequence[Plan], count: int, seed: int, *, in_place: bool = False, chunk: int
    = 3, slots: int = 2,
) -> Outcome:  # fmt: skip
    """Runs plans and checks every output element. Raises `AssertionError` or `Stuck`."""
    n = top.size
    draw = random.Random(seed * 1000 + count)
    blocks = n if shared.op == Op.REDUCE_SCATTER else 1
    inputs = [[draw.uniform(0.5, 2.0) for _ in range(blocks * count)] for _ in range(n)]
    together: list[tuple[int, int] | None] = [None] * n
    given: list[list[float]] = inputs
    if shared.op == Op.BROADCAST:
        together = [(0, 0)] * n
        given = [inputs[r] if r == shared.root else [] for r in range(n)]
    elif in_place:
        at = {Op.ALL_REDUCE: (0, 0), Op.ALL_GATHER: (1, 0), Op.REDUCE_SCATTER: (0, 1)}[shared.op]
        together = [(at[0] * r * count, at[1] * r * count) for r in range(n)]
    result = run_plans(top, plans, given, count, seed=seed, chunk=chunk, slots=slots, in_place=together)
    for r, out in enumerate(result.outputs):
        expected = expect(shared, inputs, r, count)
        for i, (x, y) in enumerate(zip(out, expected, strict=True)):
            assert math.isclose(x, y, rel_tol=1e-9), f"rank {r}, element {i}: {x}, expected {y}"
        if shared.op == Op.ALL_REDUCE and len(top.islands) > 1:
            assert out == result.outputs[0], f"rank {r} holds other bits than rank 0"
    return result


def expect(shared: Shared, inputs: Sequence[Sequence[float]], rank: int, count: int) -> list[float]:
    if shared.op == Op.BROADCAST:
        return list(inputs[shared.root])
    if shared.op == Op.ALL_GATHER:
        return [x for data in inputs for x in data]
    fold = FOLD[RedOp.SUM if shared.redop == RedOp.AVG else shared.redop]
    total = [reduce(fold, column) for column in zip(*inputs, strict=True)]
    if shared.redop == RedOp.AVG:
        total = [x / len(inputs) for x in total]
    return total if shared.op == Op.ALL_REDUCE else total[rank * count : (rank + 1) * count]
