# SPDX-License-Identifier: Apache-2.0
"""The pretend accelerator as a vendor: driver, library and arrays. Each rank of a collective runs sim_worker.py."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from hetccl import errors
from hetccl.tables import CclTable, DeviceTable
from hetccl.types import DType, RedOp
from hetccl.vendors.base import VendorRequest
from hetccl.vendors.sim.array import SimArray
from hetccl.vendors.sim.driver import SimDriver, SimVendor

WORKER = os.path.join(os.path.dirname(__file__), "sim_worker.py")
# A worker finds the same hetccl, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
INDEX = itertools.count(1000)


def open_vendor(variant: str = "a") -> SimVendor:
    return SimDriver().open(VendorRequest(variant=variant, device_index=next(INDEX), host_id="here"))


@pytest.fixture
def vendor() -> SimVendor:
    return open_vendor()


def run_ranks(scenario: str, size: int, variants: str = "a", timeout: float = 120) -> None:
    """Runs sim_worker.py on `size` processes and expects "ok" from each."""
    ids = [open_vendor(v).new_id().hex() for v in variants.split(",")]
    workers = [
        subprocess.Popen([sys.executable, WORKER, scenario, str(rank), str(size), variants, *ids], env=ENVIRONMENT,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(size)
    ]
    outputs: list[str] = []
    until = time.monotonic() + timeout
    try:
        for worker in workers:
            outputs.append(worker.communicate(timeout=max(1, until - time.monotonic()))[0])
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for rank, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == 0 and output.endswith("ok\n"), f"rank {rank}: rc {worker.returncode}\n{output}"


def test_driver_is_only_used_when_named() -> None:
    assert SimDriver.variants and not SimDriver.automatic and SimDriver().probe().ok
    vendor = open_vendor("blue")
    assert vendor.name == "sim-blue"
    assert vendor.island_key == ("sim-blue", "1.0", "", "here")
    assert "no prod" in vendor.describe()


def test_the_same_device_is_shared() -> None:
    request = VendorRequest(variant="a", device_index=next(INDEX))
    assert SimDriver().open(request).device is SimDriver().open(request).device


def test_personalities_differ() -> None:
    a, b, c, x = (CclTable(open_vendor(v).ccl_table) for v in ("a", "b", "c", "x"))
    for table in (a, b, c, x):
        assert all(table.moves(d) for d in DType)
        assert not any(table.reduces(d, RedOp.PREMUL_SUM) for d in DType)
    assert all(a.reduces(d, RedOp.SUM) for d in DType) and a.reduces(DType.FLOAT32, RedOp.AVG)
    assert not any(b.reduces(d, RedOp.PROD) for d in DType)
    assert not any(b.reduces(d, RedOp.SUM) for d in (DType.FLOAT64, DType.INT8, DType.UINT8, DType.BOOL))
    assert b.reduces(DType.INT32, RedOp.BAND) and not b.reduces(DType.FLOAT32, RedOp.BAND)
    assert [op for op in RedOp if c.reduces(DType.FLOAT32, op)] == [RedOp.SUM]
    assert c.reduce_mask(DType.BFLOAT16) == 0
    assert not any(x.reduces(d, RedOp.AVG) for d in DType) and x.reduces(DType.FLOAT64, RedOp.PROD)


def test_calls_are_checked() -> None:
    vendor, other = open_vendor("b"), open_vendor("a")
    table, ccl = DeviceTable(vendor.device_table), CclTable(vendor.ccl_table)
    comm = vendor.create_comm(0, 1, vendor.new_id(), 10)
    ptr, foreign = table.alloc(16), DeviceTable(other.device_table).alloc(16)
    host = ctypes.create_string_buffer(16)
    for dtype, op in [(DType.FLOAT32, RedOp.PROD), (DType.FLOAT64, RedOp.SUM), (DType.INT8, RedOp.MAX),
                      (DType.FLOAT32, RedOp.PREMUL_SUM)]:
        with pytest.raises(errors.UnsupportedError):
            ccl.call("all_reduce", comm, ptr, ptr, 1, dtype, op)
    with pytest.raises(errors.HetcclError, match=r"send buffer .* is memory of sim-a"):
        ccl.call("all_reduce", comm, foreign, ptr, 4)
    with pytest.raises(errors.HetcclError, match=r"receive buffer .* is host memory"):
        ccl.call("all_reduce", comm, ptr, ctypes.addressof(host), 4)
    with pytest.raises(errors.HetcclError, match="leave the allocation"):
        ccl.call("all_gather", comm, ptr, ptr, 5)
    with pytest.raises(errors.HetcclError, match="no rank 1 among 1"):
        ccl.call("broadcast", comm, ptr, ptr, 4, peer=1)
    with pytest.raises(errors.HetcclError, match="not one of its communicators"):
        CclTable(other.ccl_table).call("all_reduce", comm, foreign, foreign, 4)
    ccl.call("all_reduce", comm, ptr, ptr, 4)  # none of this harmed the communicator
    table.stream_sync()
    ccl.async_error(comm)
    ccl.destroy(comm)


def test_an_id_of_another_vendor_is_refused() -> None:
    a, b = open_vendor("a"), open_vendor("b")
    with pytest.raises(errors.VendorError, match=r"(?s)sim-b: .*sim-a") as caught:
        b.create_comm(0, 1, a.new_id(), 5)
    assert caught.value.code == 3
    with pytest.raises(errors.UsageError, match="names no vendor"):
        b.create_comm(0, 1, b"rubbish", 5)


@pytest.mark.parametrize(("size", "variants"), [(2, "a"), (3, "b"), (2, "c"), (1, "x")])
def test_collectives_give_the_exact_result(size: int, variants: str) -> None:
    run_ranks("collectives", size, variants)


@pytest.mark.parametrize(
    ("scenario", "size", "variants"),
    [("order", 2, "a"), ("two_streams", 2, "a"), ("point_to_point", 3, "a"), ("abort", 2, "a"),
     ("peer_abort", 2, "a"), ("queued_abort", 2, "a"), ("exit_inside", 2, "a"), ("two_vendors", 2, "a,b")],
)
def test_ranks(scenario: str, size: int, variants: str) -> None:
    run_ranks(scenario, size, variants)


# ---------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("value", [np.arange(12, dtype=np.int64).reshape(3, 4), np.float32(3.5), np.zeros((0, 4)),
                                   np.array([True, False]), np.array([1 + 2j]), np.arange(6).reshape(2, 3).T])
def test_arrays_come_back(vendor: SimVendor, value: Any) -> None:
    with SimArray.from_numpy(vendor, value) as array:
        back = array.to_numpy()
        assert back.dtype == value.dtype and back.shape == np.shape(value) and np.array_equal(back, value)


def test_array_interface_and_names(vendor: SimVendor) -> None:
    array = SimArray.from_numpy(vendor, np.arange(4, dtype=np.uint16), DType.BFLOAT16)
    assert array.dtype is DType.BFLOAT16 and array.nbytes == 8
    shown = array.__cuda_array_interface__
    assert shown["data"] == (array.ptr, False) and shown["shape"] == (4,) and shown["typestr"] == "<u2"
    with pytest.raises(errors.UsageError, match="float32 has 4 bytes"):
        SimArray.from_numpy(vendor, np.arange(4, dtype=np.uint16), "float32")
    with pytest.raises(errors.UsageError, match="no element type"):
        SimArray(vendor, 4, "float99")
    array.close()
    array.close()
    with pytest.raises(errors.ClosedError):
        array.to_numpy()
