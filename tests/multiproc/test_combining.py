# SPDX-License-Identifier: Apache-2.0
"""The three ways to combine, forced in turn: right answers, equal bits on all ranks, refusals before any traffic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))
import matrix

import hetccl
from hetccl.core import registry
from hetccl.errors import ConfigError, HetcclError, UnsupportedError
from hetccl.testing import oracle
from hetccl.testing.launch import run, run_results
from hetccl.types import DType, Op, RedOp

SHOWN = {"host": "host", "device": "device kernel", "border": "border communicator"}
SEGMENTS = {"HETCCL_SIM_SEGMENT_BYTES": "4K", "HETCCL_SIM_POISON": "1"}
LIMIT, FULL_LIMIT = 110, 900  # seconds: a sample, and all cells of seven ranks on two busy cores
MIXES = ("sim-a:2,host:2", "sim-a:3,sim-b:2,host:2", "host:4,sim-a:3")  # pairs; C of n ranks, pairs in rounds; groups


def sampled(way: str, comm: Any, every: int) -> list[matrix.Cell]:
    """Every element type with every operator, in every reducing operation and size class by turns, as far as the way
    is possible for it."""
    found = []
    sizes = (1, 7, 1024, 20_011)
    for number, (dtype, redop) in enumerate((d, r) for d in DType for r in matrix.operators(d)):
        if number % every:
            continue
        op = matrix.REDUCING[number % 3]
        cell = matrix.Cell(op, dtype, redop, sizes[number % 4], op == Op.REDUCE_SCATTER and number % 2 == 0)
        if possible(way, comm, op.label, dtype, redop):
            found.append(cell)
    return found


def possible(way: str, comm: Any, op: str, dtype: DType, redop: RedOp) -> bool:
    """False where the library of an island lacks what the border way asks of it. No other way lacks anything."""
    try:
        comm.explain(op, 1024 * dtype.itemsize, dtype, redop)
    except UnsupportedError as error:
        assert way == "border" and "library cannot reduce" in str(error), error
        return False
    return True


def body(rank: int, size: int, way: str, every: int = 1) -> dict[str, Any]:
    """`every`: only every so manieth combination of element type and operator."""
    with hetccl.init() as comm:
        cells = sampled(way, comm, every)
        faults = []
        for cell in cells:
            if cell.uneven:
                fault = matrix.uneven.run_cell(comm, *cell[:4], rank, size, gaps=False)
            else:
                fault = matrix.run_cell(comm, cell, rank, size, False, cell.count == 1024)
            faults += [fault] if fault else []
        bits = []
        # sums that are not exact: whoever combines, the bits must be those of all other ranks
        for dtype, redop in (
            (np.float32, "sum"),
            (np.float64, "avg"),
            (np.float16, "prod"),
            (np.float32, "premul_sum"),
        ):
            if not possible(way, comm, "all_reduce", DType[np.dtype(dtype).name.upper()], RedOp[redop.upper()]):
                continue
            for count in (3, 50_021):
                data = np.random.default_rng(rank).standard_normal(count).astype(dtype)
                comm.all_reduce(data, op=redop, factor=0.3 + rank if redop == "premul_sum" else 1.0)
                bits.append(data.tobytes())
        sixty = np.full(1001, 60_000.0, np.float16)
        comm.all_reduce(sixty, op="avg")
        shown = comm.explain("all_reduce", 1 << 20).combined_by
        return {
            "cells": len(cells), "faults": faults[:10], "bits": bits, "sixty": set(sixty.tolist()), "shown": shown,
            "stats": comm.stats(),
        }  # fmt: skip


@pytest.mark.timeout(FULL_LIMIT + 30)
@pytest.mark.parametrize("way", ["host", "device", "border"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_way_is_right_and_gives_all_ranks_the_same_bits(mix: str, way: str, full: bool) -> None:
    every = 1 if full or mix == MIXES[0] else 4
    env = {"HETCCL_COMBINE": way, **SEGMENTS}
    check(run(body, mix, timeout=FULL_LIMIT if full else LIMIT, env=env, args=(way, every)), way, every)


@pytest.mark.timeout(FULL_LIMIT + 30)
@pytest.mark.parametrize("way", ["host", "device", "border"])
def test_every_way_beside_oneccl(way: str, full: bool, require: Callable[[object, str, str], None]) -> None:
    require(_oneccl(), "oneCCL", "pip install ./plugins/hetccl-vendor-oneccl && hetccl fetch oneccl")
    env = {"HETCCL_COMBINE": way, **SEGMENTS}
    every = 1 if full else 4
    limit = FULL_LIMIT if full else LIMIT
    check(run(body, "oneccl:2,sim-a:2,host:2", timeout=limit, env=env, args=(way, every)), way, every)


def check(results: list[dict[str, Any]], way: str, every: int) -> None:
    assert [fault for r in results for fault in r["faults"]] == []
    print(f"{results[0]['cells']} cells by {way}")
    assert results[0]["cells"] > (30 if way == "border" else 100) // every
    assert all(r["bits"] == results[0]["bits"] for r in results)
    # a quarter of 60,000 is exact; other shares are rounded, once before and once after each sum
    near = 0.0 if len(results) == 4 else 64.0
    assert all(abs(value - 60_000.0) <= near for r in results for value in r["sixty"])
    sims = [r for r in results if r["stats"]["vendor"].startswith("sim")]
    for r in results:
        assert r["shown"].startswith(SHOWN[way]) or (way == "device" and "device kernel" in r["shown"])
        if way == "border":
            assert r["stats"]["vendor_calls"]["transfer"] > 0
    assert all((r["stats"]["device_sums"] > 0) == (way == "device") for r in sims)


def _oneccl() -> bool:
    try:
        registry.vendor("oneccl")
    except HetcclError:
        return False
    return True


def refused(rank: int, size: int) -> dict[str, Any]:
    with hetccl.init() as comm:
        x = np.ones(100_000, np.float32)
        texts = []
        for call in (lambda: comm.all_reduce(x), lambda: comm.explain("all_reduce", 4)):
            with pytest.raises(UnsupportedError) as caught:
                call()
            texts.append(str(caught.value))
        moved = np.full(3, rank, np.float32)
        comm.broadcast(moved, size - 1)  # what is not combined goes on
        comm.barrier()
        return {"texts": texts, "border": comm.stats()["border_bytes"], "moved": moved.tolist()}


def test_a_border_communicator_of_one_rank_is_refused() -> None:
    results = run(refused, "sim-a:2,host:1", timeout=40, env={"HETCCL_COMBINE": "border"})
    for r in results:
        assert all("island 1 (host, 1 ranks)" in text and "one rank" in text for text in r["texts"])
        assert r["border"] <= 12 + 8 and r["moved"] == [2.0] * 3  # the broadcast and the barrier


def bare_body(rank: int, size: int, way: str, without: int) -> dict[str, Any]:
    """As if the vendors' libraries lacked some of: 1 all_to_all, 2 send and receive, 4 further communicators, 8 NaN."""
    from hetccl.core import bootstrap

    class Bare(bootstrap.Record):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**{**fields, "calls": fields["calls"] & ~without, "kernels": False})

    bootstrap.Record = Bare  # type: ignore[misc]
    if way != "border":
        with hetccl.init() as comm, pytest.raises(UnsupportedError, match="no kernels"):
            comm.all_reduce(np.ones(9, np.float32))
        return {}
    result = body(rank, size, way, every=5)
    with hetccl.init() as comm:
        result["maximum"] = ""
        try:
            comm.explain("all_reduce", 4000, "float32", "max")
        except UnsupportedError as error:
            result["maximum"] = str(error)
    return result


