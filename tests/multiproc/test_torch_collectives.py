# SPDX-License-Identifier: Apache-2.0
"""Every operation of torch.distributed over ranks of two and of three islands, with the results checked."""

from __future__ import annotations

import functools
import math
import operator
import os
import sys
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from torch_job import MIXED, TWO, assert_passed, same

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(320)


def collectives(dist: Any, rank: int, size: int) -> None:
    import torch

    total = size * (size + 1) // 2
    for async_op in (False, True):
        for count in (1, 5, 1000, 70_001):
            t = torch.full((count,), float(rank + 1))
            _done(dist.all_reduce(t, async_op=async_op), async_op)
            same(t, torch.full((count,), float(total)))
            t = torch.full((count,), rank + 1, dtype=torch.int64)
            _done(dist.all_reduce(t, dist.ReduceOp.MAX, async_op=async_op), async_op)
            same(t, torch.full((count,), size))
            t = torch.full((count,), float(rank))
            _done(dist.broadcast(t, size - 1, async_op=async_op), async_op)
            same(t, torch.full((count,), size - 1.0))
            mine, out = torch.arange(count) + 100 * rank, torch.zeros(count * size, dtype=torch.int64)
            whole = torch.cat([torch.arange(count) + 100 * r for r in range(size)])
            _done(dist.all_gather_into_tensor(out, mine, async_op=async_op), async_op)
            same(out, whole)
            out.zero_()
            out[rank * count : (rank + 1) * count] = mine
            _done(dist.all_gather_into_tensor(out, out[rank * count : (rank + 1) * count], async_op=async_op), async_op)
            same(out, whole)
            outs = [torch.zeros(count, dtype=torch.int64) for _ in range(size)]
            _done(dist.all_gather(outs, mine, async_op=async_op), async_op)
            same(torch.cat(outs), whole)
            outs = list(torch.zeros(size, count, dtype=torch.int64))
            _done(dist.all_gather(outs, mine, async_op=async_op), async_op)
            same(torch.cat(outs), whole)
            part = torch.zeros(count, dtype=torch.int64)
            _done(dist.reduce_scatter_tensor(part, whole + rank, async_op=async_op), async_op)
            expected = size * (torch.arange(count) + 100 * rank) + total - size
            same(part, expected)
            part.zero_()
            pieces = [piece.clone() for piece in (whole + rank).chunk(size)]
            _done(dist.reduce_scatter(part, pieces, async_op=async_op), async_op)
            same(part, expected)
        _done(dist.barrier(async_op=async_op), async_op)
    for op, expected in (
        (dist.ReduceOp.MIN, [1, 1 << (size - 1), 7]),
        (dist.ReduceOp.MAX, [size, 1 << (size - 1), 7]),
        (dist.ReduceOp.PRODUCT, [math.factorial(size), (1 << (size - 1)) ** size, 7**size]),
        (dist.ReduceOp.BOR, [functools.reduce(operator.or_, range(1, size + 1)), 1 << (size - 1), 7]),
        (dist.ReduceOp.BAND, [functools.reduce(operator.and_, range(1, size + 1)), 1 << (size - 1), 7]),
        (
            dist.ReduceOp.BXOR,
            [
                functools.reduce(operator.xor, range(1, size + 1)),
                0 if size % 2 == 0 else 1 << (size - 1),
                7 * (size % 2),
            ],
        ),
    ):
        t = torch.tensor([rank + 1, 1 << (size - 1), 7])
        dist.all_reduce(t, op)
        same(t, expected)
    t = torch.full((3,), float(rank + 1))
    dist.all_reduce(t, dist.ReduceOp.AVG)
    same(t, torch.full((3,), total / size))
    t = torch.full((3,), float(rank + 1))
    dist.all_reduce(t, dist._make_nccl_premul_sum(float(rank + 2)))
    same(t, torch.full((3,), float(sum((r + 1) * (r + 2) for r in range(size)))))


