# SPDX-License-Identifier: Apache-2.0
"""Two communicators that threads, and asynchronous operations, use in opposite orders never lock each other up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import hetccl
from hetccl.core.config import Config
from hetccl.core.store import open_store
from hetccl.errors import HetcclError, TimedOutError
from hetccl.testing.launch import run, run_results

ROUNDS = 150


def opposite(rank: int, size: int, threads: bool) -> bool:
    store = open_store(Config.from_env().store, rank, size, 30)
    comms = [hetccl.Communicator(store, rank, size, name=name) for name in "ab"]
    order = comms if rank % 2 == 0 else comms[::-1]
    right: list[bool] = []

    def part(comm: hetccl.Communicator) -> None:
        for i in range(ROUNDS):
            data = np.full(40_000 if i % 3 else 10, rank + i, np.float32)  # on the lane thread, or on the caller's
            comm.all_reduce(data)
            right.append(bool((data == sum(range(size)) + size * i).all()))

    if threads:
        running = [threading.Thread(target=part, args=(comm,)) for comm in order]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    else:
        for i in range(ROUNDS):
            data = [np.full(40_000, rank + i, np.float32) for _ in comms]
            works = [comm.all_reduce(d, async_op=True) for comm, d in zip(order, data, strict=True)]
            for work in works:
                work.wait()  # type: ignore[union-attr]
            right += [bool((d == sum(range(size)) + size * i).all()) for d in data]
    for comm in comms:
        comm.close()
    return all(right) and len(right) == 2 * ROUNDS


@pytest.mark.parametrize("threads", [False, True], ids=["asynchronous", "threads"])
@pytest.mark.parametrize("check", ["always", "off"])
@pytest.mark.parametrize("spec", ["host:2", "sim-a:2", "oneccl:2", "oneccl:3,host:1"])
def test_opposite_orders(spec: str, check: str, threads: bool, require_vendors: Callable[[str], None]) -> None:
    require_vendors(spec)
    env = {"HETCCL_TIMEOUT": "20", "HETCCL_CHECK": check}
    assert all(run(opposite, spec, timeout=90, env=env, args=(threads,)))


ALONE = {"HETCCL_SIM_ONE_AT_A_TIME": "1"}  # a device runs one collective at a time


@pytest.mark.parametrize("threads", [False, True], ids=["asynchronous", "threads"])
@pytest.mark.parametrize("spec", ["sim-a:2", "sim-a:3,host:2"])
def test_an_island_that_keeps_order_never_locks_its_devices(spec: str, threads: bool) -> None:
    env = {"HETCCL_TIMEOUT": "40", "HETCCL_ORDER": "island", **ALONE}
    assert all(run(opposite, spec, timeout=90, env=env, args=(threads,)))


def locked(rank: int, size: int) -> str:
    """Each rank enqueues on its first communicator, and on the other when that surely lies on the device."""
    store = open_store(Config.from_env().store, rank, size, 30)
    comms = [hetccl.Communicator(store, rank, size, name=name) for name in "ab"]
    for comm in comms:
        comm.barrier()
    works = []
    for comm in comms if rank % 2 == 0 else comms[::-1]:
        works.append(comm.all_reduce(np.ones(9, np.float32), async_op=True, timeout=4))
        time.sleep(1.0)
    try:
        for work in works:
            work.wait()
    except HetcclError:
        time.sleep(3)  # else the other would only see this one leave
        raise
    finally:
        for comm in comms:
            comm.close()
    return "ended"


def test_devices_lock_each_other_without_order_and_say_so() -> None:
    results = run_results(locked, "sim-a:2", timeout=60, env={"HETCCL_TIMEOUT": "20", **ALONE})
    assert all(isinstance(r.error, HetcclError) for r in results), [r.traceback for r in results]
    late = [r for r in results if isinstance(r.error, TimedOutError)]  # the other may see its calls aborted first
    assert late
    for r in late:
        assert r.error.facts["phase"] == "island" and r.error.facts["missing"] == (1 - r.rank,)  # type: ignore[union-attr]
    env = {"HETCCL_TIMEOUT": "20", "HETCCL_ORDER": "island", **ALONE}
    assert run(locked, "sim-a:2", timeout=60, env=env) == ["ended"] * 2
