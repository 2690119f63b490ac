# SPDX-License-Identifier: Apache-2.0
"""hetccl_combine against an oracle made of nothing but the definition of each number format."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hetccl.errors import UnsupportedError, UsageError
from hetccl.native.combine import can_combine, can_scale, combine, dtype_size, scale
from hetccl.types import DType, RedOp

FOUR = (RedOp.SUM, RedOp.PROD, RedOp.MAX, RedOp.MIN)
BITWISE = (RedOp.BAND, RedOp.BOR, RedOp.BXOR)
INTEGERS = (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64)
NUMPY_FLOATS = (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)
# exponent bits, mantissa bits, bias, kind
SMALL = {
    DType.FLOAT16: (5, 10, 15, "ieee"),
    DType.BFLOAT16: (8, 7, 127, "ieee"),
    DType.FLOAT8_E4M3FN: (4, 3, 7, "fn"),
    DType.FLOAT8_E5M2: (5, 2, 15, "ieee"),
    DType.FLOAT8_E4M3FNUZ: (4, 3, 8, "fnuz"),
    DType.FLOAT8_E5M2FNUZ: (5, 2, 16, "fnuz"),
}
NAN_CODE = {
    DType.FLOAT16: 0x7E00,
    DType.BFLOAT16: 0x7FC0,
    DType.FLOAT8_E4M3FN: 0x7F,
    DType.FLOAT8_E5M2: 0x7F,
    DType.FLOAT8_E4M3FNUZ: 0x80,
    DType.FLOAT8_E5M2FNUZ: 0x80,
}
OPERATORS = {
    RedOp.SUM: np.add,
    RedOp.PROD: np.multiply,
    RedOp.MAX: np.maximum,
    RedOp.MIN: np.minimum,
    RedOp.BAND: np.bitwise_and,
    RedOp.BOR: np.bitwise_or,
    RedOp.BXOR: np.bitwise_xor,
}
LENGTHS = (0, 1, 2, 7, 8, 15, 31, 33, 63, 64, 100, 1023, 1024, 1025, 5000)


def test_what_can_be_combined() -> None:
    for dtype, redop in itertools.product(DType, RedOp):
        real = dtype not in (DType.COMPLEX64, DType.COMPLEX128)
        whole = dtype in INTEGERS or dtype == DType.BOOL
        expected = {
            RedOp.SUM: True,
            RedOp.PROD: real,
            RedOp.MAX: real,
            RedOp.MIN: real,
            RedOp.AVG: dtype != DType.BOOL,
            RedOp.PREMUL_SUM: False,
            RedOp.BAND: whole,
            RedOp.BOR: whole,
            RedOp.BXOR: whole,
        }[redop]
        assert can_combine(dtype, redop) is expected, (dtype, redop)
    assert not can_combine(99, 0)
    assert not can_combine(0, 99)
    assert [dtype_size(d) for d in DType] == [d.itemsize for d in DType]
    assert dtype_size(-1) == dtype_size(19) == 0


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.label)
def test_integers_wrap_and_divide_toward_zero(dtype: DType) -> None:
    rng = np.random.default_rng(dtype)
    for n, n_src in itertools.product(LENGTHS, (2, 3, 5)):
        srcs = [np.frombuffer(rng.bytes(n * dtype.itemsize), dtype=dtype.label) for _ in range(n_src)]
        for redop in FOUR + BITWISE:
            expected = srcs[0]
            for s in srcs[1:]:
                expected = OPERATORS[redop](expected, s)
            out = [np.empty_like(expected), np.empty_like(expected)]
            combine(out, srcs, dtype, redop)
            assert (out[0] == expected).all(), (redop, n, n_src)
            assert (out[1] == expected).all(), (redop, n, n_src)
        total = sum(srcs[1:], srcs[0])
        combine(out[:1], srcs, dtype, RedOp.AVG, 3.0)
        assert [int(x) for x in out[0]] == [abs(int(t)) // 3 * (1 if t >= 0 else -1) for t in total]


@pytest.mark.parametrize("dtype", (DType.FLOAT32, DType.FLOAT64), ids=lambda d: d.label)
def test_floats_bit_for_bit(dtype: DType) -> None:
    bits = {4: np.uint32, 8: np.uint64}[dtype.itemsize]
    for n, n_src in itertools.product(LENGTHS, (2, 3, 4)):
        srcs = [_any_floats(n, dtype, seed) for seed in range(n_src)]
        for redop, divisor in itertools.product(FOUR, (1.0, 3.0, 0.1)):
            with np.errstate(all="ignore"):
                expected = srcs[0]
                for s in srcs[1:]:
                    expected = OPERATORS[redop](expected, s)
                wide = np.dtype(dtype.label) if float(np.float32(divisor)) == divisor else np.float64
                expected = (
                    (
                        expected.astype(wide) / wide.type(divisor)
                        if wide is not np.float64
                        else expected.astype(np.float64) / divisor
                    ).astype(dtype.label)
                    if divisor != 1
                    else expected
                )
            for n_dst in (1, 2, 5):
                out = [np.empty_like(expected) for _ in range(n_dst)]
                combine(out, srcs, dtype, redop, divisor)
                for o in out:
                    same = (o.view(bits) == expected.view(bits)) | (np.isnan(o) & np.isnan(expected))
                    same |= (o == 0) & (expected == 0) & (redop in (RedOp.MAX, RedOp.MIN))  # the sign of a zero is free
                    assert same.all(), (redop, divisor, n, n_src)
                    canonical = np.array(np.nan, dtype.label).view(bits)
                    assert (o.view(bits)[np.isnan(o)] == canonical).all(), "a NaN is not the canonical one"


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.label)
def test_small_floats_round_once(dtype: DType) -> None:
    values = _decode_table(dtype)
    code_type = np.uint8 if dtype.itemsize == 1 else np.uint16
    if dtype.itemsize == 1:  # every pair there is
        a, b = (x.ravel().astype(code_type) for x in np.meshgrid(np.arange(256), np.arange(256)))
    else:  # every value, against shuffled ones and against its neighbours
        rng = np.random.default_rng(1)
        every = np.arange(65536)
        a = np.tile(every, 3).astype(code_type)
        b = np.concatenate([rng.permutation(every), every ^ 1, (every + 0x80) & 0xFFFF]).astype(code_type)
    x, y = values[a].astype(np.float32), values[b].astype(np.float32)
    for redop in FOUR:
        with np.errstate(all="ignore"):
            exact = OPERATORS[redop](x, y)
            three = OPERATORS[redop](exact, x[::-1])
        _compare(dtype, [a, b], redop, 1.0, _encode(dtype, exact))
        _compare(dtype, [a, b, a[::-1].copy()], redop, 1.0, _encode(dtype, three))
    with np.errstate(all="ignore"):
        _compare(dtype, [a, b], RedOp.SUM, 3.0, _encode(dtype, (x + y) / np.float32(3)))
    for n in LENGTHS:
        with np.errstate(all="ignore"):
            _compare(dtype, [a[:n], b[:n]], RedOp.SUM, 1.0, _encode(dtype, x[:n] + y[:n]))


def test_bool_takes_any_byte_for_true() -> None:
    a, b = (x.ravel().astype(np.uint8) for x in np.meshgrid(np.arange(256), np.arange(256)))
    out = np.empty_like(a)
    for redops, expected in (
        ((RedOp.SUM, RedOp.MAX, RedOp.BOR), (a != 0) | (b != 0)),
        ((RedOp.PROD, RedOp.MIN, RedOp.BAND), (a != 0) & (b != 0)),
        ((RedOp.BXOR,), (a != 0) ^ (b != 0)),
    ):
        for redop in redops:
            combine([out], [a, b], DType.BOOL, redop)
            assert (out == expected).all()
    combine([out], [a], DType.BOOL, RedOp.BXOR)
    assert (out == (a != 0)).all()


@pytest.mark.parametrize("dtype", (DType.COMPLEX64, DType.COMPLEX128), ids=lambda d: d.label)
def test_complex_sum_and_average(dtype: DType) -> None:
    rng = np.random.default_rng(3)
    srcs = [(rng.integers(-99, 99, 999) + 1j * rng.integers(-99, 99, 999)).astype(dtype.label) for _ in range(3)]
    out = np.empty_like(srcs[0])
    combine([out], srcs, dtype, RedOp.SUM)
    assert (out == srcs[0] + srcs[1] + srcs[2]).all()
    combine([out], srcs[:2], dtype, RedOp.AVG, 2.0)
    assert (out == (srcs[0] + srcs[1]) / 2).all()


@pytest.mark.parametrize("n_src", (1, 2, 3))
@pytest.mark.parametrize("shift", (0, 1, 3))
def test_in_place_and_at_any_address(n_src: int, shift: int) -> None:
    n = 3001
    for target in range(n_src):
        srcs = [np.zeros(n * 4 + 8, np.uint8)[shift : shift + n * 4] for _ in range(n_src)]
        for r, s in enumerate(srcs):
            s[:] = np.frombuffer((np.arange(n) * (r + 1)).astype(np.float32).tobytes(), np.uint8)
        other = np.zeros(n * 4, np.uint8)
        combine([srcs[target], other], srcs, DType.FLOAT32, RedOp.SUM)
        expected = (np.arange(n) * (n_src * (n_src + 1) // 2)).astype(np.float32)
        assert (np.frombuffer(srcs[target].tobytes(), np.float32) == expected).all()
        assert (other.view(np.float32) == expected).all()


def test_refusals() -> None:
    a, b = np.zeros(4, np.float32), np.zeros(5, np.float32)
    with pytest.raises(UnsupportedError, match="no operator"):
        combine([a], [a, a], DType.FLOAT32, RedOp.BAND)
    with pytest.raises(UnsupportedError):
        combine([a], [a, a], DType.COMPLEX64, RedOp.PROD)
    with pytest.raises(UsageError, match="16 and 20 bytes"):
        combine([a], [a, b], DType.FLOAT32, RedOp.SUM)
    with pytest.raises(UsageError, match="element type"):
        combine([a], [a], 77, RedOp.SUM)
    with pytest.raises(UsageError, match="divisor"):
        combine([a], [a, a], DType.INT32, RedOp.SUM, 0.5)
    with pytest.raises(UsageError, match="destinations"):
        combine([], [a], DType.FLOAT32, RedOp.SUM)
    with pytest.raises(BufferError):
        combine([bytes(16)], [a, a], DType.FLOAT32, RedOp.SUM)


@pytest.mark.slow
def test_rounding_and_denormal_mode_of_the_caller_do_not_matter(tmp_path: Path, require: object) -> None:
    """The caller flushes denormals and rounds up; the result is the usual one, and its mode is as before."""
    library = _compiled(
        tmp_path,
        require,
        "mode",
        """
        #include <xmmintrin.h>
        unsigned under(unsigned mode, void *const *d, const void *const *s, int n_src, size_t n, int dtype, int redop) {
            unsigned before = _mm_getcsr(), after;
            _mm_setcsr(mode);
            hetccl_combine(d, 1, s, n_src, n, dtype, redop, 1.0);
            after = _mm_getcsr();
            _mm_setcsr(before);
            return after;
        }""",
    )
    mode = 0x1F80 | 0x8040 | 0x4000  # flush to zero, denormals are zero, round up
    a = np.array([1e-40, 1.0, 3e-39], np.float32)
    b = np.array([1e-40, 2.0**-24, 1e-45], np.float32)
    out = np.empty_like(a)
    after = library.under(mode, _pointers([out]), _pointers([a, b]), 2, ctypes.c_size_t(3), DType.FLOAT32, RedOp.SUM)
    assert after == mode
    assert (out == a + b).all()
    assert out[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("best", (0, 1))
def test_every_instruction_set_gives_the_same_bits(tmp_path: Path, require: object, best: int) -> None:
    """Compiled for older processors, against the module, whose code is the newest that this one can run."""
    library = _compiled(tmp_path, require, f"best{best}", "", f"-DHETCCL_COMBINE_BEST={best}")
    rng = np.random.default_rng(5)
    for dtype, redop, n_src in itertools.product(DType, RedOp, (2, 3)):
        if not can_combine(dtype, redop):
            continue
        for n in (1, 5, 16, 100, 2500):
            srcs = [np.frombuffer(rng.bytes(n * dtype.itemsize), np.uint8) for _ in range(n_src)]
            ours, theirs = np.empty_like(srcs[0]), np.empty_like(srcs[0])
            divisor = 3.0 if redop == RedOp.AVG else 1.0
            combine([ours], srcs, dtype, redop, divisor)
            status = library.hetccl_combine(
                _pointers([theirs]),
                1,
                _pointers(srcs),
                n_src,
                ctypes.c_size_t(n),
                int(dtype),
                int(redop),
                ctypes.c_double(divisor),
            )
            assert status == 0
            assert (ours == theirs).all(), (dtype, redop, n_src, n)


# ------------------------------------------------------------------------------------------------------ helpers


def _any_floats(n: int, dtype: DType, seed: int) -> np.ndarray:
    """All magnitudes, with zeros, infinities, NaNs of all kinds and denormals among them."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-42, 38, n)).astype(np.float32).astype(dtype.label)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-40], dtype.label)
    where = rng.random(n) < 0.2
    x[where] = special[rng.integers(0, len(special), int(where.sum()))]
    return x


