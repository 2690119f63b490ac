# SPDX-License-Identifier: Apache-2.0
"""One island of GPUs: hetccl and torch's NCCL in turn. Bodies of rank.py."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SIZES = (4, 4096, 65536, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
TURNS = 11


def interleaved(device: Any, join: Callable[[], Any], *chosen: str) -> dict[str, Any]:
    """By operation and bytes: us a call of 50 enqueued back to back between two events (median of 11, the slower
    rank's), of one call synchronised with the host, and of the host alone while it enqueues; hetccl's, then NCCL's."""
    comm = join()
    groups = [dist.group.WORLD, dist.new_group(backend="nccl")]
    found: dict[str, Any] = {}
    for op in chosen or OPERATIONS:
        found[op] = {}
        for nbytes in SIZES:
            call = caller(op, nbytes, device)
            times = [[measure(call, group, nbytes, device) for group in groups] for _ in range(TURNS + 2)][2:]
            cell = [[slower(statistics.median(turn[which][kind] for turn in times), device) for which in (0, 1)]
                    for kind in (0, 1, 2)]  # fmt: skip
            found[op][nbytes] = cell
            if comm.rank == 0:
                print(op, nbytes, *(f"{ours:.2f} {nccl:.2f}" for ours, nccl in cell), flush=True)
    return {"us": found, "vendor_calls": comm.stats()["vendor_calls"]}


def caller(op: str, nbytes: int, device: Any) -> Callable[[Any], None]:
    """A function that makes one call on a group. `nbytes` is the larger buffer's."""
    n = dist.get_world_size()
    whole = torch.rand(max(nbytes // 4, n), device=device)
    part = torch.rand(whole.numel() // n, device=device)
    if op == "all_reduce":
        x = whole[: max(nbytes // 4, 1)]
        return lambda group: dist.all_reduce(x, group=group)
    if op == "all_gather":
        return lambda group: dist.all_gather_into_tensor(whole, part, group=group)
    if op == "reduce_scatter":
        return lambda group: dist.reduce_scatter_tensor(part, whole, group=group)
    if op == "broadcast":
        return lambda group: dist.broadcast(whole, 0, group=group)
    other = torch.rand_like(whole)
    return lambda group: dist.all_to_all_single(other, whole, group=group)


def measure(call: Callable[[Any], None], group: Any, nbytes: int, device: Any) -> tuple[float, float, float]:
    calls = 50 if nbytes <= 256 << 20 else 20
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(group)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    first.record()
    for _ in range(calls):
        call(group)
    last.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call(group)
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / calls * 1e3, (time.perf_counter() - start) * 1e6, host / calls * 1e6


def slower(mine: float, device: Any) -> float:
    """The larger of all ranks' numbers."""
    x = torch.tensor([mine], dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x.item())


def host_cost(device: Any, join: Callable[[], Any]) -> dict[str, Any]:
    """Where the host's time goes in a small all_reduce: us of 2,000 calls by the layer that is called."""
    comm = join()
    nccl = dist.new_group(backend="nccl")
    x = torch.zeros(1, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    address = x.data_ptr()
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    group = dist.group.WORLD
    ways: dict[str, Callable[[], Any]] = {
        "dist.all_reduce, hetccl": lambda: dist.all_reduce(x),
        "dist.all_reduce, nccl": lambda: dist.all_reduce(x, group=nccl),
        "group.allreduce, hetccl": lambda: group.allreduce([x], opts),
        "communicator, ours": lambda: comm.run(0, address, address, 1, 7, 0, 0, 0.0, 1.0, stream, True),
        "communicator, looked up": lambda: comm.run(0, address, address, 1, 7, 0, 0, 0.0, 1.0, stream),
    }
    us: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(7):
        for name, way in ways.items():
            for batch in (20, 100):
                torch.cuda.synchronize(device)
                start = time.perf_counter()
                for _ in range(batch):
                    way()
                took = time.perf_counter() - start
            us[name].append(took / batch * 1e6)
    found = {name: statistics.median(values) for name, values in us.items()}
    if int(os.environ["RANK"]) == 0:
        print("\n".join(f"{name:>30} {value:7.2f} us" for name, value in found.items()), flush=True)
    return {"host_us": found}
