# SPDX-License-Identifier: Apache-2.0
"""Inputs whose right answer is exact, and that answer, computed without any code of hetccl.

Floating-point data are integers so small that every partial sum is exact in the type, in any order; integers use the
whole range, so that sums and products wrap; averages divide without a rest. Results are compared bit for bit, and every
rank, position and operator gives different data. Elements without a NumPy name (bfloat16, fp8) are unsigned integers of
the same size, as raw bits.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from hetccl.types import DType, RedOp

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = [
    "call_input",
    "call_output",
    "data",
    "decode",
    "encode",
    "expected",
    "factor",
    "moved",
    "reducible",
    "storage",
]

# Integers up to this size, both signs, are all exact in the type.
_EXACT = {
    DType.FLOAT16: 2048,
    DType.BFLOAT16: 256,
    DType.FLOAT32: 1 << 24,
    DType.FLOAT64: 1 << 53,
    DType.COMPLEX64: 1 << 24,
    DType.COMPLEX128: 1 << 53,
    DType.FLOAT8_E4M3FN: 16,
    DType.FLOAT8_E4M3FNUZ: 16,
    DType.FLOAT8_E5M2: 8,
    DType.FLOAT8_E5M2FNUZ: 8,
}
_COMPLEX = (DType.COMPLEX64, DType.COMPLEX128)
_ARITHMETIC = (RedOp.SUM, RedOp.PROD, RedOp.MAX, RedOp.MIN, RedOp.AVG)
_BITWISE = (RedOp.BAND, RedOp.BOR, RedOp.BXOR)


def reducible(dtype: DType) -> tuple[RedOp, ...]:
    """Operators that have a meaning for `dtype` (a vendor may offer fewer)."""
    if dtype == DType.BOOL:
        return (RedOp.SUM, RedOp.PROD, RedOp.MAX, RedOp.MIN, *_BITWISE)
    if dtype in _COMPLEX:
        return (RedOp.SUM, RedOp.AVG)
    return _ARITHMETIC if dtype in _EXACT else _ARITHMETIC + _BITWISE


def data(dtype: DType, redop: RedOp, rank: int, size: int, count: int) -> Array:
    """What `rank` of `size` puts into a reduction of `count` elements; premul_sum scales it by `factor`."""
    values = _values(dtype, redop, rank, size, count)
    if redop == RedOp.PREMUL_SUM and dtype in _EXACT:
        values = values / factor(dtype, rank)
    return encode(values, dtype)


def factor(dtype: DType, rank: int) -> float:
    """The rank's own factor of premul_sum: a power of two for floats, so that the product is exact."""
    return (1.0, 2.0, 4.0)[rank % 3] if dtype in _EXACT else (3.0, -2.0, 7.0)[rank % 3]