@pytest.mark.parametrize("without", [2, 4, 6])
def test_idle_ranks_are_cleared_where_a_library_makes_no_groups(without: int) -> None:
    results = run(
        bare_body, "host:4,sim-a:3", timeout=110, env={"HETCCL_COMBINE": "border", **SEGMENTS}, args=("border", without)
    )
    assert [fault for r in results for fault in r["faults"]] == []
    assert all(r["bits"] == results[0]["bits"] for r in results)
    assert all((r["stats"]["group_calls"] == 0) == bool(without & 4) for r in results)
    assert all((r["stats"]["vendor_calls"]["transfer"] == 0) == bool(without & 2) for r in results)
    assert all(r["maximum"] == "" for r in results)


def test_float_extremes_are_refused_where_idle_ranks_could_hide_nan() -> None:
    results = run(extremes, "host:3,sim-a:3", timeout=40, env={"HETCCL_COMBINE": "border"})
    assert results == [True] * 6


def extremes(rank: int, size: int) -> bool:
    from hetccl.core import bootstrap

    class Bare(bootstrap.Record):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**{**fields, "calls": 3})

    bootstrap.Record = Bare  # type: ignore[misc]
    with hetccl.init() as comm:
        for op in ("max", "min"):
            with pytest.raises(UnsupportedError, match="NaN"):
                comm.all_reduce(np.ones(9, np.float32), op=op)
        whole = np.full(9, rank, np.int64)
        comm.all_reduce(whole, op="max")
        return bool((whole == size - 1).all())


