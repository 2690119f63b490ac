# SPDX-License-Identifier: Apache-2.0
"""Training over hetccl: the same numbers as Gloo, and failures that reach the training loop as exceptions."""

from __future__ import annotations

from typing import Any

import pytest

from hetccl.testing.launch import run, run_results

pytest.importorskip("torch")

TWO = "host@a:1,host@b:1"
FOUR = "host@a:2,host@b:2"


@pytest.mark.parametrize("ranks", [TWO, FOUR])
def test_ddp_equals_gloo_where_sums_are_exact(ranks: str) -> None:
    losses = run(exact_steps, ranks, timeout=90)
    assert all(one == losses[0] for one in losses)


def test_ddp_with_two_vendors_stays_together() -> None:
    """A real model with rounding: every rank ends with the same bits, close to Gloo's."""
    run(rounded_steps, FOUR, timeout=90)


def test_fsdp2() -> None:
    run(fully_sharded, TWO, timeout=90)


def test_a_failed_bucket_raises_in_backward() -> None:
    """The failure arrives through a future in C++, where a wrongly made one would end the process."""
    results = run_results(aborted_backward, TWO, timeout=90)
    for result in results:
        assert (result.error, result.returncode) == (None, 0), result.traceback + result.stderr
    assert results[0].value == "raised"


def joined() -> Any:
    import datetime

    import torch
    import torch.distributed as dist

    import hetccl.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("hetccl", timeout=datetime.timedelta(seconds=40))
    return dist


def exact_steps(rank: int, size: int) -> list[float]:
    """Small whole numbers and a learning rate that is a power of two: no sum is ever rounded."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = joined()
    gloo = dist.new_group(backend="gloo")

    def train(group: Any) -> tuple[list[float], torch.Tensor]:
        model = torch.nn.Linear(16, 4, bias=True)
        with torch.no_grad():
            model.weight.copy_((torch.arange(64.0).view(4, 16) % 5) - 2)
            model.bias.zero_()
        ddp = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-10)
        seen = []
        for step in range(4):
            x = ((torch.arange(32.0).view(2, 16) * (rank + 3) + step) % 7) - 3
            loss = ddp(x).sum() / 8
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen, torch.cat([p.detach().flatten() for p in model.parameters()])

    ours, parameters = train(None)
    theirs, expected = train(gloo)
    assert ours == theirs and torch.equal(parameters, expected)
    dist.destroy_process_group()
    return parameters.tolist()


def rounded_steps(rank: int, size: int) -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    dist = joined()
    gloo = dist.new_group(backend="gloo")

    def train(group: Any, hook: Any = None) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=0.005)
        if hook is not None:
            ddp.register_comm_hook(group, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        batches = torch.Generator().manual_seed(rank)
        for _ in range(5):
            loss = ddp(torch.randn(8, 32, generator=batches)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item(), torch.cat([p.detach().flatten() for p in model.parameters()])

    for hook in (None, default_hooks.fp16_compress_hook):
        loss, parameters = train(None, hook)
        expected, reference = train(gloo, hook)
        assert abs(loss - expected) < 1e-3 and torch.allclose(parameters, reference, atol=1e-3 if hook else 1e-5)
        everyone = [torch.zeros_like(parameters) for _ in range(size)]
        dist.all_gather(everyone, parameters, group=gloo)
        assert all(one.view(torch.int32).equal(everyone[0].view(torch.int32)) for one in everyone)
    dist.destroy_process_group()


def fully_sharded(rank: int, size: int) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist = joined()

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    sharded, whole = model(), model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, whole)]
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for _ in range(3):
        sharded(batches[rank]).pow(2).sum().backward()
        whole(torch.cat(batches)).pow(2).sum().div(size).backward()
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one.full_tensor(), other.detach(), atol=1e-5)
    dist.destroy_process_group()


def aborted_backward(rank: int, size: int) -> str:
    import threading

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from hetccl.torch import communicator

    dist = joined()
    gloo = dist.new_group(backend="gloo")
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    outcome = "waited"
    if rank == 0:
        timer = threading.Timer(1.0, communicator().abort)  # rank 1 never comes
        timer.start()
        try:
            ddp(torch.ones(2, 4)).sum().backward()
            outcome = "returned"
        except RuntimeError as error:
            assert "bort" in str(error), error
            outcome = "raised"
        timer.join()
        for async_op in (False, True):
            try:
                work = dist.all_reduce(torch.ones(1), async_op=async_op)
                if async_op:
                    work.wait()
            except dist.DistBackendError:
                continue
            raise AssertionError("an aborted group went on")
    dist.barrier(group=gloo)
    dist.destroy_process_group()
    return outcome
