# SPDX-License-Identifier: Apache-2.0
"""The `host` vendor through its tables, as the core uses it. Ranks are threads: each has its own communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from hetccl.errors import AbortedError, TimedOutError, UnsupportedError, UsageError
from hetccl.tables import CclTable, DeviceTable
from hetccl.types import DType, RedOp
from hetccl.vendors.base import IslandKey, VendorRequest
from hetccl.vendors.host.driver import HostDriver, HostVendor


@pytest.fixture
def vendor() -> HostVendor:
    assert HostDriver().probe().ok
    return HostDriver().open(VendorRequest(host_id="here"))


def test_identity(vendor: HostVendor) -> None:
    assert vendor.island_key == IslandKey("host", "0.1", "", "here")
    assert vendor.name == HostDriver.name == "host"
    assert (HostDriver.preference, HostDriver.automatic, HostDriver.torch_device_types) == (0, True, ("cpu",))


def test_what_it_reduces_and_moves(vendor: HostVendor) -> None:
    ccl = CclTable(vendor.ccl_table)
    assert ccl.blocking
    assert all(ccl.moves(dtype) for dtype in DType)
    assert all(ccl.reduces(dtype, RedOp.SUM) for dtype in DType)
    averaged = {d for d in DType if ccl.reduces(d, RedOp.AVG)}
    assert {DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.UINT8, DType.COMPLEX64} <= averaged
    assert not averaged & {DType.FLOAT16, DType.BFLOAT16, DType.BOOL, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FNUZ}
    assert not any(ccl.reduces(dtype, RedOp.PREMUL_SUM) for dtype in DType)
    assert not ccl.reduces(DType.FLOAT32, RedOp.BXOR)


def test_device(vendor: HostVendor) -> None:
    device = DeviceTable(vendor.device_table)
    assert device.host_memory
    stream, event = device.stream_create(), device.event_create()
    for nbytes in (0, 1, 4096, 5 << 20):
        a, b = device.alloc(nbytes), device.host_alloc(nbytes)
        assert a % 64 == b % 64 == 0
        assert device.owns(a, nbytes)
        device.memset(a, 7, nbytes, stream)
        device.copy(b, a, nbytes, stream)
        device.event_record(event, stream)
        assert device.event_query(event)
        device.event_sync(event)
        device.stream_wait_event(stream, event)
        assert np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * nbytes).from_address(b)).tolist().count(7) == nbytes
        device.free(a)
        device.host_free(b)
    device.stream_sync(stream)
    device.event_destroy(event)
    device.stream_destroy(stream)
    x, y, out = np.arange(9.0), np.arange(9.0) * 2, np.empty(9)
    device.reduce(out.ctypes.data, [x.ctypes.data, y.ctypes.data], 9, DType.FLOAT64, RedOp.SUM, 2.0, 0)
    assert (out == (x + y) / 2).all()
    device.scale(out.ctypes.data, x.ctypes.data, 9, DType.FLOAT64, 4.0)
    assert (out == x / 4).all()
    with pytest.raises(UnsupportedError, match="cannot be combined"):
        device.reduce(out.ctypes.data, [x.ctypes.data, y.ctypes.data], 9, DType.FLOAT64, RedOp.BAND)
    with pytest.raises(UnsupportedError):
        device.flag_alloc()


def test_collectives(vendor: HostVendor) -> None:
    ccl = CclTable(vendor.ccl_table)

    def work(rank: int, comm: int) -> None:
        n = 30000
        mine, total = np.arange(n, dtype=np.float32) + rank, np.zeros(n, np.float32)
        a, b = mine.ctypes.data, total.ctypes.data
        ccl.call("all_reduce", comm, a, b, n, "float32", "sum")
        assert (total == 3 * np.arange(n) + 3).all()
        ccl.call("reduce", comm, a, b, n, "float32", "avg", peer=1)
        assert (total == (np.arange(n) + 1 if rank == 1 else 3 * np.arange(n) + 3)).all()
        ccl.call("reduce_scatter", comm, a, b, n // 3, "float32", "max")
        assert (total[: n // 3] == np.arange(n).reshape(3, -1)[rank] + 2).all()
        ccl.call("all_gather", comm, a, b, n // 3, "float32")
        assert (total.reshape(3, -1) == np.arange(n // 3) + np.array([[0], [1], [2]])).all()
        ccl.call("all_to_all", comm, a, b, n // 3, "float32")
        assert (total.reshape(3, -1) == np.arange(n).reshape(3, -1)[rank] + np.array([[0], [1], [2]])).all()
        ccl.call("broadcast", comm, a, b, n, "float32", peer=2)
        assert (total == np.arange(n) + 2).all()
        if rank == 0:
            ccl.call("send", comm, send=a, count=n, dtype="float32", peer=2)
        if rank == 2:
            ccl.call("recv", comm, recv=b, count=n, dtype="float32", peer=0)
            assert (total == np.arange(n)).all()
        with pytest.raises(UsageError):
            ccl.call("broadcast", comm, a, b, n, "float32", peer=3)
        with pytest.raises(UnsupportedError, match="no such operator"):
            ccl.call("all_reduce", comm, a, b, n, "float32", "bor")
        ccl.async_error(comm)

    _ranks(vendor, 3, work)


def test_a_dead_communicator_says_whom_it_waited_for(vendor: HostVendor) -> None:
    ccl = CclTable(vendor.ccl_table)
    data = np.zeros(4, np.float32)

    def waits(rank: int, comm: int) -> None:
        if rank == 0:
            with pytest.raises(TimedOutError, match="rank 1 of the island did nothing"):
                ccl.call("all_reduce", comm, data.ctypes.data, data.ctypes.data, 4, "float32", "sum")

    _ranks(vendor, 2, waits, timeout=0.5)

    def aborted(rank: int, comm: int) -> None:
        if rank == 1:
            ccl.abort(comm)
        with pytest.raises(AbortedError, match="rank 1 of the island aborted"):
            ccl.call("all_reduce", comm, data.ctypes.data, data.ctypes.data, 4, "float32", "sum")
        with pytest.raises(AbortedError):
            ccl.async_error(comm)

    _ranks(vendor, 2, aborted)


def _ranks(vendor: HostVendor, size: int, work: Callable[[int, int], None], timeout: float = 20.0) -> None:
    ccl, unique_id, problems = CclTable(vendor.ccl_table), vendor.new_id(), []
    together = threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            comm = vendor.create_comm(rank, size, unique_id, timeout)
            work(rank, comm)
            together.wait(30)
            ccl.destroy(comm)
        except BaseException as error:
            problems.append((rank, error))
            together.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems, problems
    assert not any(thread.is_alive() for thread in threads)
