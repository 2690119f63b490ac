# SPDX-License-Identifier: Apache-2.0
"""Process groups: subgroups, device meshes and functional collectives, which ask for a group's name, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from hetccl.testing.launch import run

pytest.importorskip("torch")

TWO = "host@a:1,host@b:1"
THREE = "host@a:2,host@b:1"
FOUR = "host@a:2,host@b:2"


@pytest.mark.parametrize("ranks", [TWO, THREE])
def test_functional_collectives(ranks: str) -> None:
    run(functional, ranks, timeout=80)


def test_subgroups() -> None:
    run(subgroups, FOUR, timeout=80)


def test_refusals() -> None:
    run(refusals, TWO, timeout=60)


def joined() -> Any:
    """torch.distributed with a hetccl default group."""
    import datetime

    import torch
    import torch.distributed as dist

    import hetccl.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("hetccl", timeout=datetime.timedelta(seconds=30))
    return dist


def same(found: Any, expected: Any) -> None:
    import torch

    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), f"{found} != {expected}"


def functional(rank: int, size: int) -> None:
    """Functional collectives and DTensor, which need the group's name."""
    import torch
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    dist = joined()
    group = dist.group.WORLD
    total = float(size * (size + 1) // 2)
    mine = torch.full((2,), float(rank))
    same(funcol.all_reduce(torch.full((3,), rank + 1.0), "sum", group) + 0, torch.full((3,), total))
    same(funcol.all_gather_tensor(mine, 0, group) + 0, torch.arange(float(size)).repeat_interleave(2))
    same(funcol.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, group) + 0, torch.full((2,), float(size)))
    same(funcol.broadcast(torch.full((2,), float(rank)), 1, group) + 0, torch.ones(2))
    same(funcol.all_to_all_single(torch.full((size,), float(rank)), None, None, group) + 0, torch.arange(float(size)))
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(16.0 * size).reshape(4 * size, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    same(sharded.full_tensor(), whole)
    same(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    partial = DTensor.from_local(torch.ones(2 * size, 2), mesh, [Partial()])
    same(partial.redistribute(mesh, [Replicate()]).to_local(), torch.full((2 * size, 2), float(size)))
    same(partial.redistribute(mesh, [Shard(0)]).to_local(), torch.full((2, 2), float(size)))
    dist.destroy_process_group()


def subgroups(rank: int, size: int) -> None:
    """Groups inside an island, across islands, overlapping, of one rank, and of another back end."""
    import torch

    dist = joined()
    pair = [rank - rank % 2, rank - rank % 2 + 1]
    group = dist.new_group(pair, use_local_synchronization=True)
    t = torch.full((1,), float(rank))
    dist.all_reduce(t, group=group)
    assert t.item() == sum(pair)
    dist.destroy_process_group(group)
    for members in ([0, 1], [2, 3], [1, 2], [0, 3], [0, 1, 2], [3], [3, 1, 0]):
        group = dist.new_group(members)
        if rank in members:
            t = torch.full((9,), float(rank))
            dist.all_reduce(t, group=group)
            same(t, torch.full((9,), float(sum(members))))
            t = torch.full((2,), float(rank))
            dist.broadcast(t, members[-1], group=group)
            same(t, torch.full((2,), float(members[-1])))
    gloo = dist.new_group(backend="gloo")
    t = torch.ones(1)
    dist.all_reduce(t, group=gloo)
    assert t.item() == size
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size
    dist.destroy_process_group()


def refusals(rank: int, size: int) -> None:
    """What cannot be done is refused at once, with a typed error that is torch's too, and the group lives on."""
    import torch

    from hetccl.errors import UnsupportedError, UsageError
    from hetccl.torch._compat import HAS_PYTHON_BACKEND

    dist = joined()
    cases = [
        (UnsupportedError, lambda: dist.all_reduce(torch.eye(2).to_sparse())),
        (UnsupportedError, lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e8m0fnu))),
        (UsageError, lambda: dist.group.WORLD.allreduce([torch.ones(1), torch.ones(1)])),
        (UsageError, lambda: dist.group.WORLD.all_gather_single(torch.ones(size + 1), torch.ones(1))),
        (UsageError, lambda: dist.group.WORLD.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1), [], [])),
    ]
    if not HAS_PYTHON_BACKEND:  # there torch answers for meta tensors itself
        cases.append((UnsupportedError, lambda: dist.all_reduce(torch.empty(3, device="meta"))))
    for kind, call in cases:
        try:
            call()
        except kind as error:
            assert isinstance(error, dist.DistBackendError), error
        else:
            raise AssertionError(f"expected {kind.__name__}")
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size
    dist.destroy_process_group()
