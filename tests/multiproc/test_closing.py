# SPDX-License-Identifier: Apache-2.0
"""close() while something is still under way: works end with a typed error, other threads come out, nothing crashes."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

import hetccl
from hetccl.testing.launch import run

MIXES = ["host:2", "host@a:1,host@b:1", "host:1,sim-a:1"]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("by", ["abort", "timeout"])
def test_close_while_a_thread_is_in_a_call(mix: str, by: str) -> None:
    run(closes, mix, timeout=60, args=(by,))


def test_exit_of_a_forked_child_does_not_abort_what_is_in_flight() -> None:
    run(child_leaves, "host:2", timeout=40)


def test_send_after_a_failure_says_what_it_was() -> None:
    run(sends_after_failure, "host:1,sim-a:1", timeout=40)


def test_a_process_may_meet_again_where_it_met_before() -> None:
    """Of a store that listens on a port there can be one, so communicators of a process share it."""
    pytest.importorskip("torch")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    env = {"HETCCL_STORE": f"tcp://127.0.0.1:{port}"}
    assert run(meets_again, "host@a:1,host@b:1", timeout=60, env=env) == [[3.0, 3.0, 3.0]] * 2


def meets_again(rank: int, size: int) -> list[float]:
    import numpy as np

    sums = []
    for _ in range(3):
        with hetccl.init() as comm:  # the one before is closed, but `comm` holds it
            x = np.full(10, rank + 1.0, np.float32)
            comm.all_reduce(x)
            sums.append(float(x[0]))
    return sums


def closes(rank: int, size: int, by: str) -> None:
    import numpy as np

    for turn in range(8):
        comm = hetccl.init(name="short")
        x = np.ones(300_000, np.float32)
        ended: list[str] = []
        works = [comm.recv(np.empty(5), (rank + 1) % size, 4, timeout=20, async_op=True) for _ in range(3)]
        comm.barrier()

        def loop(comm: hetccl.Communicator = comm, x: np.ndarray = x, ended: list[str] = ended) -> None:
            try:
                while True:
                    comm.all_reduce(x, timeout=20)
            except hetccl.HetcclError as error:
                ended.append(type(error).__name__)

        thread = threading.Thread(target=loop)
        thread.start()
        time.sleep(0.003 * (turn % 4))
        comm.set_timeout(0.05)
        if by == "abort" and rank == turn % size:
            comm.abort()
        comm.close()
        for work in works:
            with pytest.raises(hetccl.HetcclError):
                work.wait(5)
        thread.join(5)
        assert not thread.is_alive() and ended


def child_leaves(rank: int, size: int) -> None:
    import atexit

    import numpy as np

    with hetccl.init() as comm:
        x = np.ones(1000, np.float32)
        comm.all_reduce(x)
        if rank == 1:
            time.sleep(1)
        work = comm.all_reduce(x, async_op=True)
        if rank == 0:
            child = os.fork()
            if child == 0:
                atexit._run_exitfuncs()  # as sys.exit does
                os._exit(0)
            os.waitpid(child, 0)
        work.wait()
        assert (x == 4).all()
        comm.barrier()


def sends_after_failure(rank: int, size: int) -> None:
    import numpy as np

    comm = hetccl.init()
    comm.barrier()
    if rank == 0:
        with pytest.raises(hetccl.TimedOutError):
            comm.recv(np.empty(3), 1, timeout=0.3)
        with pytest.raises(hetccl.TimedOutError, match="point-to-point"):
            comm.send(np.empty(3), 1)
    else:
        time.sleep(1)
    comm.close()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_the_faster_rank_may_close_at_once(transports: str) -> None:
    """It may read the last message and close while its peer is still about to note that the message is out."""
    run(closes_at_once, "host@a:1,host@b:1", timeout=60, env={"HETCCL_TRANSPORTS": transports, "HETCCL_TIMEOUT": "20"})


def closes_at_once(rank: int, size: int) -> None:
    import numpy as np

    x = np.empty(50_000, np.float32)
    for _ in range(60):
        comm = hetccl.init(name="short")
        x[:] = rank
        comm.all_reduce(x, async_op=True).wait()
        comm.close()
        assert (x == 1).all()


def test_all_may_be_dropped_before_the_completion_thread_has_seen_the_end() -> None:
    run(drops_everything, "host:1", timeout=60)


def drops_everything(rank: int, size: int) -> None:
    """Holds the completion thread up, so that the collector comes first."""
    import gc

    import numpy as np

    seen: list[int] = []
    for _ in range(5):
        comm = hetccl.init(name="dropped")
        comm.all_reduce(np.ones(4), async_op=True).add_done_callback(lambda _: time.sleep(0.3))
        for i in range(20):
            comm.all_reduce(np.ones(4), async_op=True).add_done_callback(lambda _, i=i: seen.append(i))
        comm.close()
        del comm
        gc.collect()
    deadline = time.monotonic() + 20
    while len(seen) < 100 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen == list(range(20)) * 5
