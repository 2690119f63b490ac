# SPDX-License-Identifier: Apache-2.0
"""The exact answers of the test kit, checked against a second, slower way to compute them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from hetccl.testing.oracle import call_output, data, decode, encode, expected, moved, reducible, storage
from hetccl.types import DType, RedOp

COUNT = 67
PAIRS = [(d, r) for d in DType for r in reducible(d)]
IDS = [f"{d.label}-{r.label}" for d, r in PAIRS]


def exact(element: object, dtype: DType) -> list[Fraction]:
    """An element as exact numbers: two for a complex one."""
    if dtype.label.startswith("complex"):
        return [Fraction(float(element.real)), Fraction(float(element.imag))]  # type: ignore[attr-defined]
    return [Fraction(float(element)) if dtype.label.startswith(("float", "bfloat")) else Fraction(int(element))]  # type: ignore[call-overload]


def combine(values: list[Fraction], dtype: DType, redop: RedOp) -> Fraction:
    whole = [int(v) for v in values]
    if dtype == DType.BOOL:
        if redop == RedOp.BXOR:
            return Fraction(sum(whole) % 2)
        return Fraction(min(whole) if redop in (RedOp.PROD, RedOp.MIN, RedOp.BAND) else max(whole))
    if redop == RedOp.SUM:
        return sum(values, Fraction(0))
    if redop == RedOp.PROD:
        return math.prod(values, start=Fraction(1))
    if redop in (RedOp.MAX, RedOp.MIN):
        return max(values) if redop == RedOp.MAX else min(values)
    if redop == RedOp.AVG:
        return sum(values, Fraction(0)) / len(values)
    out = whole[0]
    for value in whole[1:]:
        out = out & value if redop == RedOp.BAND else out | value if redop == RedOp.BOR else out ^ value
    return Fraction(out)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(("dtype", "redop"), PAIRS, ids=IDS)
def test_the_answer_is_exact_in_any_order(dtype: DType, redop: RedOp, size: int) -> None:
    inputs = [decode(data(dtype, redop, r, size, COUNT), dtype) for r in range(size)]
    want = decode(expected(dtype, redop, size, COUNT), dtype)
    bits = 8 * dtype.itemsize
    for i in range(COUNT):
        parts = [exact(x[i], dtype) for x in inputs]
        for part, found in enumerate(exact(want[i], dtype)):
            right = combine([p[part] for p in parts], dtype, redop)
            if dtype.label.startswith(("int", "uint")):
                assert right.denominator == 1 and (int(right) - int(found)) % (1 << bits) == 0
            else:
                assert right == found
    # Every partial sum of the whole, in whatever order, stays where integers are exact.
    if redop == RedOp.SUM and dtype.label.startswith(("float", "bfloat")):
        most = np.abs(np.array([x for x in inputs])).sum(axis=0).max()
        digits = {DType.FLOAT16: 11, DType.BFLOAT16: 8, DType.FLOAT32: 24, DType.FLOAT64: 53}
        assert most <= 2 ** digits.get(dtype, 4 if "e4m3" in dtype.label else 3)


@pytest.mark.parametrize(("dtype", "redop"), PAIRS, ids=IDS)
def test_ranks_and_positions_differ(dtype: DType, redop: RedOp) -> None:
    first, second = (data(dtype, redop, r, 2, COUNT) for r in range(2))
    assert (first != second).any() and len(np.unique(first)) > 1
    assert (expected(dtype, redop, 2, COUNT) != first).any() and (expected(dtype, redop, 2, COUNT) != second).any()


def test_integers_wrap() -> None:
    for dtype in (DType.INT8, DType.UINT8, DType.INT32, DType.INT64):
        parts = [data(dtype, RedOp.SUM, r, 2, 1000).astype(object) for r in range(2)]
        assert (parts[0] + parts[1] != expected(dtype, RedOp.SUM, 2, 1000).astype(object)).any()


def test_known_codes() -> None:
    assert decode(np.array([0x3F80, 0xC000], np.uint16), DType.BFLOAT16).tolist() == [1.0, -2.0]
    codes = {DType.FLOAT8_E4M3FN: (0x38, 0x7E, 448.0), DType.FLOAT8_E5M2: (0x3C, 0x7B, 57344.0),
             DType.FLOAT8_E4M3FNUZ: (0x40, 0x7F, 240.0), DType.FLOAT8_E5M2FNUZ: (0x40, 0x7F, 57344.0)}  # fmt: skip
    for dtype, (one, most, value) in codes.items():
        assert decode(np.array([one, most], np.uint8), dtype).tolist() == [1.0, value]
        assert encode(np.array([1.0, value, 0.0]), dtype).tolist() == [one, most, 0]


def test_moved_bytes_differ_by_rank_and_salt() -> None:
    for dtype in DType:
        blocks = [moved(dtype, r, 1000, s).tobytes() for r in range(3) for s in range(3)]
        assert len(set(blocks)) == 9 and all(len(b) == 1000 * dtype.itemsize for b in blocks)
        assert moved(dtype, 0, 1).dtype == storage(dtype)
    assert set(moved(DType.BOOL, 1, 100).tolist()) == {0, 1}


def test_parts_of_the_whole() -> None:
    whole = expected(DType.INT32, RedOp.SUM, 3, 30)
    parts = [call_output("reduce_scatter", DType.INT32, RedOp.SUM, r, 3, 10) for r in range(3)]
    assert np.concatenate([p for p in parts if p is not None]).tolist() == whole.tolist()
    assert call_output("reduce", DType.INT32, RedOp.SUM, 1, 3, 10, root=2) is None
    got = call_output("all_to_all", DType.INT32, RedOp.SUM, 1, 3, 10)
    assert got is not None and got[20:].tolist() == moved(DType.INT32, 2, 30)[10:20].tolist()
