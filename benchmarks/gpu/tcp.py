# SPDX-License-Identifier: Apache-2.0
"""Two GPUs with only TCP between them: all_reduce, where its time goes, and what the same sockets carry without a GPU.

Bodies of rank.py. Memory comes from the communicator's own device, so that they also run on stand-ins.
"""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from typing import Any

import numpy as np

import hetccl
from hetccl.types import DType, Op, RedOp

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
K, M = 1 << 10, 1 << 20
SIZES = (4, 64 * K, M, 16 * M, 64 * M, 256 * M)
BLOCK = M


def drawn(rank: int, count: int, seed: int) -> Any:
    return np.random.default_rng([seed, rank]).standard_normal(count, np.float32)


def all_reduce(*words: str) -> dict[str, Any]:
    """float32, synchronised with the host: bits of odd sizes, then by bytes the median us of the slower rank, what the
    driving thread waited for as parts of the time, and how busy the sockets' threads were. `words`: sizes."""
    sizes = [int(w) for w in words] or list(SIZES)
    faults: list[str] = []
    us: dict[str, float] = {}
    where: dict[str, Any] = {}
    with hetccl.init() as comm:
        device = comm._joined.device
        device.bind_thread()
        x, y = (device.alloc(max(*sizes, 4 * M) + 4096) for _ in range(2))
        for seed, count in enumerate((1, 16385, 1_000_003, max(sizes) // 4)):
            if count <= max(sizes) // 4 or seed < 2:
                faults += bits(comm, device, x, y, count, seed)
        for nbytes in sizes:
            n = 200 if nbytes <= M else 30 if nbytes <= 64 * M else 10
            taken, before = [], comm.wire_times()
            for i in range(n + 3):
                if i == 3:
                    before = comm.wire_times()
                start = time.perf_counter()
                comm.run(Op.ALL_REDUCE, x, y, max(1, nbytes // 4), DType.FLOAT32, RedOp.SUM)
                taken.append(time.perf_counter() - start)
            us[str(nbytes)] = slower(comm, statistics.median(taken[3:])) * 1e6
            where[str(nbytes)] = shares(before, comm.wire_times(), sum(taken[3:]))
            if RANK == 0:
                print(f"{nbytes} B {us[str(nbytes)]:.1f} us {nbytes / us[str(nbytes)] / 1e3:.2f} GB/s "
                      f"{where[str(nbytes)]}", flush=True)  # fmt: skip
        faults += bits(comm, device, x, y, 1_000_003, 9)
        return {"us": us, "where": where, "faults": faults, "paths": sorted(set(comm.paths().values()))}


def bits(comm: Any, device: Any, x: int, y: int, count: int, seed: int) -> list[str]:
    """One call on fresh data into a poisoned output, in both ranks' bits."""
    mine, got = drawn(RANK, count, seed), np.full(count, 77, np.float32)
    device.copy(x, mine.ctypes.data, mine.nbytes)
    device.copy(y, got.ctypes.data, got.nbytes)
    device.stream_sync()
    comm.run(Op.ALL_REDUCE, x, y, count, DType.FLOAT32, RedOp.SUM)
    device.copy(got.ctypes.data, y, got.nbytes)
    device.stream_sync()
    wrong = got.view(np.uint32) != (drawn(0, count, seed) + drawn(1, count, seed)).view(np.uint32)
    return [f"all_reduce of {count}: {wrong.sum()} wrong, first at {wrong.argmax()}"] if wrong.any() else []


def shares(before: Any, after: Any, seconds: float) -> dict[str, float]:
    """Parts of the time in which this rank waited for something; and parts of a thread's time, of all threads' mean."""
    found: dict[str, float] = {}
    for peer, now in after.items():
        for name, ns in now["waits"].items():
            found[name] = round((ns - before[peer]["waits"][name]) / seconds / 1e9, 3)
        threads = now["threads"]["threads"] or 1
        for name in ("send_ns", "receive_ns"):
            busy = now["threads"][name] - before[peer]["threads"][name]
            found[name[:-3]] = round(busy / seconds / 1e9 / threads, 3)
    return found


def loopback(number: str) -> dict[str, Any]:
    """GB/s each way that so many sockets a direction carry, both ways at once, a thread at either end of each."""
    count, port, total = int(number), int(os.environ["MASTER_PORT"]) + 1, 256 * M
    socks = meet(2 * count, port)
    rates = []
    for _ in range(6):
        for sock in socks:  # both are ready
            sock.sendall(b"x")
            sock.recv(1)
        threads = [
            threading.Thread(target=move, args=(sock, (i < count) == (RANK == 0), total // count))
            for i, sock in enumerate(socks)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(total / (time.perf_counter() - start) / 1e9)
    for sock in socks:
        sock.close()
    return {"gbps": statistics.median(rates[1:]), "sockets": count}


def meet(count: int, port: int) -> list[socket.socket]:
    if RANK == 0:
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(20)
            socks = [server.accept()[0] for _ in range(count)]
    else:
        until, socks = time.monotonic() + 20, []
        while len(socks) < count:
            try:
                socks.append(socket.create_connection(("127.0.0.1", port), 5))
            except ConnectionRefusedError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(30)
    return socks


def move(sock: socket.socket, sending: bool, nbytes: int) -> None:
    block = memoryview(bytearray(BLOCK))
    for at in range(0, nbytes, BLOCK):
        part = block[: min(BLOCK, nbytes - at)]
        if sending:
            sock.sendall(part)
        else:
            got = 0
            while got < len(part):
                n = sock.recv_into(part[got:], len(part) - got)
                if n == 0:
                    raise ConnectionError("the other rank has closed the connection")
                got += n


def gloo(*words: str) -> dict[str, Any]:
    """The same all_reduce by torch's Gloo, for tensors of the device."""
    import torch
    import torch.distributed as dist

    device = torch.device(os.environ.get("GPU_DEVICE") or f"cuda:{os.environ['LOCAL_RANK']}")
    dist.init_process_group("gloo", rank=RANK, world_size=SIZE)
    us = {}
    for nbytes in [int(w) for w in words] or [n for n in SIZES if n != 16 * M]:
        x, taken = torch.ones(max(1, nbytes // 4), device=device), []
        for _ in range(6 if nbytes > M else 100):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
            x.fill_(1.0)
        worst = torch.tensor([statistics.median(taken[1:])], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        us[str(nbytes)] = float(worst.item()) * 1e6
    return {"us": us}


def slower(comm: Any, mine: float) -> float:
    x = np.array([mine])
    comm.all_reduce(x, op="max")
    return float(x[0])
