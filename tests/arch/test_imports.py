# SPDX-License-Identifier: Apache-2.0
"""`import hetccl` is cheap: under 100 ms, without the heavy packages and without any vendor's library."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

LIMIT_S = 0.100
RUNS = 7
HEAVY = ("torch", "numpy", "stevedore", "yaml", "multiprocessing", "asyncio", "rich", "matplotlib")
LIBRARIES = ("libccl", "libnccl", "librccl", "libhccl", "libmccl", "libcuda", "libamdhip", "libtorch", "libfabric",
             "libibverbs")


def test_import_is_fast() -> None:
    assert fastest("import hetccl") - fastest("pass") < LIMIT_S


def test_a_slow_import_would_be_noticed() -> None:
    assert fastest("import time; time.sleep(0.4)", runs=2) - fastest("pass", runs=2) > LIMIT_S


@pytest.mark.parametrize("module", ["hetccl", "hetccl.vendors.base", "hetccl.transports.base", "hetccl.errors"])
def test_import_brings_nothing_heavy(module: str) -> None:
    loaded = set(run(f"import {module}, sys; print(*sys.modules)").split())
    assert module in loaded
    assert loaded.isdisjoint(HEAVY), loaded.intersection(HEAVY)


def test_import_maps_no_vendor_library() -> None:
    maps = run("import hetccl; print(open('/proc/self/maps').read())")
    assert "libc" in maps
    assert [name for name in LIBRARIES if f"/{name}" in maps] == []


def fastest(code: str, runs: int = RUNS) -> float:
    """Seconds that a fresh interpreter takes, the best of several: noise only ever adds."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run(code)
        times.append(time.perf_counter() - start)
    return min(times)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
