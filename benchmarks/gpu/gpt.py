# SPDX-License-Identifier: Apache-2.0
"""A GPT of about 124 million parameters under DDP in bf16, on made-up text, by several back ends. Bodies of rank.py."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 50304, 768, 12, 12, 1024


class Block(torch.nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.mix, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.mix(self.first(x)).split(WIDTH, 2))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, n, WIDTH))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    """Tokens in, the loss of predicting the next one out. The last layer is the embedding's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = torch.nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Any) -> Any:
        x = self.tokens(text[:, :-1]) + self.places.weight[: text.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        scores = functional.linear(self.last(x), self.tokens.weight)
        return functional.cross_entropy(scores.flatten(0, 1).float(), text[:, 1:].flatten())


def text(step: int, rank: int, rows: int, device: Any) -> Any:
    """Rows in which each token follows from the one before by one of eight rules: something to be learnt."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    rules = torch.arange(8) * 97 + 13
    found = torch.empty(rows, LENGTH + 1, dtype=torch.int64)
    found[:, 0] = torch.randint(512, (rows,), generator=draw)
    which = torch.randint(8, (rows, LENGTH), generator=draw)
    which[torch.rand(rows, LENGTH, generator=draw) < 0.8] = 0
    for i in range(LENGTH):
        found[:, i + 1] = (found[:, i] + rules[which[:, i]]) % 512
    return found.to(device)


def made(group: Any, device: Any) -> tuple[Any, Any]:
    """A new model under DDP, the same on every call, and its optimizer."""
    torch.manual_seed(7)
    model = Gpt().to(device).bfloat16()
    ddp = DistributedDataParallel(model, device_ids=[device.index], process_group=group, gradient_as_bucket_view=True)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=3e-4, fused=True)


def train(group: Any, device: Any, steps: int, rows: int, data: list[Any], after: Any = None) -> dict[str, Any]:
    """Trains a new model; step times in seconds (median of the later ones) and all losses."""
    ddp, optimizer = made(group, device)
    losses, times = [], []
    for step in range(steps):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        loss = ddp(data[step % len(data)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        losses.append(loss.detach())
        if after is not None:
            after(step)
    everyone = torch.stack(losses).float()
    dist.all_reduce(everyone, group=group)
    parameters = sum(p.numel() for p in ddp.parameters())
    median = statistics.median(times[len(times) // 3 :])
    size = dist.get_world_size(group)
    return {
        "seconds": median, "tokens_per_second": rows * LENGTH * size / median, "parameters": parameters,
        "losses": (everyone / size).tolist(), "times": times,
    }  # fmt: skip


def compare(device: Any, join: Callable[[], Any], steps: str = "40", rows: str = "8") -> dict[str, Any]:
    """hetccl in one and in two islands, NCCL and Gloo, one after the other, twice, in one job."""
    comm = join()
    rank = comm.rank
    groups = {"hetccl_one": dist.group.WORLD, "nccl": dist.new_group(backend="nccl")}
    os.environ["HETCCL_RANKS"] = "nccl@a:1,nccl@b:1"
    groups["hetccl_two"] = dist.new_group(backend="hetccl")
    groups["gloo"] = dist.new_group(backend="gloo")
    data = [text(step, rank, int(rows), device) for step in range(16)]
    found: dict[str, Any] = {}
    for turn in range(2):
        for name, group in groups.items():
            count = int(steps) if name != "gloo" else max(int(steps) // 2, 10)
            one = train(group, device, count, int(rows), data)
            if turn == 0:
                found[name] = one
            found[name].setdefault("turns", []).append(one["seconds"])
            found[name].setdefault("curves", []).append(one["losses"])
            if rank == 0:
                print(f"{name:>12} turn {turn}: {one['seconds'] * 1e3:8.2f} ms a step, {one['tokens_per_second']:9.0f} "
                      f"tokens/s, loss {one['losses'][0]:.4f} -> {one['losses'][-1]:.4f}", flush=True)  # fmt: skip
    common = min(len(one["losses"]) for one in found.values())

    def distance(one: list[float], other: list[float]) -> float:
        return max(abs(x - y) for x, y in zip(one[:common], other[:common], strict=True))

    apart = {
        f"{a} and {b}": max(distance(x, y) for x in found[a]["curves"] for y in found[b]["curves"])
        for a, b in (("nccl", "gloo"), ("hetccl_one", "nccl"), ("hetccl_two", "nccl"), ("hetccl_two", "gloo"))
    }
    apart |= {f"{name} and itself": distance(*one["curves"]) for name, one in found.items()}
    return {"found": found, "loss_differs_by": apart, "vendor_calls": comm.stats()["vendor_calls"]}


def overlap(device: Any, join: Callable[[], Any], rows: str = "8") -> dict[str, Any]:
    """Traces of DDP steps in one island, hetccl and NCCL: how much of the communication runs beside computation."""
    from torch.profiler import ProfilerActivity, profile, schedule

    comm = join()
    groups = {"hetccl": dist.group.WORLD, "nccl": dist.new_group(backend="nccl")}
    data = [text(step, comm.rank, int(rows), device) for step in range(4)]
    exposed = alone_and_together(groups, device, data)
    if comm.rank == 0:
        print(exposed, flush=True)
    found: dict[str, list[Any]] = {name: [] for name in groups}
    for turn in range(2):
        for name, group in groups.items():
            plan = schedule(wait=5, warmup=2, active=4)
            with profile(activities=[ProfilerActivity.CUDA], schedule=plan) as watcher:
                train(group, device, 11, int(rows), data, after=lambda step, watcher=watcher: watcher.step())
            kernels = [(e.time_range.start, e.time_range.end, e.name) for e in watcher.events()
                       if str(e.device_type).endswith("CUDA") and not e.name.startswith("ProfilerStep")]  # fmt: skip
            found[name].append(shares(kernels))
            if comm.rank == 0 and turn == 0:
                watcher.export_chrome_trace(os.path.join(os.environ["GPU_OUT"], f"trace_{name}.json.gz"))
    return {"exposed": exposed, "overlap": found}


def alone_and_together(groups: dict[str, Any], device: Any, data: list[Any]) -> dict[str, Any]:
    """Of a forward and backward pass, in turn for each group: ms with and without its all_reduces (median of 30), and
    ms of all_reduces of as many bytes alone. What the first two differ by is the part that is not hidden."""
    models = {name: made(group, device)[0] for name, group in groups.items()}
    times: dict[str, dict[str, list[float]]] = {name: {"with": [], "without": [], "alone": []} for name in groups}
    sizes = [13_000_000] * 4 + [33_000_000, 39_000_000]  # of the buckets, about: 25 MB each, the embedding last
    buffers = [torch.zeros(n, dtype=torch.bfloat16, device=device) for n in sizes]
    for turn in range(36):
        for name, ddp in models.items():
            for kind in ("with", "without", "alone"):
                dist.barrier(group=groups["nccl"])
                torch.cuda.synchronize(device)
                start = time.perf_counter()
                if kind == "alone":
                    works = [dist.all_reduce(b, group=groups[name], async_op=True) for b in buffers]
                    for work in works:
                        work.wait()
                elif kind == "with":
                    ddp(data[turn % len(data)]).backward()
                else:
                    with ddp.no_sync():
                        ddp(data[turn % len(data)]).backward()
                torch.cuda.synchronize(device)
                if turn > 5:
                    times[name][kind].append((time.perf_counter() - start) * 1e3)
                for parameter in ddp.parameters():
                    parameter.grad = None
    return {name: {kind: statistics.median(ms) for kind, ms in kinds.items()} for name, kinds in times.items()}


def shares(kernels: list[tuple[float, float, str]]) -> dict[str, float]:
    """Of (start, end, name) in us: time of NCCL's kernels, and which part of it some other kernel runs as well."""
    others = sorted((a, b) for a, b, name in kernels if "nccl" not in name.lower())
    joined: list[list[float]] = []
    for a, b in others:
        if joined and a <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], b)
        else:
            joined.append([a, b])
    total = beside = 0.0
    for a, b, name in kernels:
        if "nccl" in name.lower():
            total += b - a
            beside += sum(max(0.0, min(b, d) - max(a, c)) for c, d in joined)
    return {"communication_us": total, "beside_computation": beside / total if total else 0.0,
            "computation_us": sum(b - a for a, b in joined)}  # fmt: skip


def steps(device: Any, join: Callable[[], Any], turns: str = "60", rows: str = "8") -> dict[str, Any]:
    """Whole DDP steps of hetccl in one island and of NCCL, a step of each by turns: median ms. Turns of whole
    trainings, as in `compare`, drift by more than the two differ."""
    comm = join()
    groups = {"hetccl": dist.group.WORLD, "nccl": dist.new_group(backend="nccl")}
    models = {name: made(group, device) for name, group in groups.items()}
    data = [text(step, comm.rank, int(rows), device) for step in range(16)]
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(int(turns)):
        order = list(models.items())
        for name, (ddp, optimizer) in order if turn % 2 else reversed(order):
            dist.barrier(group=groups["nccl"])
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            ddp(data[turn % len(data)]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize(device)
            if turn >= 12:
                times[name].append((time.perf_counter() - start) * 1e3)
    found = {name: statistics.median(taken) for name, taken in times.items()}
    return {**found, "speed_of_nccl": found["nccl"] / found["hetccl"]}
