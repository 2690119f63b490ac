# SPDX-License-Identifier: Apache-2.0
"""Two GPUs in one NCCL island beside CPU ranks in another, each rank's tensors on its own device. Bodies of rank.py."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MULTIPROC = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir, "tests", "multiproc")


def core_matrix(join: Callable[[], Any], share: str, seed: str) -> dict[str, Any]:
    """A part of every operation x dtype x operator x size through the core, host memory staged on the GPUs."""
    sys.path.insert(0, MULTIPROC)
    import matrix

    comm = join()
    faults = []
    cells = matrix.chosen(float(share), float(share) / 4, int(seed))
    for number, cell in enumerate(cells):
        if cell.uneven:
            fault = matrix.uneven.run_cell(comm, *cell[:4], comm.rank, comm.size, gaps=number % 3 == 0)
        else:
            fault = matrix.run_cell(comm, cell, comm.rank, comm.size, number % 2 == 1, number % 3 == 0)
        faults += [fault] if fault else []
    return {"cells": len(cells), "faults": faults[:20], "vendor_calls": comm.stats()["vendor_calls"]}


def same_bits(device: Any, join: Callable[[], Any]) -> dict[str, Any]:
    """Sums that are rounded: all ranks hold the same bits, close to the right sum."""
    comm, faults = join(), []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for n in (1, 1000, 300_007, 4_000_000):
            parts = [torch.randn(n, generator=torch.Generator().manual_seed(n + r)) for r in range(comm.size)]
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                x = parts[comm.rank].to(dtype).to(device).clone()
                dist.all_reduce(x, op)
                raw = x.view(torch.uint8)
                everyone = torch.empty(raw.numel() * comm.size, dtype=torch.uint8, device=device)
                dist.all_gather_into_tensor(everyone, raw)
                rows = everyone.cpu().view(comm.size, -1)
                different = [r for r in range(comm.size) if not torch.equal(rows[r], rows[0])]
                want = sum(p.to(dtype).double() for p in parts) / (comm.size if op == dist.ReduceOp.AVG else 1)
                off = (x.cpu().double() - want).norm() / want.norm()
                if different or off > (1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6):
                    faults.append(f"{dtype} {op} {n}: ranks {different} differ from 0, error {off:.1e}")
    return {"faults": faults, "vendor_calls": comm.stats()["vendor_calls"]}


def speed(device: Any, join: Callable[[], Any]) -> dict[str, Any]:
    """all_reduce float32 by hetccl and Gloo in turn, host-synchronised: median us of the slowest rank, by bytes."""
    comm = join()
    groups = {"hetccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    times: dict[str, dict[int, float]] = {name: {} for name in groups}
    for nbytes in (4, 65536, 1 << 20, 16 << 20, 64 << 20):
        x = torch.rand(nbytes // 4, device=device)
        taken: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(8 if nbytes >= 16 << 20 else 40):
            for name, group in groups.items():
                dist.barrier()
                start = time.perf_counter()
                dist.all_reduce(x, group=group)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                taken[name].append(time.perf_counter() - start)
        for name in groups:
            mine = torch.tensor([statistics.median(taken[name][2:])], dtype=torch.float64)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            times[name][nbytes] = float(mine.item()) * 1e6
    paths = {f"{a}-{b}": path for (a, b), path in comm.paths().items()}
    return {"us": times, "vendor_calls": comm.stats()["vendor_calls"], "paths": paths}


def stages(device: Any, join: Callable[[], Any], nbytes: str) -> dict[str, Any]:
    """An all_reduce of float32 on all ranks, by hetccl and by Gloo, beside each of its stages alone: median us of the
    slowest rank, by name.

    Ranks 0 and 1 are the GPUs' island, 2 and 3 the CPUs', so the borders are 0-2 and 1-3, half of the message each.
    What a rank has no part in, it waits for at a barrier.
    """
    comm, n = join(), int(nbytes) // 4
    gloo = dist.new_group(backend="gloo")
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
    mine = {pair: group for pair, group in pairs.items() if comm.rank in pair}
    island = next(group for pair, group in mine.items() if pair in ((0, 1), (2, 3)))
    border = next(group for pair, group in mine.items() if pair in ((0, 2), (1, 3)))
    gpus, x, half = comm.rank < 2, torch.rand(n, device=device), torch.rand(n // 2, device=device)
    whole = torch.empty_like(x)
    calls: dict[str, Callable[[], Any] | None] = {
        "all ranks": lambda: dist.all_reduce(x),
        "gloo": lambda: dist.all_reduce(x, group=gloo),
        "border": lambda: dist.all_reduce(half, group=border),
    }
    for name, member in (("GPUs", gpus), ("CPUs", not gpus)):
        calls[f"{name} reduce"] = (lambda: dist.reduce_scatter_tensor(half, x, group=island)) if member else None
        calls[f"{name} spread"] = (lambda: dist.all_gather_into_tensor(whole, half, group=island)) if member else None
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(14):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            if call:
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                taken[name].append(time.perf_counter() - start)
        x.fill_(1.0)
        half.fill_(1.0)
    found = {}
    for name, seconds in taken.items():
        slowest = torch.tensor([statistics.median(seconds[4:]) if seconds else 0.0], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[name] = float(slowest.item()) * 1e6
    return {"us": found}
