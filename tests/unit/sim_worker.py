# SPDX-License-Identifier: Apache-2.0
"""One rank of a test in test_sim.py: sim_worker.py SCENARIO RANK SIZE VARIANT,... ID... Prints "ok" at the end."""

from __future__ import annotations

import faulthandler
import functools
import sys
import threading
import time
from typing import Any

import numpy as np

from hetccl import errors
from hetccl.tables import CclTable, DeviceTable
from hetccl.types import DType, RedOp
from hetccl.vendors.base import VendorRequest
from hetccl.vendors.sim.array import SimArray
from hetccl.vendors.sim.driver import SimDriver

FOLDS = {RedOp.SUM: np.add, RedOp.PROD: np.multiply, RedOp.MAX: np.maximum, RedOp.MIN: np.minimum, RedOp.AVG: np.add,
         RedOp.BAND: np.bitwise_and, RedOp.BOR: np.bitwise_or, RedOp.BXOR: np.bitwise_xor}
# Elements of all_reduce, and of a part of the others. The last one takes several rounds of the island's memory.
COUNTS = (0, 1, 7, 1000, 300_001)


class Rank:
    """A vendor opened on this rank, in a communicator with the others."""

    def __init__(self, variant: str, unique_id: bytes, rank: int, size: int) -> None:
        self.vendor = SimDriver().open(VendorRequest(variant=variant))
        self.device, self.ccl = DeviceTable(self.vendor.device_table), CclTable(self.vendor.ccl_table)
        self.rank, self.size = rank, size
        self.comm = self.vendor.create_comm(rank, size, unique_id, 30)

    def call(self, op: str, send: SimArray, recv: SimArray, count: int, **more: Any) -> None:
        self.ccl.call(op, self.comm, send.ptr, recv.ptr, count, send.dtype, **more)

    def finish(self, stream: int = 0) -> None:
        self.device.stream_sync(stream)
        self.ccl.async_error(self.comm)

    def array(self, values: Any, dtype: DType) -> SimArray:
        return SimArray.from_numpy(self.vendor, encode(values, dtype), dtype)

    def empty(self, count: int, dtype: DType) -> SimArray:
        return SimArray(self.vendor, count, dtype)


def encode(values: Any, dtype: DType) -> Any:
    if dtype is DType.BFLOAT16:  # exact for the small whole numbers used here
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(values).astype(dtype.label)


def decode(stored: Any, dtype: DType) -> Any:
    if dtype is DType.BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored


def numbers(seed: int, count: int, dtype: DType) -> Any:
    """Small whole numbers: every order of reduction gives the same exact result."""
    low, high = (0, 2) if dtype is DType.BOOL else (1, 4)
    drawn = np.random.default_rng(seed).integers(low, high, count)
    if dtype in (DType.COMPLEX64, DType.COMPLEX128):
        return drawn + 1j * drawn[::-1]
    return drawn if dtype in (DType.BOOL, DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64) else drawn - 2


def reduced(parts: list[Any], dtype: DType, op: RedOp) -> Any:
    if dtype is DType.BOOL:
        both = op in (RedOp.PROD, RedOp.MIN, RedOp.BAND)
        fold = np.bitwise_xor if op is RedOp.BXOR else np.bitwise_and if both else np.bitwise_or
    else:
        fold = FOLDS[op]
    total = functools.reduce(fold, parts)
    if op is not RedOp.AVG:
        return total
    if np.iscomplexobj(total):  # as twice as many reals; NumPy's complex division rounds otherwise
        return (total.view(np.float64) / len(parts)).view(np.complex128)
    whole = dtype.label.startswith(("int", "uint"))
    return np.trunc(total / len(parts)) if whole else total / len(parts)


def same(array: SimArray, expected: Any, what: str) -> None:
    found = decode(array.to_numpy(), array.dtype)
    wanted = decode(encode(expected, array.dtype), array.dtype)
    assert np.array_equal(found, wanted, equal_nan=True), f"{what}: found {found[:8]}, expected {wanted[:8]}"


def pairs(r: Rank) -> Any:
    for dtype in DType:
        if dtype.label.startswith("float8"):
            continue
        for op in RedOp:
            # A narrow float is scaled before it is summed: exact only where the size is a power of two.
            inexact = op is RedOp.AVG and r.size == 3 and dtype.label in ("float16", "bfloat16")
            if r.ccl.reduces(dtype, op) and not inexact:
                yield dtype, op