def composed(dist: Any, rank: int, size: int) -> None:
    import torch

    total = float(size * (size + 1) // 2)
    for root in range(size):
        t = torch.full((7,), rank + 1.0)
        dist.reduce(t, root)
        same(t, torch.full((7,), total if rank == root else rank + 1.0))
        outs = [torch.zeros(7) for _ in range(size)] if rank == root else None
        dist.gather(torch.full((7,), float(rank)), outs, root)
        if outs:
            same(torch.stack(outs), torch.arange(float(size)).repeat_interleave(7).view(size, 7))
        ins = [torch.full((7,), 10.0 * root + r) for r in range(size)] if rank == root else None
        t = torch.zeros(7)
        dist.scatter(t, ins, root)
        same(t, torch.full((7,), 10.0 * root + rank))
    out, inp = torch.zeros(2 * size), torch.arange(2.0 * size) + 100 * rank
    dist.all_to_all_single(out, inp)
    same(out, torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(size)]))
    # rank r sends i+1 rows to rank i, so it receives rank+1 rows from everyone
    inp = torch.full((size * (size + 1) // 2, 3), float(rank))
    out = torch.zeros((rank + 1) * size, 3)
    work = dist.all_to_all_single(out, inp, [rank + 1] * size, [i + 1 for i in range(size)], async_op=True)
    work.wait()
    same(out, torch.arange(float(size)).repeat_interleave(3 * (rank + 1)).view(-1, 3))
    outs = [torch.zeros(rank + 1, dtype=torch.bool) for _ in range(size)]
    dist.all_to_all(outs, [torch.ones(i + 1, dtype=torch.bool) for i in range(size)])
    assert all(o.all() for o in outs)
    outs = [torch.zeros(r + 1) for r in range(size)]  # unequal shapes
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
    same(torch.cat(outs), torch.cat([torch.full((r + 1,), float(r)) for r in range(size)]))
    part = torch.zeros(rank + 1)
    dist.reduce_scatter(part, [torch.full((r + 1,), float(rank + r)) for r in range(size)])
    same(part, torch.full((rank + 1,), float(sum(range(size)) + size * rank)))


def sparse(dist: Any, rank: int, size: int) -> None:
    """Sums of sparse tensors: no two ranks have the same elements; dense dimensions; none at all on one rank."""
    import torch

    from hetccl.errors import MismatchError, UnsupportedError
    from hetccl.torch._compat import HAS_PYTHON_BACKEND

    def part(r: int, dense: tuple[int, ...]) -> torch.Tensor:
        rows = torch.arange(r + 1) if r else torch.zeros(0, dtype=torch.int64)
        places = torch.stack([rows, rows % 2]).repeat(1, 2)  # each element twice: not coalesced
        values = torch.arange(1.0, 2 * len(rows) + 1).reshape(-1, *[1] * len(dense)).expand(-1, *dense).clone()
        return torch.sparse_coo_tensor(places, values, (size, 3, *dense), check_invariants=True)

    for dense in ((), (2,), (2, 3)):
        expected = sum(part(r, dense).to_dense() for r in range(size))
        t = part(rank, dense)
        dist.all_reduce(t)
        same(t.to_dense(), expected)
        t = part(rank, dense)
        work = dist.all_reduce(t, async_op=True)
        work.wait()
        same(t.to_dense(), expected)
    nothing = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (5,), check_invariants=True)
    dist.all_reduce(nothing)
    same(nothing.to_dense(), torch.zeros(5))
    cases = [
        (UnsupportedError, lambda: dist.all_reduce(part(rank, ()), dist.ReduceOp.MAX)),
        (MismatchError, lambda: dist.all_reduce(part(rank, (2,) if rank == 0 else (3,)))),
    ]
    if not HAS_PYTHON_BACKEND:  # there torch refuses these itself
        cases.append((UnsupportedError, lambda: dist.all_reduce(torch.eye(2).to_sparse_csr())))
        cases.append((UnsupportedError, lambda: dist.broadcast(part(rank, ()), 0)))
    for kind, call in cases:
        try:
            call()
        except kind as error:
            assert isinstance(error, dist.DistBackendError), error
        else:
            raise AssertionError(f"expected {kind.__name__}")


def objects(dist: Any, rank: int, size: int) -> None:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * (100 * rank)})
    assert found == [{"rank": r, "text": "x" * (100 * r)} for r in range(size)]
    values = [{"a": 1}, "two", [3]] if rank == 1 else [None] * 3
    dist.broadcast_object_list(values, 1)
    assert values == [{"a": 1}, "two", [3]]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(("rank", rank), gathered, 0)
    assert rank != 0 or gathered == [("rank", r) for r in range(size)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]


