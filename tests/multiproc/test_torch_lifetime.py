# SPDX-License-Identifier: Apache-2.0
"""Groups that come and go: destroyed and made again, left behind at exit, with a peer that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from hetccl.testing.launch import run, run_results

pytest.importorskip("torch")

TWO = "host@a:1,host@b:1"
THREE = "host@a:2,host@b:1"


def test_destroy_and_join_again() -> None:
    run(again, THREE, timeout=90)


def test_exit_without_destroy() -> None:
    """Ends promptly, with code 0 and nothing to say, even with works in flight and groups left open."""
    results = run_results(left_open, TWO, timeout=60)
    for result in results:
        assert (result.error, result.returncode) == (None, 0), result.traceback + result.stderr
        assert "Error" not in result.stderr and "hetccl" not in result.stderr, result.stderr


def test_a_lost_peer_is_an_error_of_torch() -> None:
    results = run_results(lost, TWO, timeout=60)
    assert results[1].returncode == 9
    assert (results[0].error, results[0].returncode) == (None, 0), results[0].traceback + results[0].stderr


def joined(seconds: float = 30, **more: Any) -> Any:
    import datetime

    import torch
    import torch.distributed as dist

    import hetccl.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("hetccl", timeout=datetime.timedelta(seconds=seconds), **more)
    return dist


def summed(dist: Any, group: Any = None) -> float:
    import torch

    t = torch.ones(1000)
    dist.all_reduce(t, group=group)
    assert (t == t[0]).all()
    return float(t[0])


def again(rank: int, size: int) -> None:
    """On one store, where group names begin anew each time, with other members under the same name."""
    import os
    import time

    import torch.distributed as dist

    from hetccl.torch import _glue

    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
    for members in ([0, 1], [1, 2], [0, 2]):
        joined(store=store, rank=rank, world_size=size)
        assert summed(dist) == size
        group = dist.new_group(members)
        if rank in members:
            assert summed(dist, group) == 2
        dist.destroy_process_group()
        assert not dist.is_initialized() and _glue._live == []
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < size:  # it serves the store
        time.sleep(0.01)


def left_open(rank: int, size: int) -> None:
    import torch

    dist = joined()
    group = dist.new_group([0, 1])
    assert summed(dist, group) == size
    dist.barrier()
    left_open.kept = [dist.all_reduce(torch.ones(300_000), async_op=True) for _ in range(3)]  # type: ignore[attr-defined]


def lost(rank: int, size: int) -> None:
    import os
    import time

    import torch

    from hetccl.errors import HetcclError

    dist = joined(seconds=10)
    assert summed(dist) == size
    if rank == 1:
        os._exit(9)
    began = time.monotonic()
    try:
        for _ in range(100):
            dist.all_reduce(torch.ones(10))
    except dist.DistBackendError as error:
        assert isinstance(error, HetcclError), error
        assert time.monotonic() - began < 20
        return
    raise AssertionError("nothing was raised")
