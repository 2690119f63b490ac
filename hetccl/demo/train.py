# SPDX-License-Identifier: Apache-2.0
"""The training program that every rank runs. Nothing in it is special to hetccl but the back end's name.

Runs by itself under torchrun, on one host or several:
    HETCCL_RANKS=oneccl:2,host:2 torchrun --standalone --nproc-per-node=4 -m hetccl.demo.train
    HETCCL_RANKS=host@a:2,host@b:2 torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:PORT -m hetccl.demo.train
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hetccl.demo.model import CharTransformer, Corpus

WARM_UP = 5  # steps before the clock starts


def main(arguments: list[str] | None = None) -> int:
    args = _parse(arguments)
    torch.set_num_threads(1)
    if args.backend == "hetccl":
        import hetccl.torch  # noqa: F401  # registers where torch's autoload is off
    began = time.time()
    dist.init_process_group(args.backend)
    try:
        result = train(args, began)
        if dist.get_rank() == 0:
            if args.result:
                args.result.write_text(json.dumps(result))
            else:
                from hetccl.demo import report

                report.show(report.single(result))
    finally:
        dist.destroy_process_group()
    return 0 if result["identical"] else 1


def train(args: argparse.Namespace, began: float) -> dict[str, Any]:
    """Trains and returns what happened; complete on rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    joined = time.time()
    corpus = Corpus()
    torch.manual_seed(0)  # every rank starts with the same parameters
    model = DistributedDataParallel(CharTransformer(corpus.vocabulary, args.context, args.width, args.layers, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1000 + rank)  # and sees its own batches
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)

    losses: list[tuple[int, float]] = []
    ends: list[float] = []
    before = after = _stats(args.backend)
    reduced = 0
    for step in range(args.steps):
        if step == WARM_UP:
            _meet_others(args)
            before, reduced = _stats(args.backend), 0
            ends.append(time.time())
        inputs, targets = corpus.batch(batches, args.batch, args.context)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reduced += gradient_bytes
        if step % args.every == 0 or step == args.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            reduced += mean.nbytes
            losses.append((step + 1, float(mean) / size))
        if step >= WARM_UP:
            ends.append(time.time())
        if losses[-1][0] == step + 1 and rank == 0:
            speed = (len(ends) - 1) * size * args.batch * args.context / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0
            shown = f"   {speed:8.0f} tokens/s" if speed else ""
            _say(args, f"step {step + 1:4d}/{args.steps}   loss {losses[-1][1]:.4f}{shown}")
    after = _stats(args.backend)
    dist.barrier()

    tokens = args.batch * args.context * size
    return {
        "label": args.label,
        "backend": args.backend,
        "ranks": os.environ.get("HETCCL_RANKS", ""),
        "size": size,
        "steps": args.steps,
        "tokens_per_step": tokens,
        "first_loss": losses[0][1],
        "last_loss": losses[-1][1],
        "ends": ends,
        "tokens_per_second": tokens * (len(ends) - 1) / (ends[-1] - ends[0]),
        "join_seconds": joined - began,
        "train_seconds": ends[-1] - joined,
        "parameters": sum(p.numel() for p in model.parameters()),
        "reduced_bytes": reduced,
        "identical": _identical(model),
        "traffic": _collected({k: after.get(k, 0) - before.get(k, 0) for k in ("border_bytes",)}),
        "vendor_calls": _collected(after.get("vendor_calls", {})),
        **_layout(args.backend),
    }


def _identical(model: torch.nn.Module) -> bool:
    """Whether all ranks hold the same bits of all parameters. All bytes are compared, through the store only."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), _store()
    raw = b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    digest = hashlib.sha256(raw).hexdigest()
    if rank == 0:
        store.set("parameters", raw)
    theirs = store.get("parameters")
    same = theirs == raw and hashlib.sha256(theirs).hexdigest() == digest
    store.set(f"same/{rank}", f"{digest} {int(same)}")
    verdicts = [store.get(f"same/{r}").decode().split() for r in range(size)]
    return all(verdict == [digest, "1"] for verdict in verdicts)


def _collected(mine: Any) -> list[Any]:
    """Every rank's value, by rank, through the store."""
    store = _store()
    _collected.calls = getattr(_collected, "calls", 0) + 1  # type: ignore[attr-defined]
    key = f"collected/{_collected.calls}"  # type: ignore[attr-defined]
    store.set(f"{key}/{dist.get_rank()}", json.dumps(mine))
    return [json.loads(store.get(f"{key}/{r}")) for r in range(dist.get_world_size())]


def _store() -> Any:
    """The job's store, apart from the keys of the process groups."""
    return dist.PrefixStore("hetccl.demo/", dist.distributed_c10d._get_default_store())


def _stats(backend: str) -> dict[str, Any]:
    """Counters of this rank's communicator, empty on other back ends."""
    if backend != "hetccl":
        return {}
    from hetccl.torch import communicator

    return communicator().stats()


def _layout(backend: str) -> dict[str, Any]:
    """Ranks, islands and the path of each pair between islands. A rank knows its own pairs only."""
    if backend != "hetccl":
        return {"members": [], "paths": []}
    from hetccl.torch import communicator

    comm = communicator()
    known = _collected([[a, b, path] for (a, b), path in comm.paths().items()])
    pairs = {(a, b): path for mine in known for a, b, path in mine}
    return {"members": comm.describe(), "paths": [[a, b, path] for (a, b), path in sorted(pairs.items())]}


def _meet_others(args: argparse.Namespace) -> None:
    """Waits until jobs that shall be measured at the same time have all warmed up."""
    dist.barrier()
    if args.meet and dist.get_rank() == 0:
        folder, count = args.meet.rsplit(":", 1)
        (Path(folder) / args.label).touch()
        deadline = time.monotonic() + 60
        while len(os.listdir(folder)) < int(count):
            if time.monotonic() > deadline:
                sys.exit(f"hetccl.demo: only {os.listdir(folder)} of {count} jobs came within 60 s")
            time.sleep(0.01)
    dist.barrier()


def _say(args: argparse.Namespace, text: str) -> None:
    print(f"[{args.label}] {text}", flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hetccl.demo.train", description="Trains a small model.")
    parser.add_argument("--backend", default="hetccl")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps between two lines of progress")
    parser.add_argument("--label", default="training")
    parser.add_argument("--result", type=Path, help="file for the figures (JSON); without it they are printed")
    parser.add_argument("--meet", default="", help="FOLDER:COUNT, start the clock together with other jobs")
    args = parser.parse_args(arguments)
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}, the steps of the warm-up")
    return args


if __name__ == "__main__":
    sys.exit(main())
