# SPDX-License-Identifier: Apache-2.0
"""What is special about the real library: threads, several communicators, deaths, sockets."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hetccl_vendor_oneccl.driver import OneCclDriver, OneCclVendor

from hetccl.errors import HetcclError
from hetccl.tables import CclTable
from hetccl.testing.launch import run, run_results
from hetccl.testing.meeting import Meeting
from hetccl.vendors.base import VendorRequest

pytestmark = pytest.mark.oneccl


@pytest.fixture(autouse=True)
def library(require: Any) -> None:
    require(OneCclDriver().probe().ok, "Intel oneCCL", "hetccl fetch oneccl")


def test_any_thread_may_call_one_after_another() -> None:
    assert run(threads_body, 2, 60) == [[]] * 2


def test_two_communicators_in_two_threads_do_not_meet_in_the_library() -> None:
    assert run(serialised_body, 2, 60) == [[]] * 2


def test_a_communicator_is_made_beside_calls_on_another() -> None:
    assert run(beside_body, 2, 90) == [[]] * 2


def test_a_reduce_needs_no_receive_buffer_off_the_root() -> None:
    assert run(rootless_body, 3, 60) == [[]] * 3


def test_sockets_listen_on_the_loopback_only() -> None:
    assert run(sockets_body, 2, 60) == [[]] * 2


def test_a_survivor_cleans_up_and_leaves() -> None:
    """Rank 1 is killed: rank 0's call hangs for good, but its process can still end, and leaves nothing."""
    results = run_results(survivor_body, 2, 60)
    assert results[1].returncode == -signal.SIGKILL
    assert results[0].returncode == 0, results[0].stderr
    assert left_of(results[0].stdout) == []


def test_leaving_without_destroy_leaves_nothing() -> None:
    results = run_results(careless_body, 2, 60)
    assert [r.returncode for r in results] == [0, 0]
    assert [left_of(r.stdout) for r in results] == [[], []]


def test_destroy_after_a_death_does_not_hang() -> None:
    results = run_results(lonely_body, 2, 60)
    assert results[0].error is None and results[0].value < 10


class Rank:
    """The vendor, opened, and helpers."""

    def __init__(self) -> None:
        self.vendor: OneCclVendor = OneCclDriver().open(VendorRequest(host_id=socket.gethostname()))
        self.ccl = CclTable(self.vendor.ccl_table)
        self.meeting = Meeting()

    def join(self, rank: int, size: int, name: str = "a") -> int:
        if rank == 0:
            self.meeting.put(name, self.vendor.new_id())
        return self.vendor.create_comm(rank, size, self.meeting.get(name, 30), 30)

    def wrong(self, comm: int, rank: int, size: int, count: int, base: int) -> bool:
        send, recv = np.full(count, rank + base, np.float32), np.zeros(count, np.float32)
        self.ccl.call("all_reduce", comm, send.ctypes.data, recv.ctypes.data, count)
        return not bool((recv == size * base + size * (size - 1) / 2).all())


def in_threads(*bodies: Any) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()


def threads_body(rank: int, size: int) -> list[str]:
    """Joined in one thread, used in others and in this one, destroyed in yet another."""
    me, found = Rank(), []
    comms: list[int] = []
    in_threads(lambda: comms.append(me.join(rank, size)))
    for turn in range(5):
        in_threads(lambda turn=turn: found.append(me.wrong(comms[0], rank, size, 1000, turn)))
    found.append(me.wrong(comms[0], rank, size, 70_000, 9))
    in_threads(lambda: me.ccl.destroy(comms[0]))
    return [f"call {n} on rank {rank}" for n, wrong in enumerate(found) if wrong]


def serialised_body(rank: int, size: int) -> list[str]:
    """Two threads, a communicator each, in one order on both ranks: what one lane a process gives."""
    me = Rank()
    first, second = me.join(rank, size, "a"), me.join(rank, size, "b")
    turn, found = threading.Condition(), []
    state = {"next": 0}

    def lane(which: int, comm: int, count: int) -> None:
        for _ in range(200):
            with turn:
                turn.wait_for(lambda: state["next"] == which, 30)
                found.append(me.wrong(comm, rank, size, count, which))
                state["next"] = 1 - which
                turn.notify_all()

    in_threads(lambda: lane(0, first, 1000), lambda: lane(1, second, 70_000))
    me.ccl.destroy(first)
    me.ccl.destroy(second)
    return [f"call {n} on rank {rank}" for n, wrong in enumerate(found) if wrong or len(found) != 400]


