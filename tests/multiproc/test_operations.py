# SPDX-License-Identifier: Apache-2.0
"""Operations as a caller sees them: border bytes by the transports' own counters, refusals, batches, coalescing, and
libraries that lack calls."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))
import matrix

import hetccl
from hetccl.core.buffers import Buffer
from hetccl.errors import UnsupportedError, UsageError
from hetccl.testing.launch import run
from hetccl.types import DType, Op, RedOp

MIXES = ("host:2,sim-a:2,sim-b:1", "sim-a:3,host:3", "host@a:1,host@b:1")


def border_body(rank: int, size: int) -> list[tuple[str, int, int]]:
    """(operation, bytes that this rank sent over the border, bound of all ranks together)"""
    found = []
    with hetccl.init() as comm:
        for op in (*matrix.REDUCING, *matrix.MOVING):
            for count in (1000, 100_000):
                before = comm.stats()["border_bytes"]
                fault = matrix.run_cell(
                    comm, matrix.Cell(op, DType.FLOAT32, RedOp.SUM, count), rank, size, False, False
                )
                assert not fault, fault
                sent = comm.stats()["border_bytes"] - before
                root = (count + int(DType.FLOAT32)) % size
                e = comm.explain(op.label, count * 4, root=root)
                assert e.border_bytes == e.border_bound
                found.append((f"{op.label} of {count}", sent, e.border_bound))
        counts = [10 * (r % 3) for r in range(size)]
        out = np.zeros(sum(counts), np.float32)
        before = comm.stats()["border_bytes"]
        comm.all_gather_v(np.full(counts[rank], rank, np.float32), out, counts)
        assert out.tolist() == [r for r in range(size) for _ in range(counts[r])]
        bound = comm.explain("all_gather", 0, counts=counts).border_bound
        found.append(("all_gather_v", comm.stats()["border_bytes"] - before, bound))
    return found


@pytest.mark.parametrize("mix", MIXES)
def test_border_bytes_equal_the_bound(mix: str) -> None:
    for cells in zip(*run(border_body, mix, timeout=60), strict=True):
        name, _, bound = cells[0]
        assert sum(sent for _, sent, _ in cells) == bound, name


def calls_body(rank: int, size: int) -> dict[str, int]:
    left, right = (rank - 1) % size, (rank + 1) % size
    with hetccl.init() as comm:
        # several messages at once, in any order
        a, b, c, d = (np.full(n, rank, np.int64) for n in (5, 5, 40_000, 40_000))
        comm.batch([hetccl.Send(a, right, 1), hetccl.Send(c, left), hetccl.Recv(b, left, 1), hetccl.Recv(d, right)])
        assert (b == left).all() and (d == right).all()
        ended: list[bool] = []
        batch = comm.batch([hetccl.Recv(b, right), hetccl.Send(a, left)], async_op=True)
        batch.add_done_callback(lambda done: ended.append(done.is_done()))
        batch.wait()
        assert (b == right).all() and batch.exception() is None
        with pytest.raises(UsageError):
            comm.batch([hetccl.Send(a, right), hetccl.Recv(b, rank)])  # nothing of it is posted
        # many tensors, one plan; twice, so that memory is used again
        for turn in range(3):
            parts = [np.full((n, 2), rank + 1.0, np.float32)[:, turn % 2] for n in (3, 0, 1000, 7)]
            work = comm.all_reduce_coalesced(parts, async_op=turn == 1)
            if work:
                work.wait()
            assert all((p == size * (size + 1) / 2).all() for p in parts)
        with pytest.raises(UsageError):
            comm.all_reduce_coalesced([np.zeros(1, np.float32), np.zeros(1, np.int32)])
        # a factor for each rank
        x = np.full(9, 10.0, np.float32)
        comm.all_reduce(x, op="premul_sum", factor=rank + 0.5)
        assert (x == 10.0 * sum(r + 0.5 for r in range(size))).all()
        out = np.zeros(9, np.float32) if rank == 1 else None
        work = comm.reduce(np.ones(9, np.float32), out, 1, "premul_sum", factor=2.0, async_op=True)
        work.wait()
        assert out is None or (out == 2.0 * size).all()
        # refused before anything is sent, and the communicator lives on
        before = comm.stats()["border_bytes"]
        refused = 0
        for dtype in DType:
            for redop in RedOp:
                if redop in matrix.operators(dtype):
                    continue
                for op in matrix.REDUCING:
                    with pytest.raises(UnsupportedError):
                        comm.run(op, x.ctypes.data, x.ctypes.data, 1, dtype, redop, 0)
                    refused += 1
        for call in (
            lambda: comm.all_reduce(np.ones(3, np.int32), op="premul_sum", factor=0.5),
            lambda: comm.all_reduce(x, factor=2.0),
            lambda: comm.reduce(x, None, size),
            lambda: comm.all_gather_v(x, np.zeros(9, np.float32), [9] * size),
            lambda: comm.all_gather_v(x, np.zeros(9 * size, np.float32), [9] * size, [0] * size),
            lambda: comm.gather_v(x, x, 0, [9]),
            lambda: comm.all_to_all(np.zeros(size + 1), np.zeros(size + 1)),
        ):
            with pytest.raises(UsageError):
                call()
        assert comm.stats()["border_bytes"] == before
        comm.barrier()
        return {"refused": refused}


@pytest.mark.parametrize("mix", MIXES)
def test_batches_coalescing_factors_and_refusals(mix: str) -> None:
    results = run(calls_body, mix, timeout=60)
    pinned = os.path.join(os.path.dirname(__file__), "..", "unit", "refused.txt")
    with open(pinned) as file:
        number = int(file.read())
    print(f"{results[0]['refused']} combinations refused")
    assert all(r["refused"] == number for r in results)


def bare_body(rank: int, size: int, seed: int) -> dict[str, Any]:
    """As if the vendors' libraries had neither all_to_all nor send and receive, and the devices no kernels."""
    from hetccl.core import bootstrap

    class Bare(bootstrap.Record):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**{**fields, "calls": 0, "kernels": False})

    bootstrap.Record = Bare  # type: ignore[misc]
    return matrix.body(rank, size, 0.06, 0.0, seed)


