# SPDX-License-Identifier: Apache-2.0
"""The pretend accelerator as a device: its memory, its streams, and how it lives and ends with its process."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetccl import errors
from hetccl.tables import DeviceTable
from hetccl.types import DType, RedOp
from hetccl.vendors.base import VendorRequest
from hetccl.vendors.sim.array import SimArray
from hetccl.vendors.sim.driver import SimDriver, SimVendor

INDEX = itertools.count()  # a device of its own for every test: one that fails on purpose harms no other


def open_vendor(variant: str = "a") -> SimVendor:
    return SimDriver().open(VendorRequest(variant=variant, device_index=next(INDEX), host_id="here"))


@pytest.fixture
def vendor() -> Iterator[SimVendor]:
    opened = open_vendor()
    yield opened
    assert opened.device.stop(10), "a stream thread did not leave"


@pytest.fixture
def table(vendor: SimVendor) -> DeviceTable:
    return DeviceTable(vendor.device_table)


def run_script(script: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    prologue = """
        import ctypes, os, sys, time
        from hetccl import errors
        from hetccl.tables import DeviceTable
        from hetccl.vendors.base import VendorRequest
        from hetccl.vendors.sim.driver import SimDriver
        vendor = SimDriver().open(VendorRequest(variant="a"))
        table = DeviceTable(vendor.device_table)
    """
    code = textwrap.dedent(prologue) + textwrap.dedent(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False,
                          env=environment)


def word(flag: int) -> Any:
    return ctypes.c_uint32.from_address(flag)


# ---------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("access", ["ctypes.string_at(ptr, 1)", "ctypes.memset(ptr, 1, 1)"])
def test_stray_host_access_faults(access: str) -> None:
    done = run_script(f"ptr = table.alloc(100)\nprint('before', flush=True)\n{access}\nprint('after')")
    assert done.stdout == "before\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_owns_tells_own_host_and_foreign_memory(table: DeviceTable) -> None:
    other = DeviceTable(open_vendor("b").device_table)
    ptr, foreign, host = table.alloc(100), other.alloc(100), ctypes.create_string_buffer(100)
    assert table.owns(ptr, 100) and table.owns(ptr + 99, 1)
    assert not table.owns(ctypes.addressof(host), 100)
    with pytest.raises(errors.HetcclError, match="is memory of sim-b"):
        table.owns(foreign, 100)
    with pytest.raises(errors.HetcclError, match="leave the allocation of 100 bytes"):
        table.owns(ptr, 101)
    table.free(ptr)
    assert not table.owns(ptr, 100)
    other.free(foreign)


def test_owns_among_many_blocks(table: DeviceTable) -> None:
    blocks = [table.alloc(1 + 5000 * (i % 3)) for i in range(200)]
    for i in range(0, 200, 2):
        table.free(blocks[i])
    assert [table.owns(b) for b in blocks] == [bool(i % 2) for i in range(200)]
    for i in range(1, 200, 2):
        table.free(blocks[i])


def test_copies_check_both_sides(table: DeviceTable) -> None:
    other = DeviceTable(open_vendor("b").device_table)
    ptr, foreign, host = table.alloc(100), other.alloc(100), ctypes.create_string_buffer(200)
    address = ctypes.addressof(host)
    for dst, src, nbytes in [(ptr, foreign, 1), (foreign, ptr, 1), (ptr, address, 101), (address, ptr + 1, 100),
                             (ptr + 4096, address, 1)]:
        with pytest.raises(errors.HetcclError):
            table.copy(dst, src, nbytes)
    with pytest.raises(errors.HetcclError):
        table.memset(foreign, 0, 1)
    with pytest.raises(errors.HetcclError, match="not the start"):
        table.free(ptr + 1)
    with pytest.raises(errors.HetcclError, match="not the start"):
        table.free(foreign)
    table.copy(foreign, ptr, 0)  # no bytes, no pointer
    table.stream_sync()


def test_bytes_travel(table: DeviceTable) -> None:
    a, b = table.alloc(5000), table.alloc(5000)
    data = bytes(range(250)) * 20
    host, back = ctypes.create_string_buffer(data, 5000), ctypes.create_string_buffer(5000)
    table.copy(a, ctypes.addressof(host), 5000)
    table.memset(b, 7, 5000)
    table.copy(b + 10, a + 20, 100)
    table.copy(ctypes.addressof(back), b, 5000)
    table.stream_sync()
    assert back.raw == b"\x07" * 10 + data[20:120] + b"\x07" * 4890


# --------------------------------------------------------------------------------------------------- streams


def test_work_runs_later_and_in_order(table: DeviceTable) -> None:
    stream, event, flag = table.stream_create(), table.event_create(), table.flag_alloc()
    ptr, host = table.alloc(8), ctypes.create_string_buffer(b"\0" * 8, 8)
    table.stream_wait_flag(flag, 1, stream)
    table.memset(ptr, 0x11, 8, stream)
    table.copy(ctypes.addressof(host), ptr, 8, stream)
    table.event_record(event, stream)
    time.sleep(0.05)
    assert host.raw == b"\0" * 8
    assert not table.event_query(event)
    word(flag).value = 1
    table.event_sync(event)
    assert host.raw == b"\x11" * 8
    assert table.event_query(event)
    table.stream_destroy(stream)
    table.event_destroy(event)
    table.flag_free(flag)


def test_streams_do_not_wait_for_each_other_unless_told(table: DeviceTable) -> None:
    first, second, event, flag = table.stream_create(), table.stream_create(), table.event_create(), table.flag_alloc()
    host = ctypes.create_string_buffer(b"\0\0", 2)
    table.stream_wait_event(second, event)  # never recorded: nothing to wait for
    table.stream_sync(second)
    table.stream_wait_flag(flag, 1, first)
    table.memset(ctypes.addressof(host), 1, 1, first)
    table.event_record(event, first)
    table.stream_sync(second)
    table.stream_sync()
    table.stream_wait_event(second, event)
    table.copy(ctypes.addressof(host) + 1, ctypes.addressof(host), 1, second)
    done = table.event_create()
    table.event_record(done, second)
    time.sleep(0.05)
    assert not table.event_query(done)
    table.flag_set(flag, 1)
    table.event_sync(done)
    assert host.raw == b"\1\1"


def test_a_wait_means_the_record_it_saw(table: DeviceTable) -> None:
    held, free, event, flag = table.stream_create(), table.stream_create(), table.event_create(), table.flag_alloc()
    table.stream_wait_flag(flag, 1, held)
    table.event_record(event, held)
    table.stream_wait_event(free, event)  # waits for the record on `held`
    table.event_record(event, 0)  # the event now means this
    table.event_sync(event)
    probe = table.event_create()
    table.event_record(probe, free)
    time.sleep(0.05)
    assert not table.event_query(probe)
    word(flag).value = 1
    table.event_sync(probe)


def test_events_streams_and_memory_may_go_while_in_use(table: DeviceTable) -> None:
    stream, event, flag = table.stream_create(), table.event_create(), table.flag_alloc()
    ptr, host = table.alloc(4), ctypes.create_string_buffer(b"\0" * 4, 4)
    table.stream_wait_flag(flag, 1, stream)
    table.memset(ptr, 5, 4, stream)
    table.copy(ctypes.addressof(host), ptr, 4, stream)
    table.event_record(event, stream)
    other = table.stream_create()
    table.stream_wait_event(other, event)
    table.event_destroy(event)
    table.free(ptr)
    table.stream_destroy(stream)
    table.flag_set(flag, 1)
    table.stream_sync(other)
    assert host.raw == b"\5" * 4


def test_a_full_queue_blocks_until_there_is_room(table: DeviceTable) -> None:
    stream, flag, ptr = table.stream_create(), table.flag_alloc(), table.alloc(1)
    count = 4200
    table.stream_wait_flag(flag, 1, stream)
    reached = []

    def enqueue() -> None:
        for i in range(count):
            table.memset(ptr, i & 255, 1, stream)
            reached.append(i)

    thread = threading.Thread(target=enqueue, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert 4090 < len(reached) <= 4100
    word(flag).value = 1
    thread.join(20)
    assert len(reached) == count
    table.stream_sync(stream)


def test_flags_compare_as_counters(table: DeviceTable) -> None:
    flag = table.flag_alloc()
    word(flag).value = 3
    table.stream_wait_flag(flag, 2)
    table.stream_wait_flag(flag, 0xFFFFFFFF)  # a counter that has wrapped is ahead
    table.stream_sync()


def test_a_deadline_breaks_the_device(vendor: SimVendor, table: DeviceTable) -> None:
    flag = table.flag_alloc()
    vendor.device.deadline = 0.1
    table.stream_wait_flag(flag, 1)
    with pytest.raises(errors.TimedOutError, match="to reach 1; it is 0"):
        for _ in range(3):  # the host's own wait may end first
            time.sleep(0.1)
            table.stream_sync()
    with pytest.raises(errors.TimedOutError, match="failed earlier"):
        table.alloc(1)


def test_handles_of_another_device_are_refused(table: DeviceTable) -> None:
    other = DeviceTable(open_vendor("b").device_table)
    stream, event, flag, ptr = other.stream_create(), other.event_create(), other.flag_alloc(), table.alloc(1)
    with pytest.raises(errors.HetcclError, match="belongs to sim-b"):
        table.memset(ptr, 0, 1, stream)
    with pytest.raises(errors.HetcclError, match="belongs to sim-b"):
        table.event_record(event)
    with pytest.raises(errors.HetcclError, match="not one of its flags"):
        table.flag_set(flag, 1)


def test_kernels_run_on_device_memory(vendor: SimVendor, table: DeviceTable) -> None:
    a = SimArray.from_numpy(vendor, np.array([1, 2, 3], dtype=np.float32))
    b = SimArray.from_numpy(vendor, np.array([10, 20, 30], dtype=np.float32))
    out = SimArray(vendor, 3, DType.FLOAT32)
    table.reduce(out.ptr, [a.ptr, b.ptr, a.ptr], 3, DType.FLOAT32, RedOp.SUM)
    assert out.to_numpy().tolist() == [12, 24, 36]
    table.scale(out.ptr, out.ptr, 3, DType.FLOAT32, 4.0)
    assert out.to_numpy().tolist() == [3, 6, 9]
    with pytest.raises(errors.HetcclError, match="leave the allocation"):
        table.reduce(out.ptr, [a.ptr, b.ptr], 4, DType.FLOAT32, RedOp.SUM)
    with pytest.raises(errors.UnsupportedError):
        table.reduce(out.ptr, [a.ptr, b.ptr], 3, DType.FLOAT32, RedOp.BXOR)


# --------------------------------------------------------------------------------------------- process life


def test_exit_with_held_streams_is_prompt() -> None:
    begin = time.monotonic()
    done = run_script("""
        for i in range(3):
            table.stream_wait_flag(table.flag_alloc(), 1, table.stream_create())
        time.sleep(0.05)
        print("leaving")
    """)
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr
    assert time.monotonic() - begin < 10


def test_stopping_releases_waiters(vendor: SimVendor, table: DeviceTable) -> None:
    flag, caught = table.flag_alloc(), []
    table.stream_wait_flag(flag, 1)

    def wait() -> None:
        try:
            table.stream_sync()
        except errors.AbortedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert vendor.device.stop(10)
    thread.join(10)
    assert len(caught) == 1
    with pytest.raises(errors.AbortedError, match="has been stopped"):
        table.alloc(1)


def test_a_forked_child_is_refused_and_may_open_anew() -> None:
    done = run_script("""
        ptr = table.alloc(10)
        table.memset(ptr, 1, 10)
        table.stream_sync()
        child = os.fork()
        if child == 0:
            for call in (lambda: table.alloc(1), lambda: table.memset(ptr, 0, 1), lambda: table.free(ptr),
                         lambda: table.owns(ptr), lambda: table.stream_sync()):
                try:
                    call()
                    os._exit(1)
                except errors.HetcclError as error:
                    if "forked child" not in str(error):
                        os._exit(2)
            again = DeviceTable(SimDriver().open(VendorRequest(variant="a")).device_table)
            again.memset(again.alloc(4), 1, 4)
            again.stream_sync()
            sys.exit(0)
        pid, status = os.waitpid(child, 0)
        table.memset(ptr, 2, 10)
        table.stream_sync()
        print(os.waitstatus_to_exitcode(status))
    """)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_opening_needs_no_numpy() -> None:
    done = run_script("print([m for m in ('numpy', 'torch', 'stevedore', 'multiprocessing') if m in sys.modules])")
    assert done.stdout == "[]\n", done.stderr