def test_a_device_without_kernels_cannot_be_forced() -> None:
    run(bare_body, "host:1,sim-a:1", timeout=40, env={"HETCCL_COMBINE": "device"}, args=("device", 0))


def both_forced(rank: int, size: int) -> str:
    with hetccl.init() as comm, pytest.raises(UnsupportedError) as caught:
        comm.all_reduce(np.ones(9, np.float32))
    return str(caught.value)


def test_exchange_and_another_way_cannot_both_be_forced() -> None:
    env = {"HETCCL_COMBINE": "border", "HETCCL_ALGORITHM": "all_reduce=exchange"}
    assert all("HETCCL_ALGORITHM" in text for text in run(both_forced, "host@a:2,host@b:2", timeout=40, env=env))


def unequal(rank: int, size: int) -> None:
    os.environ["HETCCL_COMBINE"] = "device" if rank == 1 else "border"
    with hetccl.init():
        pass


def test_ranks_that_force_different_ways_are_told() -> None:
    results = run_results(unequal, "host@a:1,host@b:1", timeout=40, env={"HETCCL_TIMEOUT": "10"})
    assert isinstance(results[1].error, ConfigError) and "rank 0" in str(results[1].error)
    assert results[0].error is not None


def test_neutral_elements_leave_the_other_side_alone() -> None:
    from hetccl.core._state import identity
    from hetccl.native.combine import combine

    checked = 0
    for dtype in DType:
        for redop in RedOp:
            if redop in (RedOp.AVG, RedOp.PREMUL_SUM) or redop not in matrix.operators(dtype):
                continue
            if dtype in (DType.COMPLEX64, DType.COMPLEX128) and redop != RedOp.SUM:
                continue
            values = np.frombuffer(every_value(dtype), oracle.storage(dtype))
            neutral = np.frombuffer(identity(dtype, redop, len(values)), oracle.storage(dtype))
            for sources in ([values, neutral], [neutral, values]):
                result = np.empty_like(values)
                combine([result], sources, dtype, redop)
                width = dtype.itemsize // (2 if "complex" in dtype.label else 1)
                bits, before = (a.view(f"V{width}") for a in (result, values))
                changed = [r.tobytes() for r, v in zip(bits, before, strict=True) if r.tobytes() != v.tobytes()]
                assert len(set(changed)) <= ("int" not in dtype.label), (dtype, redop)  # the canonical NaN
            checked += 1
    assert checked > 50
    with pytest.raises(UnsupportedError):
        identity(DType.FLOAT32, RedOp.BAND)


def every_value(dtype: DType) -> bytes:
    """All values of 8-bit types, else many bit patterns, with NaN, infinities and zeros of both signs; bool 0 and 1."""
    if dtype == DType.BOOL:
        return bytes([0, 1])
    kind = oracle.storage(dtype)
    if dtype.itemsize == 1:
        return bytes(range(256))
    draw = np.random.default_rng(7).integers(0, 256, 4096 * dtype.itemsize, dtype=np.uint8).tobytes()
    edges = [0, 1, 0x7F800000, 0xFF800000, 0x80000000, 0x8000, 0x7C00, 0xFC00]
    return draw + b"".join(np.array(edges, np.uint64).tobytes() for _ in range(2)) + np.zeros(2, kind).tobytes()
