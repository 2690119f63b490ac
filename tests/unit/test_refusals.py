# SPDX-License-Identifier: Apache-2.0
"""Which (operation, dtype, operator) no mix of islands takes. Their number is pinned in refused.txt."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hetccl.core.planner import REDUCING, Planner
from hetccl.core.topology import Island, Topology
from hetccl.errors import UnsupportedError
from hetccl.types import DType, RedOp

PINNED = Path(__file__).with_name("refused.txt")
ARITHMETIC = {RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM, RedOp.PROD, RedOp.MIN, RedOp.MAX}
BITWISE = {RedOp.BAND, RedOp.BOR, RedOp.BXOR}


def meant(dtype: DType) -> set[RedOp]:
    if dtype == DType.BOOL:
        return (ARITHMETIC | BITWISE) - {RedOp.AVG, RedOp.PREMUL_SUM}
    if dtype in (DType.COMPLEX64, DType.COMPLEX128):
        return {RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM}
    return ARITHMETIC if "float" in dtype.label else ARITHMETIC | BITWISE


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 1), (1, 1, 2)], ids=str)
def test_number_of_refusals(sizes: tuple[int, ...]) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    islands = tuple(
        Island(i, tuple(range(s, s + n)), "x", "", i % 2 == 0, False, 1 << 20, (0,) * 19, 0)
        for i, (s, n) in enumerate(zip(starts, sizes, strict=True))
    )
    planner = Planner(Topology(sum(sizes), islands, 1 << 20), 0, {})
    refused = set()
    for op, dtype, redop in itertools.product(sorted(REDUCING), DType, RedOp):
        try:
            planner.plan(op, dtype, redop, 0, False)
        except UnsupportedError:
            refused.add((op, dtype, redop))
    print(f"{len(refused)} combinations of operation, dtype and operator are refused")
    assert refused == {(op, d, r) for op in REDUCING for d in DType for r in RedOp if r not in meant(d)}
    assert len(refused) == int(PINNED.read_text().split()[0])
