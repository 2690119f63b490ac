# SPDX-License-Identifier: Apache-2.0
"""weighted_average_hook: uneven batches over mixed islands give the gradient of one big batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetccl.testing.launch import run

torch = pytest.importorskip("torch")

MIXED = "host:1,sim-a:2,oneccl:1"


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_exact_where_no_sum_is_rounded(kind: str, oneccl: None) -> None:
    """Batches of powers of two and small whole numbers: bit for bit the gradient of one batch."""
    for differences in run(gradients, MIXED, timeout=100, args=(kind, [[8, 4, 2, 2], [1, 1, 2, 4], [0, 8, 8, 0]])):
        assert differences == [0.0] * 3


def test_close_for_any_batches(oneccl: None) -> None:
    for differences in run(gradients, MIXED, timeout=100, args=("float64", [[7, 5, 1, 3], [2, 0, 9, 4]], True)):
        assert max(differences) < 1e-14


def test_without_the_hook_uneven_batches_are_wrong() -> None:
    """So the two tests above show something."""
    for differences in run(gradients, "host@a:1,host@b:1", timeout=60, args=("float32", [[8, 2]], False, False)):
        assert differences[0] > 0.01


def test_many_buckets_and_accumulated_steps() -> None:
    assert run(trained, "host:1,sim-a:1", timeout=90) == [0.0, 0.0]


def test_fixed_shares_exchange_nothing() -> None:
    calls = run(shared, "host@a:1,host@b:1", timeout=60)
    assert [difference for difference, _ in calls] == [0.0, 0.0]
    assert all(reduced == 1 for _, reduced in calls)  # the one bucket


def test_misuse_is_told() -> None:
    for texts in run(misused, "host@a:1,host@b:1", timeout=60):
        assert "set state.batch" in texts[0]
        assert "fixed share" in texts[1]
        assert "whole number of rows" in texts[2]
        assert "from 0 to 1" in texts[3]


# ---- what the ranks do


def joined() -> Any:
    import torch.distributed as dist

    import hetccl.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("hetccl")
    return dist


def data(rows: int, kind: Any, rounded: bool) -> Any:
    if rounded:
        return torch.randn(rows, 16, dtype=kind, generator=torch.Generator().manual_seed(3))
    return ((torch.arange(rows * 16) * 7 % 5) - 2).view(rows, 16).to(kind)


def gradients(
    rank: int, size: int, kind: str, batches: list[list[int]], rounded: bool = False, hooked: bool = True
) -> list[float]:
    """For each step the largest difference from the gradient of all rows in one batch."""
    from torch.nn.parallel import DistributedDataParallel

    from hetccl.torch import WeightedAverage, weighted_average_hook

    dist = joined()
    dtype = getattr(torch, kind)
    model, alone = (torch.nn.Linear(16, 4, bias=True, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        for each in (model, alone):
            each.weight.copy_((torch.arange(64.0).view(4, 16) % 3) - 1)
            each.bias.zero_()
    ddp = DistributedDataParallel(model)
    state = WeightedAverage(ddp)
    if hooked:
        ddp.register_comm_hook(state, weighted_average_hook)
    found = []
    for rows in batches:
        x = data(sum(rows), dtype, rounded)
        start = sum(rows[:rank])
        if hooked:
            state.batch = rows[rank]
        ddp(x[start : start + rows[rank]]).mean(0).sum().backward()
        alone(x).mean(0).sum().backward()
        pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
        found.append(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))
        for a, b in pairs:
            a.grad = b.grad = None
    dist.destroy_process_group()
    return found


def trained(rank: int, size: int) -> float:
    """Several buckets; two backward passes of which only the second is exchanged, over 8 and 24 rows."""
    from torch.nn.parallel import DistributedDataParallel

    from hetccl.torch import WeightedAverage, weighted_average_hook

    dist = joined()
    torch.manual_seed(5)
    model, alone = (torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))) for _ in range(2))
    with torch.no_grad():
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            a.copy_(torch.randint(-1, 2, a.shape))
            b.copy_(a)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    state = WeightedAverage(ddp)
    ddp.register_comm_hook(state, weighted_average_hook)
    rows = (8, 24)
    x = data(32, torch.float32, False)
    mine = x[: rows[0]] if rank == 0 else x[rows[0] :]
    half = len(mine) // 2
    worst = 0.0
    for _ in range(3):
        state.batch = rows[rank]
        with ddp.no_sync():
            (ddp(mine[:half]).sum() / rows[rank]).backward()
        (ddp(mine[half:]).sum() / rows[rank]).backward()
        (alone(x).sum() / 32).backward()
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            # 8 and 24 rows: the weights 1/4 and 3/4 are exact, a mean over 24 is rounded once
            worst = max(worst, float(((a.grad - b.grad).abs() / (b.grad.abs() + 1)).max()))
            a.grad = b.grad = None
    dist.destroy_process_group()
    return 0.0 if worst < 1e-6 else worst


def shared(rank: int, size: int) -> tuple[float, int]:
    from torch.nn.parallel import DistributedDataParallel

    import hetccl.torch
    from hetccl.torch import WeightedAverage, weighted_average_hook

    dist = joined()
    model, alone = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)
    alone.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(WeightedAverage(ddp, (0.75, 0.25)[rank]), weighted_average_hook)
    x = data(8, torch.float32, False)
    mine = x[:6] if rank == 0 else x[6:]
    comm = hetccl.torch.communicator()
    before = comm.stats()["operations"].get("all_reduce", 0)
    (ddp(mine).sum() / len(mine)).backward()
    after = comm.stats()["operations"].get("all_reduce", 0)
    (alone(x).sum() / 8).backward()
    worst = max(
        float((a.grad - b.grad).abs().max()) for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    )
    dist.destroy_process_group()
    return (0.0 if worst < 1e-6 else worst), after - before


def misused(rank: int, size: int) -> list[str]:
    from torch.nn.parallel import DistributedDataParallel

    from hetccl.errors import UsageError
    from hetccl.torch import WeightedAverage, weighted_average_hook

    dist = joined()
    texts = []

    def expect(kind: type[BaseException], body: Callable[[], Any]) -> None:
        try:
            body()
        except kind as error:
            texts.append(str(error))
        else:
            texts.append("nothing was raised")

    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    state = WeightedAverage(ddp)
    ddp.register_comm_hook(state, weighted_average_hook)
    expect(Exception, lambda: ddp(torch.ones(2, 4)).sum().backward())
    expect(UsageError, lambda: setattr(WeightedAverage(ddp, 0.5), "batch", 3))
    expect(UsageError, lambda: setattr(state, "batch", 2.5))
    expect(UsageError, lambda: WeightedAverage(ddp, 1.5))
    dist.destroy_process_group()
    return texts
