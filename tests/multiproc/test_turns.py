# SPDX-License-Identifier: Apache-2.0
"""Two communicators that threads, and asynchronous operations, use in opposite orders never lock each other up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import hetccl
from hetccl.core import registry
from hetccl.core.config import Config
from hetccl.core.store import open_store
from hetccl.errors import HetcclError
from hetccl.testing.launch import run

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
def test_opposite_orders(spec: str, check: str, threads: bool, require: Callable[[object, str, str], None]) -> None:
    if "oneccl" in spec:
        require(_oneccl(), "oneCCL", "pip install ./plugins/hetccl-vendor-oneccl && hetccl fetch oneccl")
    env = {"HETCCL_TIMEOUT": "20", "HETCCL_CHECK": check}
    assert all(run(opposite, spec, timeout=90, env=env, args=(threads,)))


def _oneccl() -> bool:
    try:
        registry.vendor("oneccl")
    except HetcclError:
        return False
    return True
