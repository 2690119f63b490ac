# SPDX-License-Identifier: Apache-2.0
"""Messages in numbers: hundreds under way at once over one link, whoever comes first, in any order."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

import hetccl
from hetccl.testing.launch import run, run_results

N = 300


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("late", [0, 1])
def test_hundreds_of_announced_messages(transports: str, late: int) -> None:
    env = {"HETCCL_TRANSPORTS": transports, "HETCCL_TIMEOUT": "20"}
    run(announced, "host@a:1,host@b:1", timeout=40, env=env, args=(late,))


def test_answers_pile_up_while_the_sender_stands_still() -> None:
    run(stopped, "host:2", timeout=40, env={"HETCCL_TIMEOUT": "20"})


def test_messages_that_ended_badly_do_not_break_the_exit() -> None:
    for r in run_results(unanswered, "host:1,sim-a:1", timeout=40):
        assert r.value == ["TimedOutError"] * 3 if r.rank == 0 else r.error is None, r
        assert r.returncode == 0, r.stderr


def announced(rank: int, size: int, late: int) -> None:
    """300 messages too large to be sent unasked; rank `late` begins a moment after the other."""
    import numpy as np

    with hetccl.init() as comm:
        if rank == late:
            time.sleep(0.5)
        order = list(range(N))
        if rank == 0:
            works = [comm.send(np.full(20_000, i, np.float32), 1, i, async_op=True) for i in order]
        else:
            random.Random(1).shuffle(order)
            got = [np.empty(20_000, np.float32) for _ in order]
            works = [comm.recv(got[i], 0, i, async_op=True) for i in order]
        for work in works:
            work.wait()
        if rank == 1:
            assert all((got[i] == i).all() for i in order)
        comm.barrier()


def stopped(rank: int, size: int) -> None:
    """The receiver's go-aheads find nobody who reads them for a while."""
    import numpy as np

    with hetccl.init() as comm:
        pids = np.empty(size, np.int64)
        comm.all_gather(np.array([os.getpid()]), pids)
        if rank == 0:
            works = [comm.send(np.full(20_000, i, np.float32), 1, i, async_op=True) for i in range(N)]
        else:
            time.sleep(0.5)
            os.kill(int(pids[0]), signal.SIGSTOP)
            got = [np.empty(20_000, np.float32) for _ in range(N)]
            works = [comm.recv(got[i], 0, i, async_op=True) for i in range(N)]
            time.sleep(0.3)
            os.kill(int(pids[0]), signal.SIGCONT)
        for work in works:
            work.wait()
        if rank == 1:
            assert all((got[i] == i).all() for i in range(N))
        comm.barrier()


def unanswered(rank: int, size: int) -> list[str]:
    """Receives that nobody answers, left to the collector together with their communicator."""
    import gc

    import numpy as np

    comm = hetccl.init()
    if rank == 1:
        time.sleep(2)
        return []
    works = [comm.recv(np.empty(4), 1, tag, async_op=True, timeout=0.5) for tag in range(3)]
    errors = []
    for work in works:
        try:
            work.wait()
        except hetccl.HetcclError as error:
            errors.append(type(error).__name__)
    work.attachment = works  # a cycle, so that only the collector can end it
    comm.close()
    del comm, works, work
    gc.collect()
    return errors