def _decode_table(dtype: DType) -> np.ndarray:
    """Value of every code, in float64."""
    exponent_bits, mantissa_bits, bias, kind = SMALL[dtype]
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    value = (
        np.where(
            exponent == 0,
            np.ldexp(mantissa * 1.0, 1 - bias - mantissa_bits),
            np.ldexp(1.0 + mantissa / (1 << mantissa_bits), exponent - bias),
        )
        * sign
    )
    top = exponent == (1 << exponent_bits) - 1
    if kind == "ieee":
        value[top] = np.where(mantissa[top] == 0, np.inf * sign[top], np.nan)
    elif kind == "fn":
        value[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    else:
        value[codes == 1 << (exponent_bits + mantissa_bits)] = np.nan
    return value


def _encode(dtype: DType, x: np.ndarray) -> np.ndarray:
    """Nearest code, ties to the even one; what is too large becomes infinity, or NaN in formats without one."""
    exponent_bits, mantissa_bits, _, kind = SMALL[dtype]
    half = 1 << (exponent_bits + mantissa_bits)
    values = _decode_table(dtype)[:half]
    finite = np.isfinite(values)
    codes = np.arange(half)[finite]
    ladder = values[finite]
    step = ladder[-1] - ladder[-2]
    ladder, codes = np.append(ladder, ladder[-1] + step), np.append(codes, codes[-1] + 1)  # the first that is too large
    size = np.abs(x).astype(np.float64)
    above = np.clip(np.searchsorted(ladder, size), 1, len(ladder) - 1)
    low, high = size - ladder[above - 1], ladder[above] - size
    up = (high < low) | ((high == low) & (codes[above] % 2 == 0))
    code = np.where(up, codes[above], codes[above - 1])
    over = size >= ladder[-1]
    code = np.where(over, codes[-1], code)
    too_large = code == codes[-1]
    code = np.where(np.signbit(x), code | half, code)
    if kind == "ieee":
        code[too_large] = np.where(np.signbit(x[too_large]), half, 0) | ((1 << exponent_bits) - 1) << mantissa_bits
    else:
        code[too_large] = NAN_CODE[dtype]
    if kind == "fnuz":
        code[(code == half) & ~too_large] = 0
    code[np.isnan(x)] = NAN_CODE[dtype]
    return code


def _compare(dtype: DType, srcs: list[np.ndarray], redop: RedOp, divisor: float, expected: np.ndarray) -> None:
    out = [np.empty_like(srcs[0]), np.empty_like(srcs[0])]
    combine(out, srcs, dtype, redop, divisor)
    half = 1 << (8 * dtype.itemsize - 1)
    for o in out:
        free = (redop in (RedOp.MAX, RedOp.MIN)) & (((o | expected) & (half - 1)) == 0)  # the sign of a zero
        free &= (o != NAN_CODE[dtype]) & (expected != NAN_CODE[dtype])
        wrong = np.flatnonzero((o != expected) & ~free)
        if len(wrong):
            inputs, found, wanted = (
                [hex(int(s[wrong[0]])) for s in srcs],
                hex(int(o[wrong[0]])),
                hex(int(expected[wrong[0]])),
            )
            raise AssertionError(f"{redop.label} of {inputs} is {found}, not {wanted}")


def _pointers(arrays: list[np.ndarray]) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))


