# SPDX-License-Identifier: Apache-2.0
"""The direct path between two GPUs of one host, through `Communicator.run`: bits, times, times beside a matrix product.

Bodies of `rank.py`; the sizes are bytes of the buffer, times are the slower rank's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import hetccl
from hetccl.types import DType, Op, RedOp

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
if os.environ.get("DIRECT_CPU_RANK") == str(RANK):
    DEVICE = torch.device("cpu")
TYPES = {
    torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16,
    torch.float64: DType.FLOAT64, torch.int32: DType.INT32, torch.uint8: DType.UINT8,
}  # fmt: skip
K, M = 1 << 10, 1 << 20


def bits() -> dict[str, Any]:
    """Every operation at sizes around the seams, random data, poisoned output; compared bit for bit."""
    faults: list[str] = []
    cells = 0
    with hetccl.init() as comm:
        for number, dtype in enumerate(TYPES):
            width = torch.empty(0, dtype=dtype).element_size()
            sizes = [width, 8 * width, 64 * K, 512 * K, 512 * K + width, M + 7 * width, 5 * M + width, 33 * M - width]
            for nbytes in [*sizes, 256 * M, M] if dtype == torch.float32 else sizes:
                for shift in (0, 1):
                    cells += 1
                    faults += one(comm, dtype, nbytes // width, shift, number * 1000 + cells)
        stats = comm.stats()
    return {"faults": faults[:20], "cells": cells, "stats": stats}


def one(comm: Any, dtype: torch.dtype, count: int, shift: int, seed: int) -> list[str]:
    """`shift`: the buffers begin that many elements past an aligned address."""
    wrong = []

    def draw(rank: int, n: int) -> Any:
        g = torch.Generator(DEVICE).manual_seed(seed * 16 + rank)
        x = torch.empty(n + shift, dtype=dtype, device=DEVICE)
        x.normal_(generator=g) if dtype.is_floating_point else x.random_(0, 200, generator=g)
        return x[shift:]

    def poison(n: int) -> Any:
        return torch.full((n + shift,), 77, dtype=dtype, device=DEVICE)[shift:]

    def call(op: Op, x: Any, y: Any, n: int, root: int = 0) -> None:
        torch.cuda.synchronize()
        comm.run(op, x.data_ptr(), y.data_ptr(), n, TYPES[dtype], RedOp.SUM, root)

    def check(what: str, got: Any, want: Any) -> None:
        same = (
            got.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8) if got.numel() else torch.ones(1)
        )
        if not bool(same.all()):
            bad = int((~same).sum())
            wrong.append(
                f"{what} {dtype} {count} shift {shift}: {bad} bytes differ, first at {int((~same).nonzero()[0])}"
            )

    both = [draw(0, count), draw(1, count)]
    total = both[0] + both[1]
    y = poison(count)
    call(Op.ALL_REDUCE, both[RANK], y, count)
    check("all_reduce", y, total)
    check("input of all_reduce", both[RANK], draw(RANK, count))
    z = both[RANK].clone()
    call(Op.ALL_REDUCE, z, z, count)
    check("all_reduce in place", z, total)
    root = seed % 2
    y = both[RANK].clone() if root == RANK else poison(count)
    call(Op.BROADCAST, y, y, count, root)
    check("broadcast", y, both[root])
    gathered = poison(2 * count)
    call(Op.ALL_GATHER, both[RANK], gathered, count)
    check("all_gather", gathered, torch.cat(both))
    if count > 1:
        half, y = count // 2, poison(count // 2)
        call(Op.REDUCE_SCATTER, both[RANK][: 2 * half], y, half)
        check("reduce_scatter", y, total[RANK * half : (RANK + 1) * half])
    y = both[0] if RANK == 0 else poison(count)
    torch.cuda.synchronize()
    if RANK == 0:
        comm.post(Op.SEND, y.data_ptr(), 0, count, TYPES[dtype], 0, 1).wait()
    else:
        comm.post(Op.RECV, 0, y.data_ptr(), count, TYPES[dtype], 0, 0).wait()
        check("send", y, both[0])
    return wrong


def times(op: str, kind: str = "float32", *wanted: str) -> dict[str, Any]:
    """Median us of a call that returns when the data is there, for the bytes in `wanted` or a range of sizes."""
    dtype = getattr(torch, kind)
    width = torch.empty(0, dtype=dtype).element_size()
    found: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    sizes = (4, 4 * K, 64 * K, 256 * K, M, 4 * M, 16 * M, 64 * M, 256 * M, 1024 * M) if op == "all_reduce" else (
        64 * K, M, 16 * M, 256 * M)  # fmt: skip
    sizes = tuple(int(n) for n in wanted) or sizes
    with hetccl.init() as comm:
        for nbytes in sizes:
            count = max(1, nbytes // width)
            x, y = (torch.ones(count, dtype=dtype, device=DEVICE) for _ in range(2))
            torch.cuda.synchronize()
            call = calls(comm, op, x, y, count, TYPES[dtype])
            n = 300 if nbytes <= M else 60 if nbytes <= 64 * M else 12
            taken = []
            for i in range(n + 5):
                start = time.perf_counter()
                call()
                if i >= 5:
                    taken.append(time.perf_counter() - start)
            taken.sort()
            found[str(nbytes)] = slower(comm, taken[n // 2]) * 1e6
            spread[str(nbytes)] = (taken[n // 20] * 1e6, taken[n * 19 // 20] * 1e6)
            us = found[str(nbytes)]
            if RANK == 0:
                print(f"{op} {kind} {nbytes} B {us:.1f} us {nbytes / us / 1e3:.2f} GB/s", flush=True)
    return {"us": found, "p5_p95": spread, "op": op, "dtype": kind}


def calls(comm: Any, op: str, x: Any, y: Any, count: int, dtype: DType) -> Callable[[], object]:
    a, b = x.data_ptr(), y.data_ptr()
    if op == "all_gather":
        return lambda: comm.run(Op.ALL_GATHER, a, b, count // SIZE, dtype)
    if op == "reduce_scatter":
        return lambda: comm.run(Op.REDUCE_SCATTER, a, b, count // SIZE, dtype)
    if op == "broadcast":
        return lambda: comm.run(Op.BROADCAST, b, b, count, dtype)
    if op == "send":  # rank 0 to rank 1, and a short answer
        if RANK == 0:
            return lambda: (
                comm.post(Op.SEND, a, 0, count, dtype, 0, 1).wait(),
                comm.run(Op.ALL_REDUCE, a, b, 1, dtype),
            )
        return lambda: (comm.post(Op.RECV, 0, b, count, dtype, 0, 0).wait(), comm.run(Op.ALL_REDUCE, a, b, 1, dtype))
    return lambda: comm.run(Op.ALL_REDUCE, a, b, count, dtype)


def beside() -> dict[str, Any]:
    """all_reduce beside a bf16 matrix product of 8192^3 on another stream of the same process, back to back."""
    n, rounds = 8192, 300
    a, b, c = (torch.randn(n, n, device=DEVICE).to(torch.bfloat16) for _ in range(3))
    side = torch.cuda.Stream(DEVICE, priority=0)

    def product() -> tuple[Any, Any]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):
            first.record()
            for _ in range(rounds):
                torch.mm(a, b, out=c)
            last.record()
        return first, last

    found: dict[str, Any] = {}
    with hetccl.init() as comm:
        x, y = (torch.ones(64 * M, device=DEVICE) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(2):
            first, last = product()
            last.synchronize()
        alone = first.elapsed_time(last)
        for nbytes in (4, 64 * K, M, 16 * M, 256 * M):
            call = calls(comm, "all_reduce", x, y, max(1, nbytes // 4), DType.FLOAT32)
            for _ in range(3):
                call()
            first, last = product()
            time.sleep(0.02)
            taken = []
            for _ in range(45 if nbytes > 16 * M else 100):
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
            busy = not last.query()
            last.synchronize()
            # what is left of the product after the calls runs alone: only the time of the calls counts
            whole, called = first.elapsed_time(last), sum(taken) * 1e3
            kept = (alone - (whole - called)) / called
            taken.sort()
            us = slower(comm, statistics.median(taken)) * 1e6
            p95 = slower(comm, taken[len(taken) * 19 // 20]) * 1e6
            found[str(nbytes)] = {"us": us, "p95": p95, "kept": kept, "throughout": busy}
            if RANK == 0:
                print(f"beside a product: {nbytes} B {us:.1f} us (p95 {p95:.1f}) {nbytes / us / 1e3:.1f} GB/s; it "
                      f"keeps {kept:.3f}, busy throughout: {busy}", flush=True)  # fmt: skip
    return {"beside": found, "product_alone_ms": alone / rounds, "tflops": 2 * n**3 * rounds / alone / 1e9}


def slower(comm: Any, mine: float) -> float:
    import numpy as np

    x = np.array([mine])
    comm.all_reduce(x, op="max")
    return float(x[0])
