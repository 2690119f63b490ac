# SPDX-License-Identifier: Apache-2.0
"""What a call costs besides its work: no memory, no plan, no thread."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hetccl
from hetccl.core.config import Config
from hetccl.core.store import open_store
from hetccl.testing.launch import run
from hetccl.types import DType, Op

CALLS = 300
ISLANDS = "host@a:1,host@b:1"


def counted(rank: int, size: int, library: str) -> dict[str, int]:
    """Allocations, by Python or by C, of the thread that calls."""
    counter = ctypes.CDLL(library)
    mine = counter.counting_mine
    mine.restype = ctypes.c_uint64
    data = np.ones(1, np.float32)
    with hetccl.init() as comm:
        call, op, address, dtype = comm.run, int(Op.ALL_REDUCE), data.ctypes.data, int(DType.FLOAT32)
        found = {}
        before = mine()
        call(op, address, address, 1, dtype)
        found["first"] = mine() - before
        for name, work in (
            ("call", lambda: call(op, address, address, 1, dtype)),
            ("nothing", lambda: None),
            ("something", lambda: bytearray(100)),
        ):
            for _ in itertools.repeat(None, 50):
                work()
            before, blocks = mine(), sys.getallocatedblocks()
            for _ in itertools.repeat(None, CALLS):
                work()
            found[name] = mine() - before
            found[name + " kept"] = sys.getallocatedblocks() - blocks
        comm.barrier()
        return found


def test_a_repeated_call_allocates_nothing(tmp_path: Path) -> None:
    """4 bytes between two islands over shared memory. With PYTHONMALLOC=malloc every Python object is counted, too."""
    library = tmp_path / "counting.so"
    source = Path(__file__).with_name("counting.c")
    command = [
        "gcc",
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fPIC",
        "-shared",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=60)
    env = {"LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc", "HETCCL_TRANSPORTS": "shm"}
    for found in run(counted, ISLANDS, timeout=60, env=env, args=(str(library),)):
        print(found)
        assert found["something"] >= CALLS and found["first"] > 0  # the counter counts
        assert found["call"] <= found["nothing"] + 2  # the counter's own answers
    env.pop("PYTHONMALLOC")
    for found in run(counted, ISLANDS, timeout=60, env=env, args=(str(library),)):
        assert found["call"] <= found["nothing"] + 2 and abs(found["call kept"]) <= 4


def repeated(rank: int, size: int) -> list[tuple[int, int]]:
    data = np.ones(100, np.float32)
    with hetccl.init() as comm:
        seen = []
        for count in (100, 100, 99):  # another count of the same class
            comm.all_reduce(data[:count])
            explained = comm.explain("all_reduce", 400)
            seen.append(explained.plan_cache)
            assert f"plan cache: {seen[-1][0]} hits, {seen[-1][1]} misses" in str(explained)
        assert (comm.stats()["plan_cache_hits"], comm.stats()["plan_cache_misses"]) == seen[-1]
        return seen


@pytest.mark.parametrize("spec", [ISLANDS, "sim-a:2,host:1"])
def test_the_second_call_finds_its_plan(spec: str) -> None:
    for first, second, third in run(repeated, spec, timeout=40):
        assert first == (0, 1) and second == (1, 1) and third == (2, 1)


def threads(rank: int, size: int) -> dict[int, int]:
    """Threads of the process when so many communicators have been used, all at once."""
    store = open_store(Config.from_env().store, rank, size, 100)
    comms: list[hetccl.Communicator] = []
    counts = {}
    for number in (2, 64):
        while len(comms) < number:
            comms.append(hetccl.Communicator(store, rank, size, name=f"c{len(comms)}"))
        data = [np.full(50_000, rank + 1.0, np.float32) for _ in comms]
        works = [comm.all_reduce(d, async_op=True) for comm, d in zip(comms, data, strict=True)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        assert all((d == 3.0).all() for d in data)
        time.sleep(1.0)  # threads that took a connection have ended
        counts[number] = len(os.listdir("/proc/self/task"))
    for comm in comms:
        comm.close()
    return counts


def test_64_communicators_share_one_progress_thread() -> None:
    for counts in run(threads, ISLANDS, timeout=200, env={"HETCCL_TIMEOUT": "100"}):
        print(counts)
        assert counts[64] == counts[2]
