# SPDX-License-Identifier: Apache-2.0
"""The end of programs that destroy nothing: several groups that overlap, Gloo beside them, ranks that leave at
different times and in different orders. All end with code 0 within seconds.

The stand-in of NCCL waits in ncclCommDestroy for the other ranks of the communicator, as NCCL does.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import standin_bodies as bodies

import hetccl
from hetccl.testing.launch import RankResult, run, run_results

PAIRS = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1), (2, 3), (0, 1))
# Rank 0 leads the host and has torch's store: the others do not outlive it by much.
TOGETHER, LEADER_LAST, ONE_BY_ONE = (0, 0, 0, 0), (3, 0, 0, 0), (0.3, 2, 0.2, 0.1)


def ended_well(results: list[RankResult], seconds: float) -> None:
    """Ranks return when they have nothing left to do."""
    now = time.time()
    for one in results:
        assert (one.error, one.returncode) == (None, 0), f"rank {one.rank}: {one.traceback}{one.stderr}"
        assert "hetccl" not in one.stderr, one.stderr
    assert now - max(one.value for one in results) < seconds


@pytest.mark.parametrize(
    ("mix", "pause"),
    [
        ("nccl:2,host:2", TOGETHER),
        ("nccl:2,host:2", LEADER_LAST),
        ("nccl:2,host:2", ONE_BY_ONE),
        ("host:4", LEADER_LAST),
        ("sim-a:2,host:2", ONE_BY_ONE),
    ],
)
def test_torch_groups_that_nobody_destroys(
    mix: str, pause: tuple[float, ...], environment: dict[str, str], require: Callable[[object, str, str], None]
) -> None:
    require(importlib.util.find_spec("torch"), "torch", "pip install torch")
    env = {**environment, "HETCCL_CPU_THREADS": "2"}
    ended_well(run_results(torch_groups, mix, timeout=60, env=env, args=(pause,)), seconds=12)


def torch_groups(rank: int, size: int, pause: tuple[float, ...]) -> float:
    import torch
    import torch.distributed as dist

    import hetccl.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("hetccl")
    groups = [dist.group.WORLD, dist.new_group(backend="gloo"), *(dist.new_group(list(pair)) for pair in PAIRS)]
    for _ in range(3):
        for group in groups:
            x = torch.ones(30_000)
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(x, group=group)
                assert (x == dist.get_world_size(group)).all()
    dist.barrier()
    time.sleep(pause[rank])
    return time.time()


def test_opposite_orders_at_exit(environment: dict[str, str]) -> None:
    ended_well(run_results(opposite_at_exit, "nccl:2", timeout=40, env=environment), seconds=12)


def made(rank: int) -> list[hetccl.Communicator]:
    import numpy as np

    comms = [hetccl.init(name=name) for name in ("first", "second", "third")]
    for comm in comms:
        x = np.full(5000, rank + 1.0, np.float32)
        comm.all_reduce(x)
        assert (x == 3).all()
    return comms


def opposite_at_exit(rank: int, size: int) -> float:
    """As if the program of rank 1 had made its communicators the other way round."""
    from hetccl.core import lifecycle

    opposite_at_exit.kept = made(rank)  # type: ignore[attr-defined]
    for comm, number in list(lifecycle._live.items()):
        lifecycle._live[comm] = -number if rank else number
    return time.time()


def test_a_rank_may_end_long_before_the_others(environment: dict[str, str]) -> None:
    results = run_results(ends_early, "nccl:2", timeout=60, env=environment)
    ended_well(results, seconds=8)
    assert results[1].value - results[0].value < 12


def ends_early(rank: int, size: int) -> float:
    """Rank 1 stays until the process of rank 0 is gone, which may not wait for that."""
    import numpy as np

    ends_early.kept = comm = hetccl.init(timeout=30)  # type: ignore[attr-defined]
    pids = np.zeros(size, np.int64)
    comm.all_gather(np.array([os.getpid()]), pids)
    while rank == 1 and running(int(pids[0])):
        time.sleep(0.05)
    return time.time()


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_opposite_orders_of_close(environment: dict[str, str]) -> None:
    for seconds in run(opposite_closes, "nccl:2", timeout=60, env=environment):
        assert seconds < 12


def opposite_closes(rank: int, size: int) -> float:
    comms = made(rank)
    began = time.monotonic()
    for comm in comms[::-1] if rank else comms:
        comm.close()
    return time.monotonic() - began


def test_a_rank_may_close_long_before_the_others(environment: dict[str, str]) -> None:
    """The vendor's library is waited for, but not for long, and goes on by itself."""
    first, second = run(closes_early, "nccl:2", timeout=60, env=environment)
    assert first[0] < 7 and first[1] == 1 and first[2] == 0
    assert second[0] < 2 and second[1:] == [0, 0]


def closes_early(rank: int, size: int) -> list[float]:
    """[seconds of close(), what was not destroyed then, and some time later]"""
    from hetccl.core.vendor_comms import still_parting

    with hetccl.init(name="meeting", ranks="host:2") as meeting, hetccl.init(timeout=30) as comm:
        meeting.barrier()
        comm.barrier()
        if rank == 1:
            time.sleep(8)
        began = time.monotonic()
        comm.close()
        seconds = time.monotonic() - began
        left = len(still_parting(0))
        meeting.barrier()
        return [seconds, left, len(still_parting(2))]


def test_what_keeps_a_process_from_ending_is_told() -> None:
    """With a code of its own, and where its threads are."""
    results = run_results(stays, "host:2", timeout=40)
    assert [one.returncode for one in results] == [70, 0]
    assert "leaving has taken more than" in results[0].stderr and "never_returns" in results[0].stderr


def stays(rank: int, size: int) -> None:
    from hetccl.core import lifecycle

    comm: Any = hetccl.init()
    comm.barrier()
    stays.kept = comm  # type: ignore[attr-defined]
    if rank == 0:
        lifecycle.EXIT_SECONDS = 1.0
        comm._core = Stuck(comm._core)


class Stuck:
    """A core whose `shut` sits in a driver."""

    def __init__(self, core: Any) -> None:
        self.core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def shut(self, patience: float) -> bool:
        return never_returns()


def never_returns() -> bool:
    while True:
        time.sleep(1)


def test_what_the_device_has_ended_is_not_aborted(environment: dict[str, str]) -> None:
    """The engine sleeps while a device works by itself, so the operation is still in its list when the program ends."""
    assert run(ends_after_a_call, "nccl:2", timeout=60, env=environment) == [[0] * 5] * 2


def ends_after_a_call(rank: int, size: int) -> list[int]:
    """What killed each communicator that was left right after a call."""
    import ctypes

    failures = []
    runtime = bodies.Runtime("nccl")
    for turn in range(5):
        comm = hetccl.init(name=f"turn {turn}")
        stream = runtime.pointer("StreamCreateWithFlags", 1)
        x = runtime.memory(bodies.row(rank), stream)
        bodies.on_stream(comm, runtime, stream, x)
        time.sleep(0.6)  # the engine has had its look
        bodies.on_stream(comm, runtime, stream, x)
        runtime.call("StreamSynchronize", ctypes.c_void_p(stream))
        comm._leave_at_exit()
        failures.append(comm._core.failed)
        comm._part(5.0)
    return failures
