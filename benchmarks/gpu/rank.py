# SPDX-License-Identifier: Apache-2.0
"""What one rank does in the stages of run.py: `rank.py BODY RESULT-FILE [ARGUMENT ...]`."""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import direct
import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(__file__))
import gpt
import island
import mixed
import tcp

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device(os.environ.get("GPU_DEVICE") or f"cuda:{os.environ['LOCAL_RANK']}")


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("GPU_LIMIT", "100")), exit=True)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    body, file, *arguments = sys.argv[1:]
    found = BODIES[body](*arguments)
    with open(file, "w") as result:
        json.dump({"rank": RANK, **found}, result)


def join() -> Any:
    """The default group of hetccl, and its communicator."""
    dist.init_process_group("hetccl", rank=RANK, world_size=SIZE)
    import hetccl.torch

    return hetccl.torch.communicator()


# ---- correctness


def matrix() -> dict[str, Any]:
    """all_reduce, reduce_scatter, all_gather and broadcast for every dtype and operator, bit for bit."""
    from hetccl.testing import oracle
    from hetccl.types import DType, RedOp

    comm, faults, cells = join(), [], 0
    operators = {
        RedOp.SUM: dist.ReduceOp.SUM, RedOp.PROD: dist.ReduceOp.PRODUCT, RedOp.MAX: dist.ReduceOp.MAX,
        RedOp.MIN: dist.ReduceOp.MIN, RedOp.AVG: dist.ReduceOp.AVG, RedOp.BAND: dist.ReduceOp.BAND,
        RedOp.BOR: dist.ReduceOp.BOR, RedOp.BXOR: dist.ReduceOp.BXOR,
    }  # fmt: skip
    for dtype in DType:
        kind = getattr(torch, dtype.label, None)
        if kind is None:
            continue

        def tensor(array: Any, kind: Any = kind) -> Any:
            raw = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).copy())
            return (raw.view(kind) if raw.numel() else raw.new_empty(0, dtype=kind)).to(DEVICE)

        def check(what: str, got: Any, want: Any) -> None:
            nonlocal cells
            cells += 1
            bits = got.cpu().contiguous().view(torch.uint8).numpy().tobytes() if got.numel() else b""
            if bits != want.tobytes():
                a, b = np.frombuffer(bits, np.uint8), np.frombuffer(want.tobytes(), np.uint8)
                bad = np.nonzero(a != b)[0] if a.size == b.size else [-1]
                faults.append(f"{what}: {len(bad)} bytes differ, first at {bad[0]} of {a.size}")

        for count in (1, 1000, 300_007) if dtype in (DType.FLOAT32, DType.BFLOAT16) else (1, 1000):
            for redop in oracle.reducible(dtype):
                if dtype in (DType.COMPLEX64, DType.COMPLEX128) and redop != RedOp.SUM:
                    continue
                where = f"{dtype.label} {redop.label} {count}"
                try:
                    x = tensor(oracle.data(dtype, redop, RANK, SIZE, count))
                    work = dist.all_reduce(x, operators[redop], async_op=bool(cells & 1))
                    if work is not None:
                        work.wait()
                    check(f"all_reduce {where}", x, oracle.expected(dtype, redop, SIZE, count))
                    whole = tensor(oracle.data(dtype, redop, RANK, SIZE, count * SIZE))
                    part = torch.empty(count, dtype=kind, device=DEVICE)
                    dist.reduce_scatter_tensor(part, whole, operators[redop])
                    want = oracle.expected(dtype, redop, SIZE, count * SIZE)
                    check(f"reduce_scatter {where}", part, want[RANK * count : (RANK + 1) * count])
                except Exception as error:
                    faults.append(f"{where}: {type(error).__name__}: {str(error)[:300]}")
            for root in range(SIZE):
                x = tensor(oracle.moved(dtype, RANK, count))
                dist.broadcast(x, root)
                check(f"broadcast {dtype.label} {count} from {root}", x, oracle.moved(dtype, root, count))
            mine, all_of_them = (
                tensor(oracle.moved(dtype, RANK, count)),
                torch.empty(count * SIZE, dtype=kind, device=DEVICE),
            )
            dist.all_gather_into_tensor(all_of_them, mine)
            check(f"all_gather {dtype.label} {count}", all_of_them,
                  np.concatenate([oracle.moved(dtype, r, count) for r in range(SIZE)]))  # fmt: skip
    return ending(comm, faults, cells=cells)