def check_reductions(r: Rank, count: int, dtype: DType, op: RedOp) -> None:
    label = f"{dtype.label} {op.label} {count}"
    inputs = [numbers(7 * i + count, count * r.size, dtype) for i in range(r.size)]
    total = reduced(inputs, dtype, op)
    mine = r.array(inputs[r.rank], dtype)
    out = r.empty(count * r.size, dtype)
    r.call("all_reduce", mine, out, count * r.size, redop=op)
    same(out, total, f"all_reduce {label}")
    part = r.empty(count, dtype)
    r.call("reduce_scatter", mine, part, count, redop=op)
    same(part, total[r.rank * count:][:count], f"reduce_scatter {label}")
    root = r.size - 1
    r.call("reduce", mine, out if r.rank == root else part, count * r.size, redop=op, peer=root)
    same(mine, inputs[r.rank], f"input after {label}")
    if r.rank == root:
        same(out, total, f"reduce {label}")
    r.call("all_reduce", mine, mine, count * r.size, redop=op)
    same(mine, total, f"all_reduce in place {label}")


def check_moves(r: Rank, count: int, dtype: DType) -> None:
    label = f"{dtype.label} {count}"
    blocks = [np.random.default_rng(i).bytes(count * r.size * dtype.itemsize) for i in range(r.size)]
    every = [np.frombuffer(b, np.uint8) for b in blocks]

    def bytes_of(a: SimArray) -> Any:
        return a.to_numpy().view(np.uint8).reshape(-1)

    def put(data: Any) -> SimArray:
        a = r.empty(data.size // dtype.itemsize, dtype)
        a.copy_from(data)
        return a

    one = count * dtype.itemsize
    mine, out = put(every[r.rank]), r.empty(count * r.size, dtype)
    r.call("all_to_all", mine, out, count)
    wanted = np.concatenate([e[r.rank * one:][:one] for e in every])
    assert np.array_equal(bytes_of(out), wanted), f"all_to_all {label}"
    part = put(every[r.rank][:one])
    r.call("all_gather", part, out, count)
    assert np.array_equal(bytes_of(out), np.concatenate([e[:one] for e in every])), f"all_gather {label}"
    for root in range(r.size):
        r.call("broadcast", mine, out, count * r.size, peer=root)
        assert np.array_equal(bytes_of(out), every[root]), f"broadcast {label}"


def collectives(ranks: list[Rank]) -> None:
    (r,) = ranks
    for dtype, op in pairs(r):
        for count in COUNTS if dtype in (DType.FLOAT32, DType.INT32) and op is RedOp.SUM else COUNTS[:3]:
            check_reductions(r, count, dtype, op)
    for dtype in DType:
        for count in COUNTS if dtype is DType.INT64 else COUNTS[:3]:
            check_moves(r, count, dtype)
    if r.ccl.reduces(DType.FLOAT32, RedOp.MAX):
        a = r.array([np.nan if r.rank == 0 else 1.0, 2.0], DType.FLOAT32)
        r.call("all_reduce", a, a, 2, redop=RedOp.MAX)
        same(a, [np.nan if r.rank == 0 or r.size > 1 else 1.0, 2.0], "NaN")
    r.finish()


def order(ranks: list[Rank]) -> None:
    """A collective waits for what stands before it on its stream, and nothing happens in the caller's thread."""
    (r,) = ranks
    stream, flag, event = r.device.stream_create(), r.device.flag_alloc(), r.device.event_create()
    a = r.array([1.0, 1.0], DType.FLOAT32)
    r.device.stream_wait_flag(flag, 1, stream)
    r.device.memset(a.ptr, 0, 4, stream)
    for _ in range(3):
        r.call("all_reduce", a, a, 2, stream=stream)
    r.device.event_record(event, stream)
    time.sleep(0.1)
    assert not r.device.event_query(event)
    same(a, [1.0, 1.0], "before")
    r.device.flag_set(flag, 1)
    r.device.event_sync(event)
    same(a, [0.0, r.size**3], "after")
    r.finish(stream)


def two_streams(ranks: list[Rank]) -> None:
    """Calls of one communicator keep the order of issue, on whatever streams they are."""
    (r,) = ranks
    first, second = r.device.stream_create(), r.device.stream_create()
    flag = r.device.flag_alloc()
    held = first if r.rank == 0 else second
    a, b = r.array([1.0], DType.FLOAT32), r.array(np.arange(r.size) + 10 * r.rank, DType.INT64)
    out = r.empty(1, DType.INT64)
    r.device.stream_wait_flag(flag, 1, held)
    for _ in range(20):
        r.call("all_reduce", a, a, 1, stream=first)
        r.call("reduce_scatter", b, out, 1, stream=second)
    time.sleep(0.1)
    r.device.flag_set(flag, 1)
    r.finish(first)
    r.finish(second)
    same(a, [2.0**20], "all_reduce")
    same(out, [sum(10 * i + r.rank for i in range(r.size))], "reduce_scatter")


def point_to_point(ranks: list[Rank]) -> None:
    """A ring: even ranks send first. With an odd number the last two are alike, so the last one goes by its parity."""
    (r,) = ranks
    after, before = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for count in (1, 1000, 400_000):
        a, b = r.array(np.arange(count) + r.rank, DType.INT32), r.empty(count, DType.INT32)
        steps = [("send", after), ("recv", before)]
        for what, peer in steps if r.rank % 2 == 0 else reversed(steps):
            r.call(what, a if what == "send" else b, b, count, peer=peer)
        same(b, np.arange(count) + before, f"ring of {count}")
    r.finish()


def abort(ranks: list[Rank]) -> None:
    """One rank never calls: the other one is freed by abort(), its device lives on."""
    (r,) = ranks
    if r.rank == 1:
        time.sleep(1.5)
        return
    a = r.array([1.0], DType.FLOAT32)
    r.call("all_reduce", a, a, 1)
    threading.Timer(0.3, r.ccl.abort, (r.comm,)).start()
    begin = time.monotonic()
    r.device.stream_sync()
    assert 0.2 < time.monotonic() - begin < 5, "the running call did not end in time"
    try:
        r.ccl.async_error(r.comm)
        raise SystemExit("no error after abort")
    except errors.AbortedError:
        pass
    try:
        r.call("all_reduce", a, a, 1)
        raise SystemExit("a call on an aborted communicator was taken")
    except errors.AbortedError:
        pass
    a.copy_from(np.array([5], np.float32))
    same(a, [5.0], "device after abort")
    r.ccl.destroy(r.comm)
    alone = r.vendor.create_comm(0, 1, r.vendor.new_id(), 10)
    r.ccl.call("all_reduce", alone, a.ptr, a.ptr, 1)
    r.device.stream_sync()
    r.ccl.async_error(alone)
    r.ccl.destroy(alone)


def peer_abort(ranks: list[Rank]) -> None:
    """abort() on one rank ends the running call of the other one."""
    (r,) = ranks
    if r.rank == 1:
        time.sleep(0.3)
        r.ccl.abort(r.comm)
        return
    a = r.array([1.0], DType.FLOAT32)
    r.call("all_reduce", a, a, 1)
    r.device.stream_sync()
    try:
        r.ccl.async_error(r.comm)
        raise SystemExit("no error after the peer's abort")
    except errors.AbortedError as error:
        assert "aborted by rank 1 of 2" in str(error), error


def queued_abort(ranks: list[Rank]) -> None:
    """abort() and destroy() while the calls still stand behind other work; they then end without running."""
    (r,) = ranks
    stream, flag = r.device.stream_create(), r.device.flag_alloc()
    a = r.array([1.0], DType.FLOAT32)
    r.device.stream_wait_flag(flag, 1, stream)
    for _ in range(5):
        r.call("all_reduce", a, a, 1, stream=stream)
    r.ccl.abort(r.comm)
    r.ccl.destroy(r.comm)
    r.device.flag_set(flag, 1)
    r.device.stream_sync(stream)
    same(a, [1.0], "buffer of calls that never ran")


def exit_inside(ranks: list[Rank]) -> None:
    """Leaves while a call is running that the other rank never makes: the interpreter must not hang."""
    (r,) = ranks
    if r.rank == 0:
        a = r.array([1.0], DType.FLOAT32)
        r.call("all_reduce", a, a, 1)
        time.sleep(0.2)


def two_vendors(ranks: list[Rank]) -> None:
    """Two vendors in one process, each in a communicator of its own, both busy at once."""
    first, second = ranks
    a, b = first.array([1.0, 2.0], DType.FLOAT32), second.array([3.0], DType.FLOAT32)
    try:
        first.call("all_reduce", b, a, 1)
        raise SystemExit("memory of the other vendor was taken")
    except errors.HetcclError as error:
        assert "is memory of sim-b" in str(error), error
    for _ in range(10):
        first.call("all_reduce", a, a, 2)
        second.call("all_reduce", b, b, 1)
    same(a, [2.0**10, 2.0**11], "sim-a")
    same(b, [3 * 2.0**10], "sim-b")
    first.finish()
    second.finish()


def main() -> None:
    faulthandler.dump_traceback_later(90, exit=True)
    scenario, rank, size, variants, *ids = sys.argv[1:]
    ranks = [Rank(variant, bytes.fromhex(unique_id), int(rank), int(size))
             for variant, unique_id in zip(variants.split(","), ids, strict=True)]
    globals()[scenario](ranks)
    print("ok", flush=True)


if __name__ == "__main__":
    main()
