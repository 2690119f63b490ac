# SPDX-License-Identifier: Apache-2.0
"""The pretend accelerator under conditions: each does what it says, and without them nothing is different."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import numpy as np
import pytest

import hetccl
from hetccl import errors
from hetccl.core.config import Config
from hetccl.core.store import open_store
from hetccl.tables import DeviceTable
from hetccl.testing.launch import run
from hetccl.types import DType
from hetccl.vendors.base import VendorRequest
from hetccl.vendors.sim.array import SimArray
from hetccl.vendors.sim.conditions import OPTIONS, Conditions
from hetccl.vendors.sim.driver import SimDriver, SimVendor

INDEX = itertools.count(50_000)


def open_vendor(monkeypatch: pytest.MonkeyPatch, **conditions: str) -> SimVendor:
    for name, value in conditions.items():
        monkeypatch.setenv(f"HETCCL_SIM_{name}", value)
    return SimDriver().open(VendorRequest(variant="a", device_index=next(INDEX), host_id="here"))


def test_nothing_is_set_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.name, raising=False)
    assert Conditions.from_env() == Conditions()
    vendor = open_vendor(monkeypatch)
    assert vendor.describe() == "sim-a 1.0 (pretend accelerator; reduces everything)"
    assert vendor.segment_bytes == 32 << 20
    assert "conditions" not in SimDriver().probe().details


@pytest.mark.parametrize(
    ("name", "value"),
    [("SEED", "-1"), ("DELAY_US", "soon"), ("ORDER", "chaos"), ("POISON", "yes"), ("RATE", "fast"), ("RATE", "-5"),
     ("ONE_AT_A_TIME", "2"), ("SEGMENT_BYTES", "big")],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"HETCCL_SIM_{name}", value)
    with pytest.raises(errors.ConfigError, match=rf"HETCCL_SIM_{name}={value} cannot be used; it accepts"):
        Conditions.from_env()
    found = SimDriver().probe()
    assert not found.ok and f"HETCCL_SIM_{name}" in found.reason


def test_what_is_set_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = open_vendor(monkeypatch, SEED="77", DELAY_US="5", ORDER="adversarial", POISON="1", RATE="400M",
                         ONE_AT_A_TIME="1")  # fmt: skip
    assert vendor.describe().endswith(
        "; seed 77, delay up to 5 us, adversarial order, poisoned memory, 400 MB/s, one collective at a time)"
    )


def test_a_seed_is_drawn_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = {open_vendor(monkeypatch, DELAY_US="5").conditions.seed for _ in range(3)}
    assert len(seeds) == 3 and 0 not in seeds
    assert "; seed " in open_vendor(monkeypatch).describe()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_fresh_memory_is_poison(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    vendor = open_vendor(monkeypatch, POISON="1")
    with SimArray(vendor, 1001, dtype) as array:
        assert np.isnan(array.to_numpy()).all()
    with SimArray(vendor, 1001, DType.UINT16) as raw:
        assert (raw.to_numpy() == 0xFFF5).all()


def test_freed_memory_is_poison_for_work_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = open_vendor(monkeypatch, POISON="1")
    table = DeviceTable(vendor.device_table)
    flag, stream = table.flag_alloc(), table.stream_create()
    array = SimArray.from_numpy(vendor, np.ones(64, np.float32))
    found = np.zeros(64, np.float32)
    table.stream_wait_flag(flag, 1, stream)
    table.copy(found.ctypes.data, array.ptr, array.nbytes, stream)
    array.close()
    table.flag_set(flag, 1, 0)
    table.stream_sync(stream)
    assert (found.view(np.uint16) == 0xFFFA).all()
    table.stream_destroy(stream)
    table.flag_free(flag)


def test_without_poison_work_in_flight_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceTable((vendor := open_vendor(monkeypatch)).device_table)
    array = SimArray.from_numpy(vendor, np.ones(64, np.float32))
    found = np.zeros(64, np.float32)
    table.copy(found.ctypes.data, array.ptr, array.nbytes, 0)
    array.close()
    table.stream_sync(0)
    assert (found == 1).all()


def overtakings(vendor: SimVendor, rounds: int = 40) -> int:
    """How often a stream that got its work second ended first."""
    table = DeviceTable(vendor.device_table)
    streams, events = [table.stream_create() for _ in range(2)], [table.event_create() for _ in range(2)]
    target, found = table.alloc(64), 0
    for _ in range(rounds):
        for stream, event in zip(streams, events, strict=True):
            for _ in range(20):
                table.memset(target, 1, 64, stream)
            table.event_record(event, stream)
        while not (first := table.event_query(events[0])) and not table.event_query(events[1]):
            time.sleep(0)
        found += not first
        for stream in streams:
            table.stream_sync(stream)
    return found


def test_streams_overtake_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    disorderly = overtakings(open_vendor(monkeypatch, ORDER="adversarial", SEED="3"))
    assert 4 <= disorderly <= 36


def test_delays_are_as_long_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = open_vendor(monkeypatch, DELAY_US="4000", SEED="5")
    table = DeviceTable(vendor.device_table)
    target = table.alloc(8)
    began = time.monotonic()
    for _ in range(50):
        table.memset(target, 1, 8)
    table.stream_sync()
    took = time.monotonic() - began
    assert 0.03 < took < 0.4  # 50 times 0 to 4 ms, a quarter of them 0: 75 ms on the average


# ---- in a job


def slow_island(rank: int, size: int, nbytes: int) -> dict[str, float]:
    """Seconds of each operation, the fastest of three."""
    found: dict[str, float] = {}
    with hetccl.init() as comm:
        vendor = comm._joined.vendor
        one, many = SimArray(vendor, nbytes // 4, "float32"), SimArray(vendor, nbytes // 4 * size, "float32")
        calls: dict[str, Any] = {
            "all_reduce": lambda: comm.all_reduce(many),
            "all_gather": lambda: comm.all_gather(one, many),
            "reduce_scatter": lambda: comm.reduce_scatter(many, one),
            "broadcast": lambda: comm.broadcast(many, 0),
        }
        for name, call in calls.items():
            found[name] = best(comm, call)
    return found


def slow_border(rank: int, size: int, nbytes: int) -> dict[str, float]:
    with hetccl.init() as comm:
        data = np.ones(nbytes, np.uint8)
        other = np.ones(nbytes, np.uint8)

        def swap() -> None:
            works = [comm.send(data, 1 - rank, async_op=True), comm.recv(other, 1 - rank, async_op=True)]
            for work in works:
                work.wait()  # type: ignore[union-attr]

        return {"broadcast": best(comm, lambda: comm.broadcast(data, 0)), "swap": best(comm, swap)}


def best(comm: Any, call: Any) -> float:
    call()
    times = []
    for _ in range(3):
        comm.barrier()
        began = time.perf_counter()
        call()
        comm.barrier()
        times.append(time.perf_counter() - began)
    return min(times)


def test_the_island_is_as_slow_as_asked() -> None:
    nbytes = 8 << 20
    sent = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 2}
    as_slow(slow_island, "sim-a:2", "HETCCL_SIM_RATE", nbytes, {name: n * nbytes for name, n in sent.items()})


def test_the_border_is_as_slow_as_asked() -> None:
    nbytes = 16 << 20  # a swap takes no longer: each way has the rate for itself
    as_slow(slow_border, "host@a:1,host@b:1", "HETCCL_BORDER_RATE", nbytes, {"broadcast": nbytes, "swap": nbytes})


def as_slow(body: Any, ranks: str, variable: str, nbytes: int, sent: dict[str, int]) -> None:
    """Never faster than 100 MB/s, and within 10 % of it where the machine has the time to keep it."""
    ratios: dict[str, float] = {}
    for _ in range(4):
        found = run(body, ranks, timeout=60, env={variable: "100M"}, args=(nbytes,))
        for name, n in sent.items():
            ratios[name] = min(ratios.get(name, 9.0), max(f[name] for f in found) / (n / 100e6))
        if max(ratios.values()) < 1.1:
            break
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    assert min(ratios.values()) > 0.95 and max(ratios.values()) < (2.5 if busy else 1.1), ratios


def test_ranks_of_different_speed_do_not_meet() -> None:
    source = "import os, hetccl\nos.environ['HETCCL_SIM_RATE'] = ['100M', '200M'][rank]\nhetccl.init()"
    with pytest.raises(AssertionError, match="an id that sim-a at 100 MB/s made"):
        run(source, "sim-a:2", timeout=60)


def opposite_orders(rank: int, size: int) -> str:
    """Two communicators, issued in opposite orders: how it ended."""
    store = open_store(Config.from_env().store, rank, size, 30)
    comms = [hetccl.Communicator(store, rank, size, name=name) for name in "ab"]
    works, data = [], []  # type: ignore[var-annotated]
    try:
        for comm in comms if rank == 0 else comms[::-1]:
            data.append(np.full(64, 1 + rank, np.float32))
            works.append(comm.all_reduce(data[-1], async_op=True))
            time.sleep(0.1)
        for work in works:
            work.wait()
        return "done" if all((d == 3).all() for d in data) else "wrong"
    except errors.HetcclError as error:
        return type(error).__name__
    finally:
        for comm in comms:
            comm.close()


def test_opposite_orders_lock_a_device_that_runs_one_collective_at_a_time() -> None:
    assert run(opposite_orders, "sim-a:2", timeout=60) == ["done", "done"]
    env = {"HETCCL_SIM_ONE_AT_A_TIME": "1", "HETCCL_TIMEOUT": "3"}
    ended = run(opposite_orders, "sim-a:2", timeout=60, env=env)
    assert "TimedOutError" in ended
    assert set(ended) <= {"TimedOutError", "AbortedError", "PeerLostError"}  # a call that never ran is not done
