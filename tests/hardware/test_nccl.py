# SPDX-License-Identifier: Apache-2.0
"""NCCL on real GPUs: two of them, one process each. `pytest -m gpu tests/hardware`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from hetccl.testing.launch import run, run_results

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir, "multiproc"))
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170)]

ONE, TWO, MIXED = "nccl:2", "nccl@a:1,nccl@b:1", "nccl:2,host:2"
LIMIT = 150.0


@pytest.fixture(autouse=True)
def gpus(require: Callable[[object, str, str], None]) -> None:
    require(torch.cuda.device_count() > 1, "a second NVIDIA GPU", "run this on a machine with two of them")


@pytest.mark.parametrize("ranks", [ONE, TWO, MIXED])
def test_every_operation(ranks: str) -> None:
    """A seeded part of operation x dtype x operator x size through the core, host memory staged on the devices."""
    import matrix

    results = run(matrix.body, ranks, LIMIT, args=(0.04, 0.01, 20261130))
    assert not [fault for one in results for fault in one["faults"]]
    for one in results[: 2 if ranks != TWO else 0]:
        assert sum(one["stats"]["vendor_calls"].values()), "NCCL was never called"


@pytest.mark.parametrize("ranks", [ONE, TWO, MIXED])
def test_torch_tensors_on_their_devices(ranks: str) -> None:
    """Synchronous and asynchronous, on the default stream and on another."""
    assert not [fault for one in run(collectives, ranks, LIMIT) for fault in one]


def test_a_message_does_not_wait_for_a_kernel_that_waits() -> None:
    """cudaFreeHost waits for all kernels, and one of them may wait for the thread that calls it."""
    import direct_bodies

    assert run(direct_bodies.messages_beside_a_sum, TWO, LIMIT) == [(True, True)] * 2


def test_captured_calls_are_replayed() -> None:
    assert run(captured, ONE, LIMIT) == [[], []]


def test_capture_between_islands_is_refused() -> None:
    for kind, text in run(refused, TWO, LIMIT):
        assert kind == "UnsupportedError", text
        assert "captured" in text and "inside one island" in text


def test_the_default_stream_is_not_idle_while_one_that_it_waits_for_is_busy() -> None:
    """hetccl orders nothing behind a caller's stream that says it is idle. The default stream waits for all blocking
    streams of the process, so it has to answer for them."""
    import ctypes
    import pathlib

    torch.cuda.init()
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart" in line))
    handle = ctypes.c_void_p()
    assert runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
    blocking = torch.cuda.ExternalStream(handle.value)
    x = torch.randn(8192, 8192, device="cuda")
    y = torch.empty_like(x)
    torch.cuda.synchronize()
    assert runtime.cudaStreamQuery(None) == 0
    with torch.cuda.stream(blocking):
        for _ in range(20):
            torch.mm(x, x, out=y)
    busy, default = runtime.cudaStreamQuery(handle), runtime.cudaStreamQuery(None)
    torch.cuda.synchronize()
    assert busy == 600, "the products ended too soon for this test"
    assert default == 600


def test_what_the_caller_writes_around_a_call() -> None:
    """Right before it and right after it, without synchronising; and works that nobody holds."""
    assert run(written_around, ONE, LIMIT) == [[], []]


def test_uneven_batches_on_gpus_and_cpus() -> None:
    """Weighted gradients of four ranks, two of them on GPUs, are those of one big batch."""
    assert max(run(weighted, MIXED, LIMIT)) < 1e-5


@pytest.mark.parametrize("late", [-1, 0, 1, 3])
def test_groups_that_nobody_destroys(late: int) -> None:
    """NCCL leaves a communicator only with the other ranks of the host, and here are several of the same GPUs."""
    results = run_results(left_open, MIXED, LIMIT, args=(late,))
    now = time.time()
    for one in results:
        assert (one.error, one.returncode) == (None, 0), f"rank {one.rank}: {one.traceback}{one.stderr}"
    assert now - max(one.value for one in results) < 20


# ---- what the ranks do


def joined(rank: int) -> tuple[Any, Any]:
    import torch.distributed as dist

    import hetccl.torch  # noqa: F401

    device = torch.device("cuda", rank) if rank < 2 else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("hetccl")
    return dist, device


def left_open(rank: int, size: int, late: int) -> float:
    dist, device = joined(rank)
    pairs = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1), (0, 1))
    for group in (dist.group.WORLD, dist.new_group(backend="gloo"), *(dist.new_group(list(pair)) for pair in pairs)):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            x = torch.ones(100_000, device=device)
            dist.all_reduce(x, group=group)
            assert (x == dist.get_world_size(group)).all()
    dist.barrier()
    time.sleep(3 if rank == late else 0)
    return time.time()


def collectives(rank: int, size: int) -> list[str]:
    dist, device = joined(rank)
    faults = []

    def row(r: int, n: int) -> Any:
        return (torch.arange(n, dtype=torch.float32) % 97 + 100 * r).to(device)

    def check(what: str, got: Any, want: Any) -> None:
        if not torch.equal(got, want):
            faults.append(f"rank {rank}: {what}: {got[:4].tolist()} instead of {want[:4].tolist()}")

    for n in (1, 1000, 1_000_003):
        for asynchronous in (False, True):
            tag = f"{n} {'async' if asynchronous else 'sync'}"

            def ended(work: Any) -> None:
                if work is not None:
                    work.wait()

            total = sum(row(r, n) for r in range(size))
            x = row(rank, n)
            ended(dist.all_reduce(x, async_op=asynchronous))
            check(f"all_reduce {tag}", x, total)
            whole = torch.empty(n * size, device=device)
            ended(dist.all_gather_into_tensor(whole, row(rank, n), async_op=asynchronous))
            check(f"all_gather {tag}", whole, torch.cat([row(r, n) for r in range(size)]))
            part = torch.empty(n, device=device)
            source = torch.cat([row(rank, n) + q for q in range(size)])
            ended(dist.reduce_scatter_tensor(part, source, async_op=asynchronous))
            check(f"reduce_scatter {tag}", part, total + size * rank)
            x = row(rank, n)
            ended(dist.broadcast(x, size - 1, async_op=asynchronous))
            check(f"broadcast {tag}", x, row(size - 1, n))
            swapped = torch.empty(n * size, device=device)
            ended(dist.all_to_all_single(swapped, source, async_op=asynchronous))
            check(f"all_to_all {tag}", swapped, torch.cat([row(q, n) + rank for q in range(size)]))
    dist.destroy_process_group()
    return faults


def captured(rank: int, size: int) -> list[str]:
    dist, device = joined(rank)
    x, y, z = (torch.zeros(1000, device=device) for _ in range(3))
    gathered = torch.zeros(2000, device=device)
    for tensor in (x, y):
        dist.all_reduce(tensor)
    dist.all_gather_into_tensor(gathered, z)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        work = dist.all_reduce(y, async_op=True)
        z.add_(1)
        work.wait()
        dist.all_gather_into_tensor(gathered, y)
    faults = []
    for k in range(20):
        x.fill_(float(k))
        y.fill_(float(k + rank))
        graph.replay()
        dist.all_reduce(z)  # between replays an ordinary call
        z.fill_(0.0)
        if not ((x == 2 * k).all() and (y == 2 * k + 1).all() and (gathered == 2 * k + 1).all()):
            faults.append(f"replay {k}: {x[0].item()}, {y[0].item()}, {gathered[0].item()}")
    torch.cuda.synchronize()
    del graph
    dist.destroy_process_group()
    return faults


def refused(rank: int, size: int) -> tuple[str, str]:
    import warnings

    dist, device = joined(rank)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    kind, text = "", "nothing was raised"
    warnings.simplefilter("ignore")  # torch warns of the empty graph
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(x)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
        kind = next((c.__name__ for c in type(error).__mro__ if c.__name__ == "UnsupportedError"), kind)
    dist.all_reduce(x)  # the communicator lives on
    assert (x == 4).all()
    dist.destroy_process_group()
    return kind, text


def written_around(rank: int, size: int) -> list[str]:
    dist, device = joined(rank)
    torn = torch.zeros(1, dtype=torch.int64, device=device)
    x = torch.empty(200_000, device=device)
    for k in range(400):
        x.fill_(float(k + rank))
        work = dist.all_reduce(x, async_op=bool(k & 1))
        if work is not None:
            work.wait()
        torn += (x != 2 * k + 1).sum()
        x.fill_(-1.0)
    for k in range(400):
        dist.all_reduce(torch.full((200_000,), float(k), device=device), async_op=True)
        y = torch.full((200_000,), 7.0, device=device)
        torn += (y != 7.0).sum()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return [f"{torn.item()} torn values"] if torn.item() else []


def weighted(rank: int, size: int) -> float:
    """The largest difference from the gradient of one batch of all ranks' rows."""
    from torch.nn.parallel import DistributedDataParallel

    from hetccl.torch import WeightedAverage, weighted_average_hook

    dist, device = joined(rank)
    rows = [7, 5, 1, 3]
    torch.manual_seed(1)
    model, alone = torch.nn.Linear(40, 8), torch.nn.Linear(40, 8)
    alone.load_state_dict(model.state_dict())
    data = torch.randn(sum(rows), 40, generator=torch.Generator().manual_seed(2))
    start = sum(rows[:rank])
    ddp = DistributedDataParallel(model.to(device))
    state = WeightedAverage(ddp)
    ddp.register_comm_hook(state, weighted_average_hook)
    worst = 0.0
    for _ in range(2):
        state.batch = rows[rank]
        ddp(data[start : start + rows[rank]].to(device)).square().mean().backward()
        alone(data).square().mean().backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            worst = max(worst, float((mine.grad.cpu() - other.grad).abs().max()))
            mine.grad = other.grad = None
    dist.destroy_process_group()
    return worst