def point_to_point(dist: Any, rank: int, size: int) -> None:
    import torch

    from hetccl.torch._compat import HAS_PYTHON_BACKEND

    if rank == 0:
        for _ in range(size - 1):
            t = torch.zeros(2)
            if HAS_PYTHON_BACKEND:  # there torch's own holder of a work does not know the source
                dist.irecv(t).wait()
                assert 0 < t[0] < size
            else:
                source = dist.recv(t)
                same(t, torch.full((2,), float(source)))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    if rank == 0:  # tags: taken out of order
        for work in [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (7, 8)]:
            work.wait()
    elif rank == 1:
        a, b = torch.zeros(1), torch.zeros(1)
        dist.recv(b, 0, tag=8)
        dist.recv(a, 0, tag=7)
        same(torch.cat([a, b]), [7.0, 8.0])
    if rank < 2:
        works = [dist.isend(torch.full((3,), float(i)), 1 - rank) for i in range(5)]
        buffers = [torch.zeros(3) for _ in range(5)]
        works += [dist.irecv(b, 1 - rank) for b in buffers]
        for work in works:
            work.wait()
        same(torch.stack(buffers)[:, 0], torch.arange(5.0))
    t = torch.zeros(4, dtype=torch.complex64)
    if rank == 0:
        dist.send(torch.full((4,), 1 + 2j, dtype=torch.complex64), 1)
    elif rank == 1:
        dist.recv(t, 0)
        same(t, torch.full((4,), 1 + 2j, dtype=torch.complex64))
    dist.barrier()


def batched(dist: Any, rank: int, size: int) -> None:
    import torch

    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 100_000, 3_000_000):  # a send must not block, whatever its size
        mine, theirs = torch.full((count,), float(rank)), torch.full((count,), -1.0)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)])
        for work in works:
            work.wait()
        same(theirs, torch.full((count,), float(left)))
    others = [r for r in range(size) if r != rank]  # everyone with everyone, receives first on some ranks
    mine, found = torch.arange(5.0) + 100 * rank, {r: torch.zeros(5) for r in others}
    sends = [dist.P2POp(dist.isend, mine, r) for r in others]
    receives = [dist.P2POp(dist.irecv, found[r], r) for r in others]
    for work in dist.batch_isend_irecv(sends + receives if rank % 2 else receives + sends):
        work.wait()
    for r in others:
        same(found[r], torch.arange(5.0) + 100 * r)


