# SPDX-License-Identifier: Apache-2.0
"""Point to point beyond what a user would write by hand; the soak (tests/soak) draws the rest."""

from __future__ import annotations

import time

import numpy as np
import pytest

import hetccl
from hetccl.testing.launch import run

MANY = 150  # more than the control records that a link queues up


def unasked(rank: int, size: int, nbytes: int) -> bool:
    """Many messages come before anybody asks for one; then all are asked for at once."""
    with hetccl.init() as comm:
        if rank == 1:
            data = [np.full(nbytes, i, np.uint8) for i in range(MANY)]
            works = [comm.send(d, 0, async_op=True) for d in data]
        else:
            data = [np.zeros(nbytes, np.uint8) for _ in range(MANY)]
            first = np.zeros(1, np.uint8)
            comm.recv(first, 1, tag=1, async_op=True)  # the link is up and is being read
            time.sleep(0.5)
            works = [comm.recv(d, 1, async_op=True) for d in data]
        if rank == 1:
            comm.send(np.ones(1, np.uint8), 0, tag=1)
        for work in works:
            work.wait()  # type: ignore[union-attr]
        comm.barrier()
    return all((d == i).all() for i, d in enumerate(data))


@pytest.mark.parametrize("nbytes", [0, 4096, 80_000], ids=["empty", "eager", "announced"])
def test_many_messages_that_nobody_asked_for(nbytes: int) -> None:
    assert run(unasked, "host@a:1,host@b:1", timeout=60, env={"HETCCL_TIMEOUT": "10"}, args=(nbytes,)) == [True, True]


def both_ways(rank: int, size: int, nbytes: int) -> bool:
    """More messages each way than fit anywhere, with every receive posted: nobody may stop reading to write."""
    with hetccl.init() as comm:
        came = [np.zeros(nbytes, np.uint8) for _ in range(4 * MANY)]
        gone = [np.full(nbytes, i % 251, np.uint8) for i in range(4 * MANY)]
        works = [comm.recv(d, 1 - rank, async_op=True) for d in came]
        comm.barrier()
        works += [comm.send(d, 1 - rank, async_op=True) for d in gone]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        comm.barrier()
    return all((d == i % 251).all() for i, d in enumerate(came))


@pytest.mark.parametrize("nbytes", [1, 70_000])
def test_many_messages_both_ways(nbytes: int) -> None:
    env = {"HETCCL_TIMEOUT": "20", "HETCCL_SHM_SLOTS": "2", "HETCCL_SHM_SLOT_BYTES": "4096"}
    assert run(both_ways, "host@a:1,host@b:1", timeout=60, env=env, args=(nbytes,)) == [True, True]