@pytest.mark.parametrize("mix", ["host:2,sim-a:3", "sim-a:3,host:3"])
def test_what_a_library_lacks_is_composed(mix: str) -> None:
    results = run(bare_body, mix, timeout=100, args=(11,))
    assert not [fault for r in results for fault in r["faults"]]
    assert all(r["stats"]["vendor_calls"]["transfer"] == r["stats"]["vendor_calls"]["all_to_all"] == 0 for r in results)


def mismatch_body(rank: int, size: int) -> str:
    with hetccl.init() as comm:
        counts = [4, 4 + rank]
        out = Buffer(*(lambda a: (a.ctypes.data, a.size, DType.INT8, a))(np.zeros(99, np.int8)))
        with pytest.raises(hetccl.HetcclError) as caught:
            comm.all_gather_v(np.zeros(99, np.int8), out, counts, timeout=5)
        return type(caught.value).__name__


def test_different_counts_are_a_mismatch() -> None:
    assert set(run(mismatch_body, "host:2", timeout=40)) == {"MismatchError"}
    assert set(run(mismatch_body, "host@a:1,host@b:1", timeout=40)) <= {
        "MismatchError",
        "PeerLostError",
        "AbortedError",
    }


def test_every_operation_has_cells() -> None:
    cells = matrix.cells()
    assert {c.op for c in cells} == {*matrix.REDUCING, *matrix.MOVING}
    assert {c.op for c in cells if c.uneven} == {*matrix.uneven.MOVING, Op.REDUCE_SCATTER}
    assert {c.redop for c in cells} == set(RedOp)