def expected(dtype: DType, redop: RedOp, size: int, count: int) -> Array:
    """The reduction over all ranks' `data`."""
    import numpy as np

    inputs = [_values(dtype, redop, rank, size, count) for rank in range(size)]
    if redop == RedOp.PREMUL_SUM:
        redop = RedOp.SUM
        if dtype not in _EXACT:
            inputs = [v * np.uint64(int(factor(dtype, r)) % (1 << 64)) for r, v in enumerate(inputs)]
    total = inputs[0]
    for values in inputs[1:]:
        if dtype == DType.BOOL:
            total = {
                RedOp.BXOR: np.bitwise_xor,
                RedOp.PROD: np.bitwise_and,
                RedOp.MIN: np.bitwise_and,
                RedOp.BAND: np.bitwise_and,
            }.get(redop, np.bitwise_or)(total, values)
        elif redop in (RedOp.SUM, RedOp.AVG):
            total = total + values
        elif redop == RedOp.PROD:
            total = total * values
        elif redop in (RedOp.MAX, RedOp.MIN):
            signed = _signed(total, dtype), _signed(values, dtype)
            first = signed[0] >= signed[1] if redop == RedOp.MAX else signed[0] <= signed[1]
            total = np.where(first, total, values)
        else:
            total = {RedOp.BAND: np.bitwise_and, RedOp.BOR: np.bitwise_or, RedOp.BXOR: np.bitwise_xor}[redop](
                total, values
            )
    if redop == RedOp.AVG:
        exact = _signed(total, dtype)
        total = exact / size if dtype in _EXACT else (exact // size).astype(np.int64)
    return encode(total, dtype)


def moved(dtype: DType, rank: int, count: int, salt: int = 0) -> Array:
    """Data for operations that only move: any bit pattern, also those of NaN, different for each rank and `salt`."""
    import numpy as np

    index = np.arange(count * dtype.itemsize, dtype=np.uint64)
    mixed = (index + np.uint64(1 + rank * 7919 + salt * 104729)) * np.uint64(0x9E3779B97F4A7C15)
    octets = (mixed >> np.uint64(40)).astype(np.uint8)
    if dtype == DType.BOOL:
        octets &= 1
    return octets.view(storage(dtype))


def call_input(op: str, dtype: DType, redop: RedOp, rank: int, size: int, count: int, root: int = 0) -> Array:
    """What `rank` passes to a vendor's collective `op`; `count` as in spi.h. send and recv: see `moved`."""
    if op in ("all_reduce", "reduce"):
        return data(dtype, redop, rank, size, count)
    if op == "reduce_scatter":
        return data(dtype, redop, rank, size, count * size)
    return moved(dtype, rank, count * size if op == "all_to_all" else count)


def call_output(op: str, dtype: DType, redop: RedOp, rank: int, size: int, count: int, root: int = 0) -> Array | None:
    """What `rank` must find afterwards; None where the operation leaves the output undefined."""
    import numpy as np

    if op == "all_reduce":
        return expected(dtype, redop, size, count)
    if op == "reduce":
        return expected(dtype, redop, size, count) if rank == root else None
    if op == "reduce_scatter":
        return expected(dtype, redop, size, count * size)[rank * count : (rank + 1) * count]
    if op == "broadcast":
        return moved(dtype, root, count)
    if op == "all_gather":
        return np.concatenate([moved(dtype, r, count) for r in range(size)])
    if op == "all_to_all":
        return np.concatenate([moved(dtype, r, count * size)[rank * count : (rank + 1) * count] for r in range(size)])
    raise ValueError(op)


def storage(dtype: DType) -> np.dtype[Any]:
    """NumPy's type for the raw elements."""
    import numpy as np

    unnamed = dtype == DType.BFLOAT16 or dtype.label.startswith("float8")
    return np.dtype(f"uint{8 * dtype.itemsize}" if unnamed else "uint8" if dtype == DType.BOOL else dtype.label)


def encode(values: Array, dtype: DType) -> Array:
    """Exact values (floats, or integers modulo 2**64 as uint64) as elements of `dtype`."""
    import numpy as np

    if dtype == DType.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any(), "value is not exact in bfloat16"
        return (bits >> 16).astype(np.uint16)
    if dtype.label.startswith("float8"):
        inverse = {value: code for code, value in reversed(list(enumerate(_float8_table(dtype)))) if value == value}
        return np.array([inverse[float(value)] for value in values], dtype=np.uint8)
    if dtype in _EXACT:
        return values.astype(storage(dtype))
    return values.astype(f"uint{8 * dtype.itemsize}").view(storage(dtype))


def decode(elements: Array, dtype: DType) -> Array:
    """Elements as float64 (complex128, or Python's own for integers), for messages."""
    import numpy as np

    if dtype == DType.BFLOAT16:
        return (elements.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.label.startswith("float8"):
        return np.array(_float8_table(dtype))[elements]
    return elements


def _values(dtype: DType, redop: RedOp, rank: int, size: int, count: int) -> Array:
    """Exact values of one rank: float64 or complex128 for inexact types, else uint64 modulo 2**64."""
    import numpy as np

    i = np.arange(count, dtype=np.int64)
    hashed = ((i + 1 + rank * 7919) * 2654435761 + int(redop) * 97) & 0xFFFFFFFF
    mixed = (hashed ^ (rank * 0x5BD1E995)) >> 9
    if dtype == DType.BOOL:
        return ((mixed >> 1) & 1).astype(np.uint64)
    if dtype in _COMPLEX:
        real = _floats(dtype, redop, rank, size, i, mixed)
        return real + 1j * _floats(dtype, redop, rank, size, i + 3, mixed // 3)
    if dtype in _EXACT:
        return _floats(dtype, redop, rank, size, i, mixed)
    if redop == RedOp.AVG:
        signed = dtype.label.startswith("int")
        most = min((1 << (8 * dtype.itemsize - (1 if signed else 0))) - 1, 1 << 20) // (size * size)
        k = mixed % (2 * most + 1) - most if signed else mixed % (most + 1)
        return (k * size).astype(np.uint64)
    # All bits in use: the type's own width is cut out in encode.
    return (mixed.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15 | 1)


def _floats(dtype: DType, redop: RedOp, rank: int, size: int, i: Array, mixed: Array) -> Array:
    import numpy as np

    limit = min(_EXACT[dtype], 1 << 12)
    if redop == RedOp.PROD:  # few twos: the product stays in range; signs differ by rank
        sign = np.where((mixed >> 2) & 1, -1.0, 1.0)
        return sign * np.where((i + rank) % 4 == 0, 2.0, 1.0)
    step = size if redop == RedOp.AVG else 1
    most = limit // (size * step)
    if most < 1:  # too few exact integers for every rank to have its own: one rank a position
        return np.where(i % size == rank, float(step), 0.0)
    return ((mixed % (2 * most + 1)) - most).astype(np.float64) * step


def _signed(values: Array, dtype: DType) -> Array:
    """Values as numbers that compare and divide as the type does."""
    if dtype in _EXACT:
        return values
    return encode(values, dtype).astype(object)


@cache
def _float8_table(dtype: DType) -> tuple[float, ...]:
    """The value of each of the 256 codes, from the formats' definitions."""
    exponent_bits = 4 if "E4M3" in dtype.name else 5
    fnuz = dtype.name.endswith("FNUZ")
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - (0 if fnuz else 1)
    table = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        if fnuz:
            special = float("nan") if code == 0x80 else None
        elif dtype == DType.FLOAT8_E4M3FN:
            special = float("nan") if code & 0x7F == 0x7F else None
        elif exponent == 31:
            special = sign * float("inf") if fraction == 0 else float("nan")
        else:
            special = None
        normal = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        table.append(sign * normal if special is None else special)
    return tuple(table)
