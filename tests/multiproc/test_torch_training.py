# SPDX-License-Identifier: Apache-2.0
"""Training over hetccl: the same numbers as Gloo, and failures that reach the training loop as exceptions."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from torch_job import MIXED, TWO, assert_passed

from hetccl.testing.launch import run_results

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(320)


def test_a_failed_bucket_raises_in_backward() -> None:
    """The failure arrives through a future in C++, where a wrongly made one would end the process."""
    results = run_results(aborted_backward, TWO, timeout=90)
    for result in results:
        assert (result.error, result.returncode) == (None, 0), result.traceback + result.stderr
    assert results[0].value == "raised"


def everyone_has(dist: Any, size: int, parameters: Any) -> None:
    """All ranks hold the same bits."""
    import torch

    found = [torch.zeros_like(parameters) for _ in range(size)]
    gloo = dist.new_group(backend="gloo")
    dist.all_gather(found, parameters, group=gloo)
    assert all(one.view(torch.int32).equal(found[0].view(torch.int32)) for one in found)
    dist.destroy_process_group(gloo)


def flat(model: Any) -> Any:
    import torch

    return torch.cat([p.detach().flatten() for p in model.parameters()])


def exact_steps(dist: Any, rank: int, size: int) -> None:
    """Small whole numbers and a learning rate that is a power of two: no sum is ever rounded."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

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
        return seen, flat(model)

    ours, parameters = train(None)
    theirs, expected = train(gloo)
    assert ours == theirs and torch.equal(parameters, expected)
    everyone_has(dist, size, parameters)


def rounded_steps(dist: Any, rank: int, size: int) -> None:
    """A real model with rounding, without and with a hook that halves the bytes: close to Gloo's."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

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
        return loss.item(), flat(model)

    for hook in (None, default_hooks.fp16_compress_hook):
        loss, parameters = train(None, hook)
        expected, reference = train(gloo, hook)
        assert abs(loss - expected) < 1e-3 and torch.allclose(parameters, reference, atol=1e-3 if hook else 1e-5)
        everyone_has(dist, size, parameters)


def fully_sharded(dist: Any, rank: int, size: int) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

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


def uneven_inputs(dist: Any, rank: int, size: int) -> None:
    """`join()`: ranks with fewer batches take part in the others' steps, and all end with one model."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    batches = torch.Generator().manual_seed(rank)
    steps = 0
    with ddp.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            ddp(torch.randn(4, 8, generator=batches)).pow(2).mean().backward()
            optimizer.step()
            steps += 1
    assert steps == 2 + rank
    everyone_has(dist, size, flat(model))


def sparse_gradients(dist: Any, rank: int, size: int) -> None:
    """An embedding whose gradients are sparse; each rank touches other rows."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Embedding(4 * size, 3, sparse=True)
    before = model.weight.detach().clone()
    ddp = DistributedDataParallel(model)
    ddp(torch.tensor([rank, rank, 4 * size - 1])).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None and gradient.is_sparse
    expected = torch.zeros_like(before)
    expected[:size] = 2 / size
    expected[-1] = 1.0
    assert torch.allclose(gradient.to_dense(), expected)
    torch.optim.SGD(ddp.parameters(), lr=0.5).step()
    everyone_has(dist, size, flat(model))


def checkpoint(dist: Any, rank: int, size: int) -> None:
    """A distributed checkpoint: what each rank saved of a sharded tensor is read back, also under other shards."""
    import shutil
    import tempfile

    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    place = [tempfile.mkdtemp(prefix="hetccl-test-") if rank == 0 else None]
    dist.broadcast_object_list(place, 0)
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(8.0 * size).view(2 * size, 4)
    dcp.save({"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "steps": 17}, checkpoint_id=place[0])
    state = {"sharded": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)]), "steps": 0}
    dcp.load(state, checkpoint_id=place[0])
    assert state["steps"] == 17 and torch.equal(state["sharded"].full_tensor(), whole)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(place[0])


def aborted_backward(rank: int, size: int) -> str:
    import datetime
    import threading

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hetccl.torch import communicator

    torch.set_num_threads(1)
    dist.init_process_group("hetccl", timeout=datetime.timedelta(seconds=40))
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


CHECKS = (exact_steps, rounded_steps, uneven_inputs, sparse_gradients, fully_sharded, checkpoint)


@pytest.mark.parametrize("ranks", [TWO, MIXED])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_training(check: Any, ranks: str) -> None:
    assert_passed(check, CHECKS, ranks)
