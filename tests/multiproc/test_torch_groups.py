# SPDX-License-Identifier: Apache-2.0
"""Process groups: subgroups, device meshes and functional collectives, which ask for a group's name, and refusals."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from torch_job import MIXED, TWO, assert_passed, same

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(320)


def functional(dist: Any, rank: int, size: int) -> None:
    """Functional collectives, which find the group by its name."""
    import torch
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    total = float(size * (size + 1) // 2)
    mine, all_of = torch.full((2,), float(rank)), torch.arange(float(size)).repeat_interleave(2)
    same(funcol.all_reduce(torch.full((3,), rank + 1.0), "sum", group) + 0, torch.full((3,), total))
    same(funcol.all_reduce(torch.full((3,), rank + 1.0), "avg", group) + 0, torch.full((3,), total / size))
    same(funcol.all_gather_tensor(mine, 0, group) + 0, all_of)
    same(funcol.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, group) + 0, torch.full((2,), float(size)))
    same(funcol.broadcast(torch.full((2,), float(rank)), 1, group) + 0, torch.ones(2))
    same(funcol.all_to_all_single(torch.full((size,), float(rank)), None, None, group) + 0, torch.arange(float(size)))
    # rank r sends r+1 elements to everyone
    sent, splits = torch.full(((rank + 1) * size,), float(rank)), [r + 1 for r in range(size)]
    found = funcol.all_to_all_single(sent, splits, [rank + 1] * size, group)
    same(found + 0, torch.arange(float(size)).repeat_interleave(torch.tensor(splits)))
    several = funcol.all_reduce_coalesced([torch.full((n,), rank + 1.0) for n in (1, 1000)], "sum", group)
    for one in several:
        same(one + 0, torch.full_like(one + 0, total))
    for one in funcol.all_gather_into_tensor_coalesced([mine, mine.to(torch.int32)], group):
        same(one + 0, all_of.to((one + 0).dtype))
    wide = [torch.arange(3.0 * size), torch.arange(float(size))]
    for one, whole in zip(funcol.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0], group), wide, strict=True):
        same(one + 0, whole.chunk(size)[rank] * size)


def work_registry(dist: Any, rank: int, size: int) -> None:
    """torch keeps the works of functional collectives until the tensor is waited for."""
    import torch
    import torch.distributed._functional_collectives as funcol

    entries = torch._C._distributed_c10d._get_work_registry_size
    before = entries()
    pending = [torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD.group_name) for _ in "abc"]
    assert entries() == before + 3
    for one in pending:
        same(torch.ops._c10d_functional.wait_tensor(one), torch.full((4,), float(size)))
    assert entries() == before
    one = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert entries() == before + 1
    same(one * 1, torch.full((4,), float(size)))  # the first use waits
    assert entries() == before


def device_mesh(dist: Any, rank: int, size: int) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    def summed(mesh: Any) -> float:
        t = torch.full((5,), float(rank))
        dist.all_reduce(t, group=mesh.get_group())
        same(t, torch.full((5,), t[0].item()))
        return t[0].item()

    everyone = sum(range(size))
    assert summed(init_device_mesh("cpu", (size,))) == everyone
    inner = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // inner, inner), mesh_dim_names=("dp", "tp"))
    row = [r for r in range(size) if r // inner == rank // inner]
    column = [r for r in range(size) if r % inner == rank % inner]
    assert summed(mesh["tp"]) == sum(row)
    assert summed(mesh["dp"]) == sum(column)
    assert summed(mesh["dp", "tp"]._flatten("all")) == everyone


def dtensor(dist: Any, rank: int, size: int) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    for rows in (4 * size, 4 * size - 1):  # the second does not divide
        whole = torch.arange(4.0 * rows).reshape(rows, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        same(sharded.full_tensor(), whole)
        same(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        same(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    ones = torch.ones(2 * size, 2)
    partial = DTensor.from_local(ones, mesh, [Partial()])
    same(partial.redistribute(mesh, [Replicate()]).to_local(), torch.full((2 * size, 2), float(size)))
    same(partial.redistribute(mesh, [Shard(0)]).to_local(), torch.full((2, 2), float(size)))
    left, right = (distribute_tensor(torch.arange(16.0).view(4, 4) + n, mesh, [Shard(n)]) for n in (1, 0))
    same((left @ right).full_tensor(), (torch.arange(16.0).view(4, 4) + 1) @ torch.arange(16.0).view(4, 4))


def subgroups(dist: Any, rank: int, size: int) -> None:
    """Groups inside an island, across islands, overlapping, of one rank, and of another back end."""
    import torch

    pair = [r for r in range(size) if r // 2 == rank // 2]
    group = dist.new_group(pair, use_local_synchronization=True)
    t = torch.full((1,), float(rank))
    dist.all_reduce(t, group=group)
    assert t.item() == sum(pair)
    dist.destroy_process_group(group)
    full = list(range(size))
    lists = [[0, 1], [2, 3], [1, 2], [0, 3], [0, 1, 2], [3], [3, 1, 0], full, full[::-1], [1]]
    for members in [members for members in lists if max(members) < size]:
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


def overlapping(dist: Any, rank: int, size: int) -> None:
    """Groups that share ranks, alive at once, their operations in flight together, in the same order everywhere."""
    import torch

    lists = [list(range(size))] + [[r, (r + 1) % size] for r in range(size)]
    groups = [(sorted(members), dist.new_group(members)) for members in lists]
    for _ in range(3):
        pending = []
        for members, group in groups:
            if rank in members:
                t = torch.full((1000,), rank + 1.0)
                pending.append((dist.all_reduce(t, group=group, async_op=True), t, sum(members) + len(members)))
        for work, t, expected in reversed(pending):
            work.wait()
            same(t, torch.full((1000,), float(expected)))
    for members, group in groups:
        if rank in members:
            dist.destroy_process_group(group)


def timeout_of_a_group(dist: Any, rank: int, size: int) -> None:
    """`_set_pg_timeout` reaches the group on newer torch; older torch warns and leaves it to the group's own method."""
    import datetime
    import time
    import warnings

    import torch

    from hetccl.errors import TimedOutError
    from hetccl.torch import communicator
    from hetccl.torch._compat import HAS_PYTHON_BACKEND

    group = dist.new_group()
    if HAS_PYTHON_BACKEND:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group)
    else:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group)
        assert said
        group.set_timeout(datetime.timedelta(seconds=1))
    assert communicator(group).timeout == 1.0
    if rank == 0:
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except TimedOutError as error:
            assert 0.9 < time.monotonic() - began < 20 and error.missing, error
        else:
            raise AssertionError("nothing was raised")
    dist.barrier()  # the default group lives on
    dist.destroy_process_group(group)


