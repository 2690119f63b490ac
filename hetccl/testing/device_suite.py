# SPDX-License-Identifier: Apache-2.0
"""What a vendor's device table must do. A driver's test file names the vendor and subclasses:

class TestDevice(DeviceSuite):
    vendor = "foo"
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from hetccl.core import registry
from hetccl.errors import HetcclError, UnsupportedError
from hetccl.tables import DeviceTable
from hetccl.testing import oracle
from hetccl.testing.usable import require_vendor
from hetccl.types import DType, RedOp
from hetccl.vendors.base import Vendor, VendorRequest

__all__ = ["DeviceSuite"]

KERNELS, FLAGS, CAPTURE = 1 << 2, 1 << 1, 1 << 5
SIZES = (1, 7, 64, 4096, 65537, (1 << 20) + 3)


class DeviceSuite:
    """Subclass it under a name that pytest collects and set `vendor`."""

    vendor: ClassVar[str]
    device_index: ClassVar[int] = 0

    @pytest.fixture
    def opened(self) -> Vendor:
        found = require_vendor(self.vendor)
        request = VendorRequest(found.variant, self.device_index, host_id=socket.gethostname())
        return found.driver.open(request)

    @pytest.fixture
    def device(self, opened: Vendor) -> DeviceTable:
        table = DeviceTable(opened.device_table)
        table.bind_thread()
        return table

    @pytest.fixture
    def stream(self, device: DeviceTable) -> Iterator[int]:
        stream = device.stream_create()
        yield stream
        device.stream_sync(stream)
        device.stream_destroy(stream)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_copies_there_and_back(self, device: DeviceTable, stream: int, nbytes: int) -> None:
        there = oracle.moved(DType.UINT8, 0, nbytes)
        back = np.zeros_like(there)
        first, second = device.alloc(nbytes), device.alloc(nbytes)
        try:
            device.copy(first, there.ctypes.data, nbytes, stream)
            device.copy(second, first, nbytes, stream)
            device.copy(back.ctypes.data, second, nbytes, stream)
            device.stream_sync(stream)
            np.testing.assert_array_equal(back, there)
        finally:
            device.stream_sync(stream)
            device.free(first)
            device.free(second)

    def test_default_stream_works(self, device: DeviceTable) -> None:
        ptr = device.alloc(1000)
        try:
            device.memset(ptr, 0x5A, 1000)
            device.stream_sync()
            assert _read(device, ptr, 1000) == b"\x5a" * 1000
        finally:
            device.free(ptr)

    def test_nothing_to_copy_is_fine(self, device: DeviceTable, stream: int) -> None:
        ptr = device.alloc(16)
        device.memset(ptr, 7, 16, stream)
        device.copy(ptr, np.zeros(16, np.uint8).ctypes.data, 0, stream)
        device.memset(ptr, 1, 0, stream)
        device.stream_sync(stream)
        assert _read(device, ptr, 16) == b"\x07" * 16
        device.free(ptr)

    def test_memset_touches_only_its_bytes(self, device: DeviceTable, stream: int) -> None:
        ptr = device.alloc(300)
        device.memset(ptr, 0x11, 300, stream)
        device.memset(ptr + 100, 0xFE, 100, stream)
        device.stream_sync(stream)
        assert _read(device, ptr, 300) == b"\x11" * 100 + b"\xfe" * 100 + b"\x11" * 100
        device.free(ptr)

    def test_one_stream_keeps_order(self, device: DeviceTable, stream: int) -> None:
        nbytes = 1 << 20
        ptr = device.alloc(nbytes)
        for value in range(1, 20):
            device.memset(ptr, value, nbytes, stream)
        device.stream_sync(stream)
        assert _read(device, ptr, nbytes) == bytes([19]) * nbytes
        device.free(ptr)

    def test_owns_its_own_memory_only(self, device: DeviceTable) -> None:
        ptr = device.alloc(4096)
        host = np.zeros(4096, np.uint8)
        try:
            assert device.owns(ptr, 4096)
            assert device.owns(ptr + 4095, 1)
            # A device whose memory is host memory may call all of it its own.
            assert device.owns(host.ctypes.data, 4096) in ((True, False) if device.host_memory else (False,))
        finally:
            device.free(ptr)

    def test_many_allocations_do_not_overlap(self, device: DeviceTable, stream: int) -> None:
        blocks = [(device.alloc(1000 + n), 1000 + n) for n in range(20)]
        for n, (ptr, nbytes) in enumerate(blocks):
            device.memset(ptr, n, nbytes, stream)
        device.stream_sync(stream)
        for n, (ptr, nbytes) in enumerate(blocks):
            assert _read(device, ptr, nbytes) == bytes([n]) * nbytes
            device.free(ptr)

    def test_pinned_host_memory(self, device: DeviceTable, stream: int) -> None:
        pinned, ptr = device.host_alloc(5000), device.alloc(5000)
        try:
            _array(pinned, 5000)[:] = oracle.moved(DType.UINT8, 3, 5000)
            device.copy(ptr, pinned, 5000, stream)
            device.stream_sync(stream)
            assert _read(device, ptr, 5000) == oracle.moved(DType.UINT8, 3, 5000).tobytes()
        finally:
            device.stream_sync(stream)
            device.free(ptr)
            device.host_free(pinned)

    def test_event_is_reached_after_the_work_before_it(self, device: DeviceTable, stream: int) -> None:
        nbytes = 8 << 20
        ptr, event = device.alloc(nbytes), device.event_create()
        try:
            back = np.zeros(nbytes, np.uint8)
            device.memset(ptr, 9, nbytes, stream)
            device.copy(back.ctypes.data, ptr, nbytes, stream)
            device.event_record(event, stream)
            _until(lambda: device.event_query(event), "event_query never said that the event was reached")
            assert (back == 9).all()
            device.event_sync(event)
            device.event_record(event, stream)  # may be used again
            device.event_sync(event)
            assert device.event_query(event)
        finally:
            device.stream_sync(stream)
            device.event_destroy(event)
            device.free(ptr)

    def test_a_stream_waits_for_another_ones_event(self, device: DeviceTable, stream: int) -> None:
        nbytes = 4 << 20
        other, event, ptr = device.stream_create(), device.event_create(), device.alloc(nbytes)
        back = np.zeros(nbytes, np.uint8)
        try:
            for value in range(1, 11):
                device.memset(ptr, value, nbytes, stream)
            device.event_record(event, stream)
            device.stream_wait_event(other, event)
            device.copy(back.ctypes.data, ptr, nbytes, other)
            device.stream_sync(other)
            assert (back == 10).all()
        finally:
            device.stream_sync(stream)
            device.stream_destroy(other)
            device.event_destroy(event)
            device.free(ptr)

    def test_another_thread_may_use_the_device(self, device: DeviceTable) -> None:
        seen: list[Any] = []

        def work() -> None:
            try:
                device.bind_thread()
                ptr, stream = device.alloc(100), device.stream_create()
                device.memset(ptr, 3, 100, stream)
                device.stream_sync(stream)
                seen.append(_read(device, ptr, 100))
                device.stream_destroy(stream)
                device.free(ptr)
            except HetcclError as error:
                seen.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(30)
        assert seen == [b"\x03" * 100]

    @pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.label)
    def test_reduces_exactly_or_says_unsupported(self, device: DeviceTable, stream: int, dtype: DType) -> None:
        """With HETCCL_DEVICE_KERNELS: every operator of the type, 2 and 3 sources, in place as well."""
        count = 1001
        done = 0
        for redop in oracle.reducible(dtype):
            for n in (2, 3):
                sources = [oracle.data(dtype, redop, r, n, count) for r in range(n)]
                want = oracle.expected(dtype, redop, n, count)
                kernel_op, divisor = (RedOp.SUM, float(n)) if redop == RedOp.AVG else (redop, 1.0)
                blocks = [_upload(device, s) for s in sources]
                try:
                    device.reduce(blocks[0], blocks, count, dtype, kernel_op, divisor, stream)
                    device.stream_sync(stream)
                    got = np.frombuffer(_read(device, blocks[0], want.nbytes), want.dtype)
                    np.testing.assert_array_equal(got, want, err_msg=f"{dtype.label} {redop.label} of {n}")
                    done += 1
                except UnsupportedError:
                    pass
                finally:
                    for block in blocks:
                        device.free(block)
        if device.caps & KERNELS and dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT32):
            assert done, f"the device has kernels, but none for {dtype.label}"
        if not device.caps & KERNELS:
            assert not done, "reduce works, but the table does not say HETCCL_DEVICE_KERNELS"

    def test_flags_hold_a_stream_back(self, device: DeviceTable, stream: int) -> None:
        """With HETCCL_DEVICE_FLAGS: a stream goes on when the flag has the value. Without: unsupported."""
        if not device.caps & FLAGS:
            with pytest.raises(UnsupportedError):
                device.flag_alloc()
            return
        flag, event, other = device.flag_alloc(), device.event_create(), device.stream_create()
        try:
            device.stream_wait_flag(flag, 5, stream)
            device.event_record(event, stream)
            time.sleep(0.02)
            assert not device.event_query(event)
            device.flag_set(flag, 5, other)
            _until(lambda: device.event_query(event), "the stream still waits, though the flag is set")
        finally:
            device.flag_set(flag, 1 << 30, other)
            device.stream_sync(stream)
            device.stream_sync(other)
            device.stream_destroy(other)
            device.event_destroy(event)
            device.flag_free(flag)

    def test_a_stream_says_when_it_is_empty(self, device: DeviceTable, stream: int) -> None:
        """Or that it cannot tell."""
        block = device.alloc(1 << 20)
        try:
            try:
                device.stream_query(stream)
            except UnsupportedError:
                return
            device.memset(block, 7, 1 << 20, stream)
            device.stream_sync(stream)
            assert device.stream_query(stream)
            device.memset(block, 9, 1 << 20, stream)
            _until(lambda: device.stream_query(stream), "the stream does not become empty")
            assert _read(device, block, 1 << 20) == bytes([9]) * (1 << 20)
        finally:
            device.free(block)

    def test_no_stream_is_capturing(self, device: DeviceTable, stream: int) -> None:
        if device.caps & CAPTURE:
            assert not device.is_capturing(stream)

    def test_a_second_opening_shares_the_device(self, opened: Vendor, device: DeviceTable) -> None:
        """Two communicators of one process open the vendor twice; memory of the one is memory of the other."""
        found = registry.vendor(self.vendor)
        again = found.driver.open(VendorRequest(found.variant, self.device_index, host_id=socket.gethostname()))
        assert again.island_key == opened.island_key
        ptr = device.alloc(100)
        second = DeviceTable(again.device_table)
        second.bind_thread()
        second.memset(ptr, 4, 100)
        second.stream_sync()
        assert _read(second, ptr, 100) == b"\x04" * 100
        device.free(ptr)


def _upload(device: DeviceTable, array: np.ndarray[Any, Any]) -> int:
    ptr = device.alloc(array.nbytes)
    device.copy(ptr, array.ctypes.data, array.nbytes)
    device.stream_sync()
    return ptr


def _read(device: DeviceTable, ptr: int, nbytes: int) -> bytes:
    back = np.zeros(nbytes, np.uint8)
    device.copy(back.ctypes.data, ptr, nbytes)
    device.stream_sync()
    return back.tobytes()


def _array(address: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Host memory at `address` as an array."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _until(condition: Any, message: str, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.0005)
