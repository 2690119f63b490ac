# SPDX-License-Identifier: Apache-2.0
"""Results that go past the caches: the same bits as hetccl_combine, on every instruction set, at every alignment."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetccl.native.combine import can_combine, combine
from hetccl.types import DType, RedOp

LENGTHS = (0, 1, 63, 64, 65, 1000, 9001)
GUARD = 64


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ctypes.CDLL]:
    """The code for the base, AVX2 or AVX-512 (0, 1, 2), each compiled once."""

    @functools.cache
    def make(best: int) -> ctypes.CDLL:
        return _compiled(tmp_path_factory.mktemp("past"), best)

    return make


def _compiled(folder: Path, best: int) -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("cc") or "cc"
    root = Path(__file__).parents[2] / "hetccl"
    library = folder / f"past{best}.so"
    flags = ["-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-w", f"-DHETCCL_COMBINE_BEST={best}"]
    sources = [f"-I{root / 'native'}", f"-I{root / 'include'}", str(root / "native" / "combine_impl.c")]
    subprocess.run([compiler, *flags, *sources, "-o", str(library)], check=True, timeout=100)
    return ctypes.CDLL(str(library))


def _place(rng: np.random.Generator, nbytes: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory of random bytes, and nbytes of it that begin `shift` past an address that is a multiple of 64."""
    whole = np.frombuffer(rng.bytes(nbytes + 4 * GUARD), np.uint8).copy()
    first = GUARD + (-(whole.ctypes.data + GUARD)) % 64 + shift
    return whole, whole[first : first + nbytes]


@pytest.mark.parametrize("best", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_bits_are_those_of_combine(compiled: Callable[[int], ctypes.CDLL], best: int) -> None:
    library = compiled(best)
    rng = np.random.default_rng(best)
    for dtype, redop, n_src in itertools.product(DType, RedOp, (1, 2, 3)):
        if not can_combine(dtype, redop):
            continue
        for number, n in enumerate(LENGTHS):
            nbytes, shift = n * dtype.itemsize, (number * dtype.itemsize) % 64 if number % 3 else number % 7
            srcs = [_place(rng, nbytes, (5 * i * dtype.itemsize) % 64)[1] for i in range(n_src)]
            divisor = 3.0 if redop == RedOp.AVG and n_src == 3 else 1.0
            wanted = np.empty(nbytes, np.uint8)
            if n:
                combine([wanted], srcs, dtype, redop, divisor)
            for both, in_place in itertools.product((False, True), (False, True)):
                whole, dst = _place(rng, nbytes, shift)
                more, also = _place(rng, nbytes, dtype.itemsize)
                given = [dst, *srcs[1:]] if in_place else srcs
                dst[:] = srcs[0] if in_place else 0x5A
                before = [whole.copy(), more.copy()]
                pointers = (ctypes.c_void_p * n_src)(*(s.ctypes.data for s in given))
                status = library.hetccl_combine_past(
                    ctypes.c_void_p(dst.ctypes.data), ctypes.c_void_p(also.ctypes.data if both else None), pointers,
                    n_src, ctypes.c_size_t(n), int(dtype), int(redop), ctypes.c_double(divisor),
                )  # fmt: skip
                where = (dtype, redop, n_src, n, shift, both, in_place)
                assert status == 0, where
                assert (dst == wanted).all(), where
                assert not both or (also == wanted).all(), where
                for now, then, part in zip((whole, more), before, (dst, also if both else also[:0]), strict=True):
                    at = part.ctypes.data - now.ctypes.data if part.size else 0
                    then[at : at + part.size] = part
                    assert (now == then).all(), ("written outside", where)


def test_what_cannot_be_combined_is_refused(compiled: Callable[[int], ctypes.CDLL]) -> None:
    library = compiled(2)
    x = np.zeros(64, np.float32)
    pointers = (ctypes.c_void_p * 2)(x.ctypes.data, x.ctypes.data)

    def status(n: int, dtype: int, redop: int) -> int:
        end = (2, ctypes.c_size_t(n), dtype, redop, ctypes.c_double(1.0))
        return int(library.hetccl_combine_past(ctypes.c_void_p(x.ctypes.data), None, pointers, *end))

    good = status(4, DType.FLOAT32, RedOp.SUM)
    assert good == 0
    assert status(4, DType.FLOAT32, RedOp.BXOR) != 0
    assert status(0, DType.FLOAT32, RedOp.BXOR) != 0
    assert status(4, 99, RedOp.SUM) != 0


@pytest.mark.parametrize("call", ["hetccl_copy_past", "hetccl_copy_fetch"])
@pytest.mark.parametrize("best", [0, 2])
def test_copies(compiled: Callable[[int], ctypes.CDLL], call: str, best: int) -> None:
    library, rng = compiled(best), np.random.default_rng(2)
    for n, shift in itertools.product((0, 1, 63, 64, 200, 5000, 65535, 65536, 65537, 524288, 600_011), (0, 1, 8, 63)):
        src = _place(rng, n, 3)[1]
        whole, dst = _place(rng, n, shift)
        before = whole.copy()
        where = (ctypes.c_void_p(dst.ctypes.data), ctypes.c_void_p(src.ctypes.data))
        getattr(library, call)(*where, ctypes.c_size_t(n))
        at = dst.ctypes.data - whole.ctypes.data if n else 0
        before[at : at + n] = src
        assert (whole == before).all(), (n, shift)