def torch_ops() -> dict[str, Any]:
    """The other operations of torch, strided tensors, futures, coalescing, DDP."""
    comm, faults, done = join(), [], []

    def check(what: str, got: Any, want: Any) -> None:
        done.append(what)
        if not torch.equal(got.cpu(), want.cpu()):
            faults.append(f"{what}: {got.flatten()[:4].tolist()} instead of {want.flatten()[:4].tolist()}")

    def base(rank: int, n: int = 1000) -> Any:
        return torch.arange(n, dtype=torch.float32, device=DEVICE) + 1000 * rank

    def attempt(body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            faults.append(f"{body.__name__}: {type(error).__name__}: {str(error)[:300]}")

    def reduce() -> None:
        x = base(RANK)
        dist.reduce(x, 1)
        check("reduce", x, base(0) + base(1) if RANK == 1 else base(0))

    def gather() -> None:
        outs = [torch.empty(1000, device=DEVICE) for _ in range(SIZE)] if RANK == 0 else None
        dist.gather(base(RANK), outs, 0)
        for r, out in enumerate(outs or ()):
            check("gather", out, base(r))

    def scatter() -> None:
        out = torch.empty(1000, device=DEVICE)
        dist.scatter(out, [base(r) * 2 for r in range(SIZE)] if RANK == 0 else None, 0)
        check("scatter", out, base(RANK) * 2)

    def all_to_all() -> None:
        out = torch.empty(2000, device=DEVICE)
        dist.all_to_all_single(out, torch.cat([base(RANK) + r for r in range(SIZE)]))
        check("all_to_all", out, torch.cat([base(r) + RANK for r in range(SIZE)]))

    def send_recv() -> None:
        x = base(RANK) if RANK == 0 else torch.zeros(1000, device=DEVICE)
        dist.send(x, 1) if RANK == 0 else dist.recv(x, 0)
        check("send_recv", x, base(0))

    def strided() -> None:
        x = torch.stack([base(RANK), base(RANK)], 1)[:, 0]
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        check("strided", x, base(0) + base(1))

    def lists() -> None:
        outs = [torch.empty(1000, device=DEVICE) for _ in range(SIZE)]
        dist.all_gather(outs, base(RANK))
        for r, out in enumerate(outs):
            check("all_gather list", out, base(r))

    def future() -> None:
        x = base(RANK)
        y = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait()
        check("future", y, 2 * (base(0) + base(1)))

    def host_tensor() -> None:
        x = base(RANK).cpu()
        dist.all_reduce(x)
        check("host tensor", x, (base(0) + base(1)).cpu())

    def training() -> None:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(DEVICE)
        twin = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(DEVICE)
        twin.load_state_dict(model.state_dict())
        ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[DEVICE.index])
        data = torch.randn(SIZE, 32, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        for _ in range(3):
            ddp(data[RANK]).square().mean().backward()
            twin(data.flatten(0, 1)).square().mean().backward()
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                if not torch.allclose(mine.grad, other.grad, rtol=1e-4, atol=1e-6):
                    faults.append(f"DDP: gradients differ by {(mine.grad - other.grad).abs().max().item()}")
                mine.grad = other.grad = None
        done.append("DDP")

    def barrier() -> None:
        dist.barrier()
        done.append("barrier")

    for body in (
        reduce,
        gather,
        scatter,
        all_to_all,
        send_recv,
        strided,
        lists,
        future,
        host_tensor,
        barrier,
        training,
    ):
        attempt(body)
    return ending(comm, faults, done=sorted(set(done)))


def streams() -> dict[str, Any]:
    """Writes on the caller's stream right before and after a call, unsynchronised; drops works and tensors."""
    comm, faults, n, rounds = join(), [], 200_000, 1000
    side = torch.cuda.Stream(DEVICE)
    torn = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for asynchronous in (False, True):
        with torch.cuda.stream(side):
            x = torch.empty(n, device=DEVICE)
            for k in range(rounds):
                x.fill_(float(k + RANK))
                work = dist.all_reduce(x, async_op=asynchronous)
                if work is not None:
                    work.wait()
                torn += (x != 2 * k + 1).sum()
                x.fill_(-1.0)
        side.synchronize()
        if torn.item():
            faults.append(f"{'async' if asynchronous else 'sync'}: {torn.item()} torn values in {rounds} rounds")
        torn.zero_()
    for k in range(rounds):  # nobody waits, nobody holds: what comes next may get the same memory
        dist.all_reduce(torch.full((n,), float(k + RANK), device=DEVICE), async_op=True)
        y = torch.full((n,), 7.0, device=DEVICE)
        torn += (y != 7.0).sum()
    torch.cuda.synchronize()
    if torn.item():
        faults.append(f"dropped works wrote {torn.item()} values into memory of others")
    if len(comm.islands) == 1:
        faults += graph()
    return ending(comm, faults, rounds=rounds)


def graph() -> list[str]:
    """A captured graph of two calls gives the right sums at every replay."""
    x, y = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        dist.all_reduce(x)
        work = dist.all_reduce(y, async_op=True)
        work.wait()
    wrong = []
    for k in range(5):
        x.fill_(float(k))
        y.fill_(float(k + RANK))
        captured.replay()
        if not ((x == 2 * k).all() and (y == 2 * k + 1).all()):
            wrong.append(f"graph: replay {k} gives {x[0].item()} and {y[0].item()}")
    return wrong


# ---- measuring


def synchronised(backend: str) -> dict[str, Any]:
    """all_reduce float32, host-synchronised each call: median us of the slower rank, by bytes."""
    backend = backend.removesuffix("_no_p2p")
    dist.init_process_group(backend, rank=RANK, world_size=SIZE)
    times = {}
    for nbytes in (4, 4096, 65536, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30):
        if backend == "gloo" and nbytes > 256 << 20:
            continue
        x = torch.ones(nbytes // 4, device=DEVICE)
        slow = backend == "gloo" and nbytes >= 64 << 20
        calls = 3 if slow else 200 if nbytes <= 65536 else 40 if nbytes <= 16 << 20 else 9
        taken = []
        for _ in range(calls + (1 if slow else 5)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(x)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
            x.fill_(1.0)
        times[nbytes] = slower(statistics.median(taken[-calls:])) * 1e6
        print(f"{backend} {nbytes} B {times[nbytes]:.1f} us {nbytes / times[nbytes] / 1e3:.2f} GB/s", flush=True)
    return {"us": times, "backend": backend}


def slower(mine: float) -> float:
    """The larger of both ranks' numbers."""
    x = torch.tensor([mine], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x.item())


def ending(comm: Any, faults: list[str], **more: Any) -> dict[str, Any]:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    stats = comm.stats()
    if any(len(i) > 1 and RANK in i for i in comm.islands) and not sum(stats["vendor_calls"].values()):
        faults.append("the vendor's library was never called")
    return {
        **more, "faults": faults, "torch": torch.__version__, "vendor": comm.vendor, "islands": comm.islands,
        "vendor_calls": stats["vendor_calls"], "paths": {f"{a}-{b}": p for (a, b), p in comm.paths().items()},
    }  # fmt: skip


BODIES: dict[str, Callable[..., dict[str, Any]]] = {
    "matrix": matrix,
    "torch_ops": torch_ops,
    "streams": streams,
    "synchronised": synchronised,
    "bits": direct.bits,
    "times": direct.times,
    "beside": direct.beside,
    "interleaved": lambda *ops: island.interleaved(DEVICE, join, *ops),
    "host_cost": lambda: island.host_cost(DEVICE, join),
    "gpt": lambda *words: gpt.compare(DEVICE, join, *words),
    "overlap": lambda *words: gpt.overlap(DEVICE, join, *words),
    "steps": lambda *words: gpt.steps(DEVICE, join, *words),
    "core_matrix": lambda share, seed: mixed.core_matrix(join, share, seed),
    "same_bits": lambda: mixed.same_bits(DEVICE, join),
    "tcp": tcp.all_reduce,
    "loopback": tcp.loopback,
    "gloo": tcp.gloo,
    "mixed_speed": lambda: mixed.speed(DEVICE, join),
    "mixed_stages": lambda nbytes: mixed.stages(DEVICE, join, nbytes),
}

if __name__ == "__main__":
    main()