def layouts(dist: Any, rank: int, size: int) -> None:
    """Tensors that are not contiguous, have no dimension or no element."""
    import torch

    base = torch.zeros(6, 4)
    for async_op in (False, True):
        base.zero_()
        t = base[:, 1]
        t.fill_(rank + 1.0)
        _done(dist.all_reduce(t, async_op=async_op), async_op)
        same(base[:, 1], torch.full((6,), float(size * (size + 1) // 2)))
        same(base[:, [0, 2, 3]], torch.zeros(6, 3))
        t = base.t()
        t.copy_(torch.arange(24.0).view(4, 6) * (rank + 1))
        _done(dist.broadcast(t, 1, async_op=async_op), async_op)
        same(t, torch.arange(24.0).view(4, 6) * 2)
        wide = torch.zeros(3, 2 * size)[:, ::2]  # [3, size], not contiguous
        _done(dist.all_gather_into_tensor(wide.t(), torch.full((3,), rank + 1.0), async_op=async_op), async_op)
        same(wide, torch.arange(1.0, size + 1).repeat(3, 1))
        outs = [torch.zeros(4, 2)[:, 0] for _ in range(size)]
        _done(dist.all_gather(outs, (torch.ones(2, 4) * rank).t()[:, 1], async_op=async_op), async_op)
        same(torch.stack(outs), torch.arange(float(size)).repeat_interleave(4).view(size, 4))
        part = torch.zeros(5, 3)[:, 2]
        _done(
            dist.reduce_scatter_tensor(
                part, torch.arange(5.0 * size).view(size, 5).t().contiguous().t().reshape(-1), async_op=async_op
            ),
            async_op,
        )
        same(part, size * (torch.arange(5.0) + 5 * rank))
        scalar = torch.tensor(rank + 1.0)
        _done(dist.all_reduce(scalar, async_op=async_op), async_op)
        assert scalar.item() == size * (size + 1) // 2
        empty = torch.zeros(0)
        _done(dist.all_reduce(empty, async_op=async_op), async_op)
        _done(dist.broadcast(empty, 0, async_op=async_op), async_op)
        _done(dist.all_gather_into_tensor(torch.zeros(0), empty, async_op=async_op), async_op)
    parameter = torch.nn.Parameter(torch.full((4, 4), float(rank)).t())
    dist.broadcast(parameter, 1)
    same(parameter.detach(), torch.full((4, 4), 1.0))
    t = torch.zeros(4, 2)[:, 0]
    if rank == 0:
        dist.send(torch.arange(8.0).view(4, 2)[:, 1], 1)
    elif rank == 1:
        dist.recv(t, 0)
        same(t, [1.0, 3.0, 5.0, 7.0])
    dist.barrier()


def works(dist: Any, rank: int, size: int) -> None:
    """Futures, results, polling, and works and tensors that nobody keeps."""
    import datetime
    import time

    import torch

    from hetccl.torch._compat import HAS_PYTHON_BACKEND

    total = float(size * (size + 1) // 2)
    t = torch.full((1000,), rank + 1.0)
    work = dist.all_reduce(t, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    same(doubled.wait(), torch.full((1000,), 2 * total))
    assert work.wait(datetime.timedelta(seconds=5))
    if not HAS_PYTHON_BACKEND:  # there callers get torch's own holder, which passes on wait and get_future only
        assert work.is_completed() and work.is_success() and work.result()[0] is t and work.exception() is None
    outs = [torch.zeros(10, 2)[:, 0] for _ in range(size)]  # copied out before the future is done
    value = dist.all_gather(outs, torch.full((10,), float(rank)), async_op=True).get_future().wait()
    same(torch.stack(value[0])[:, 0], torch.arange(float(size)))
    work = dist.all_reduce(t, async_op=True)
    deadline = time.monotonic() + 20
    while not (work.get_future().done() if HAS_PYTHON_BACKEND else work.is_completed()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for _ in range(20):
        dist.all_reduce(torch.ones(200_000), async_op=True)  # both dropped at once
        assert torch.full((200_000,), 3.0).sum().item() == 600_000.0
        outs = [torch.zeros(50, 2)[:, 1] for _ in range(size)]
        dist.all_gather(outs, torch.full((50,), float(rank)), async_op=True)
    t = torch.full((4,), rank + 1.0)
    dist.all_reduce(t)
    same(t, torch.full((4,), total))
    dist.barrier()


def coalescing(dist: Any, rank: int, size: int) -> None:
    import torch

    total = float(size * (size + 1) // 2)
    group = dist.group.WORLD
    for device in (None, torch.device("cpu")):
        for async_ops in (False, True):
            tensors = [torch.full((n,), rank + 1.0) for n in (1, 10, 50_000)]
            with dist._coalescing_manager(group, device, async_ops=async_ops) as manager:
                for t in tensors:
                    dist.all_reduce(t)
            if async_ops:
                manager.wait()
            for t in tensors:
                same(t, torch.full_like(t, total))
            outs = [torch.zeros(n * size) for n in (2, 30_000)]
            with dist._coalescing_manager(group, device, async_ops=async_ops) as manager:
                for out in outs:
                    dist.all_gather_into_tensor(out, torch.full((len(out) // size,), float(rank)))
            if async_ops:
                manager.wait()
            for out in outs:
                same(out.view(size, -1)[:, -1], torch.arange(float(size)))
            parts = [torch.zeros(n) for n in (2, 30_000)]
            with dist._coalescing_manager(group, device, async_ops=async_ops) as manager:
                for part in parts:
                    dist.reduce_scatter_tensor(part, torch.full((len(part) * size,), rank + 1.0))
            if async_ops:
                manager.wait()
            for part in parts:
                same(part, torch.full_like(part, total))
    group._start_coalescing(torch.device("cpu"))  # every work in between is dropped
    t, other = torch.full((100_000,), rank + 1.0), torch.zeros(3, 2)[:, 0]
    dist.broadcast(other, 0, async_op=True)
    gathered = [torch.zeros(5, 2)[:, 0] for _ in range(size)]
    dist.all_gather(gathered, torch.full((5,), float(rank)), async_op=True)
    dist.reduce(t, 0, async_op=True)
    group._end_coalescing(torch.device("cpu")).wait()
    same(t, torch.full_like(t, total if rank == 0 else rank + 1.0))
    same(torch.stack(gathered)[:, 0], torch.arange(float(size)))


def _done(work: Any, async_op: bool) -> None:
    if async_op:
        work.wait()
    else:
        assert work is None


CHECKS = (collectives, composed, sparse, objects, point_to_point, batched, layouts, works, coalescing)


@pytest.mark.parametrize("ranks", [TWO, MIXED])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_operations(check: Any, ranks: str) -> None:
    assert_passed(check, CHECKS, ranks)