def beside_body(rank: int, size: int) -> list[str]:
    me, found = Rank(), []
    comm = me.join(rank, size)

    def busy() -> None:
        # both ranks must make the same number of calls: the ones beside the joins, and some after
        for _ in range(3000):
            found.append(me.wrong(comm, rank, size, 500, 1))

    thread = threading.Thread(target=busy)
    thread.start()
    before = len(found)
    others = [me.join(rank, size, name) for name in "bc"]
    overlapped = len(found) > before
    thread.join(60)
    found += [me.wrong(other, rank, size, 500, 2) for other in others]
    for each in (*others, comm):
        me.ccl.destroy(each)
    if not overlapped:
        return ["the joins did not overlap with the calls"]
    return [f"call {n} on rank {rank}" for n, wrong in enumerate(found) if wrong]


def rootless_body(rank: int, size: int) -> list[str]:
    me, wrong = Rank(), []
    comm = me.join(rank, size)
    for root in range(size):
        for count in (1, 1000, 300_000):
            send, recv = np.full(count, rank + 1, np.float32), np.zeros(count, np.float32)
            target = recv.ctypes.data if rank == root else 0
            me.ccl.call("reduce", comm, send.ctypes.data, target, count, peer=root)
            if rank == root and not (recv == 6).all():
                wrong.append(f"root {root} count {count}")
    me.ccl.destroy(comm)
    return wrong


def sockets_body(rank: int, size: int) -> list[str]:
    """Local addresses of this process's listening TCP sockets that are not 127.x."""
    me = Rank()
    comm = me.join(rank, size)
    mine = {os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in os.listdir("/proc/self/fd") if _is_socket(fd)}
    foreign = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            field = line.split()
            if field[3] == "0A" and field[9] in mine and not field[1].split(":")[0].endswith("7F"):
                foreign.append(field[1])
    me.wrong(comm, rank, size, 10, 1)
    me.ccl.destroy(comm)
    return foreign


def _is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def survivor_body(rank: int, size: int) -> None:
    me = Rank()
    comm = me.join(rank, size)
    me.wrong(comm, rank, size, 10, 1)
    if rank == 1:
        me.meeting.put("pid", str(os.getpid()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    dead = int(me.meeting.get("pid", 30))
    while not leftovers_dead(dead):
        time.sleep(0.01)
    stuck = threading.Thread(target=me.wrong, args=(comm, rank, size, 10, 1), daemon=True)
    stuck.start()
    stuck.join(1.0)
    assert stuck.is_alive()  # were it not, the core's whole way round a dead peer could go
    removed = me.vendor.remove_leftovers([dead, os.getpid()])
    assert removed == sorted([f"{dead}:0:0", f"{os.getpid()}:0:0"]), removed
    print("pids", dead, os.getpid(), flush=True)
    os._exit(0)


def careless_body(rank: int, size: int) -> None:
    me = Rank()
    me.wrong(me.join(rank, size), rank, size, 10, 1)
    print("pids", os.getpid(), flush=True)


def lonely_body(rank: int, size: int) -> float:
    me = Rank()
    comm = me.join(rank, size)
    if rank == 1:
        me.meeting.put("pid", str(os.getpid()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    dead = int(me.meeting.get("pid", 30))
    while not leftovers_dead(dead):
        time.sleep(0.01)
    start = time.monotonic()
    try:
        me.ccl.destroy(comm)
    except HetcclError as error:
        print(error)
    me.vendor.remove_leftovers([dead])
    return time.monotonic() - start


def leftovers_dead(pid: int) -> bool:
    from hetccl_vendor_oneccl import leftovers

    return leftovers._dead(pid)


def left_of(stdout: str) -> list[str]:
    """Files in shared memory of the processes that a rank has named."""
    pids = {word for line in stdout.splitlines() if line.startswith("pids") for word in line.split()[1:]}
    assert pids
    return [name for name in os.listdir("/dev/shm") if name.split(":")[0] in pids]