def monitored_barrier(dist: Any, rank: int, size: int) -> None:
    """torch refuses its own function to every back end but Gloo (2.13); the group's method names who did not come."""
    import datetime

    from hetccl.errors import TimedOutError
    from hetccl.torch._compat import HAS_PYTHON_BACKEND

    group = dist.group.WORLD
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    except ValueError as error:
        assert "GLOO" in str(error)
    for wait_all_ranks in (False, True, True):
        group.monitored_barrier(datetime.timedelta(seconds=20), wait_all_ranks=wait_all_ranks)
    late = dist.new_group(list(range(size)))
    if rank == 0:
        for wait_all_ranks, seconds, missing in (
            (False, 0.2, (1,)),
            (True, 0.2, tuple(range(1, size))),
            (False, 0, None),
        ):
            try:
                late.monitored_barrier(datetime.timedelta(seconds=seconds), wait_all_ranks=wait_all_ranks)
            except Exception as error:
                assert isinstance(error, RuntimeError), error
                if not HAS_PYTHON_BACKEND:  # there C++ stands between, which keeps the text only
                    assert isinstance(error, TimedOutError) and missing in (None, error.missing), error
                assert "monitoredBarrier" in str(error)
            else:
                raise AssertionError("nothing was raised")
    dist.barrier(group=late)  # a monitored barrier that failed does not harm the group


def refusals(dist: Any, rank: int, size: int) -> None:
    """What cannot be done is refused at once, with a typed error that is torch's too, and the group lives on."""
    import torch

    from hetccl.errors import UnsupportedError, UsageError
    from hetccl.torch._compat import HAS_PYTHON_BACKEND

    cases = [
        (UnsupportedError, lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e8m0fnu))),
        (UsageError, lambda: dist.group.WORLD.allreduce([torch.ones(1), torch.ones(1)])),
        (UsageError, lambda: dist.group.WORLD.all_gather_single(torch.ones(size + 1), torch.ones(1))),
        (UsageError, lambda: dist.group.WORLD.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1), [], [])),
    ]
    if not HAS_PYTHON_BACKEND:  # there torch answers for such tensors itself
        cases.append((UnsupportedError, lambda: dist.all_reduce(torch.eye(2).to_sparse_csr())))
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


CHECKS = (
    functional,
    work_registry,
    device_mesh,
    dtensor,
    subgroups,
    overlapping,
    monitored_barrier,
    refusals,
    timeout_of_a_group,
)


@pytest.mark.parametrize("ranks", [TWO, MIXED])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_groups(check: Any, ranks: str) -> None:
    assert_passed(check, CHECKS, ranks)