def _compiled(tmp_path: Path, require: object, name: str, extra: str, *flags: str) -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("cc")
    require(compiler, "a C compiler", "apt-get install gcc")  # type: ignore[operator]
    root = Path(__file__).parents[2] / "hetccl"
    source = tmp_path / f"{name}.c"
    source.write_text(f'#include "combine_impl.c"\n{extra}\n')
    library = tmp_path / f"{name}.so"
    subprocess.run(
        [
            str(compiler),
            "-std=gnu11",
            "-O3",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-w",
            *flags,
            f"-I{root / 'native'}",
            f"-I{root / 'include'}",
            str(source),
            "-o",
            str(library),
        ],
        check=True,
        timeout=100,
    )
    return ctypes.CDLL(str(library))


def test_scale() -> None:
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.FLOAT16):
        kind = np.dtype(dtype.label)
        x = (np.linspace(-3, 3, 2051) + (0.5j if kind.kind == "c" else 0)).astype(kind)
        wide = {"complex64": np.float32, "float64": np.float64}.get(dtype.label, np.float32)
        got = np.zeros_like(x)
        scale(got, x, dtype, 0.3)
        want = (x.astype(np.complex64 if kind.kind == "c" else wide) * wide(0.3)).astype(kind)
        assert got.tobytes() == want.tobytes(), dtype
    for dtype in INTEGERS:
        x = np.arange(-50, 77).astype(dtype.label)
        want = (x.astype(np.uint64) * np.uint64(-7 % (1 << 64))).astype(dtype.label)
        scale(x, x, dtype, -7.0)
        assert x.tolist() == want.tolist(), dtype


def test_scale_refuses_what_has_no_meaning() -> None:
    x = np.zeros(4, np.uint8)
    for dtype, factor in ((DType.BOOL, 1.0), (DType.UINT8, 0.5), (DType.INT8, float("nan")), (DType.INT8, 1e30)):
        assert not can_scale(dtype, factor)
        with pytest.raises(UsageError):
            scale(x, x, dtype, factor)
    assert can_scale(DType.FLOAT8_E5M2, 0.5) and can_scale(DType.INT64, -2.0)
