# SPDX-License-Identifier: Apache-2.0
"""Ranks that leave early, fail to join, abort, or hold another secret: those who go on learn what they must."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hetccl
from hetccl.core import control
from hetccl.core.control import Control, ControlListener
from hetccl.errors import AbortedError, ConfigError, HetcclError, PeerLostError
from hetccl.testing.launch import run, run_results


def leader_first(rank: int, size: int) -> float:
    """Rank 0, which leads the host, leaves; then rank 2 is killed, from which nobody has had a message yet."""
    comm = hetccl.init(timeout=60)
    comm.barrier()
    if rank == 0:
        comm.close()
        return 0.0
    time.sleep(1.0)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        comm.recv(np.zeros(4), size - 1, timeout=40)
    assert size - 1 in caught.value.facts["ranks"]
    comm.close()
    return time.monotonic() - began


@pytest.mark.parametrize("spec", ["host:3", "host@a:1,host@b:1,host@c:2"])
def test_a_leader_that_left_is_replaced(spec: str) -> None:
    results = run_results(leader_first, spec, timeout=90)
    assert results[-1].returncode == -signal.SIGKILL
    for r in results[1:-1]:
        assert r.error is None, r.traceback
        assert r.value < 20  # seconds, of 40


def joined(hosts: list[str]) -> list[Control]:
    """The control planes of one job, in one process; hosts are pretended."""
    controls = [Control(r, hosts, b"s" * 32, "job") for r in range(len(hosts))]
    listeners = [ControlListener() for _ in hosts]
    listeners[0].remote = socket.create_server(("127.0.0.1", 0))
    at = [[int(socket.AF_INET), "127.0.0.1", listeners[0].remote.getsockname()[1], 0]]
    failures: list[BaseException] = []

    def join(c: Control) -> None:
        try:
            c.join(listeners[c.rank], listeners[c.leader].local.name.hex(), at, time.monotonic() + 20)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=join, args=(c,)) for c in controls]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    for listener in listeners:
        listener.close()
    assert not failures
    return controls


def die(control: Control) -> None:
    """As the kernel ends a killed process: its sockets close without a word."""
    control._closed = True
    for sock in list(control._sockets.values()):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def eventually(check: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not check() and time.monotonic() < until:
        time.sleep(0.02)
    return check()


@pytest.mark.parametrize("leaving", [[0], [0, 1], [3], [0, 3], [1, 0]])
@pytest.mark.parametrize("dying", [2, 5])
def test_news_cross_hosts_after_leaders_left(leaving: list[int], dying: int) -> None:
    controls = joined(["a", "a", "a", "b", "b", "b"])
    for rank in leaving:
        controls[rank].leave()
        time.sleep(0.1)
    die(controls[dying])
    others = [c for c in controls if c.rank not in (*leaving, dying)]
    try:
        assert eventually(lambda: all(c.state(dying) == 2 for c in others))
        for c in others:
            assert all(c.state(r) == 1 for r in leaving if r // 3 == c.rank // 3)
            assert all(c.state(r) != 2 for r in range(6) if r != dying)
    finally:
        for c in others:
            c.leave()


def test_all_may_leave_at_once() -> None:
    """Nobody is taken for dead, in whatever order they go."""
    for seed in range(8):
        controls = joined(["a", "a", "a", "b", "b"])
        random.Random(seed).shuffle(controls)
        threads = [threading.Thread(target=c.leave) for c in controls[:-1]]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        time.sleep(0.1)
        assert all(controls[-1].state(r) != 2 for r in range(5))
        controls[-1].leave()


def test_news_wait_for_the_next_heir(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves is given another host's socket at the last moment. What came on it is for whoever is given it
    next: read here, it would be lost."""
    controls, unread = joined(["a", "a", "a", "b"]), []
    mine, theirs = socket.socketpair()
    drain, hand_over = Control._drain, Control._hand_over

    def given(self: Control, sock: socket.socket) -> None:
        drain(self, sock)
        if self.rank == 1 and not unread:
            theirs.send(control._NEWS.pack(control.LEFT, 0))
            self._adopt(3, os.dup(mine.fileno()))
            unread.append(b"")

    def handed(self: Control) -> None:
        if self.rank == 1:
            time.sleep(0.3)
            unread[:] = [mine.recv(64, socket.MSG_PEEK)]
        hand_over(self)

    monkeypatch.setattr(Control, "_drain", given)
    monkeypatch.setattr(Control, "_hand_over", handed)
    mine.setblocking(False)
    with mine, theirs:
        controls[1].leave()
    assert unread == [control._NEWS.pack(control.LEFT, 0)]
    for c in controls:
        c.leave()


def failing(rank: int, size: int) -> tuple[list[int], list[int], int]:
    """(open descriptors, and watched ones, after each communicator that failed to be made)"""
    from hetccl.core import connector
    from hetccl.core.reactor import reactor
    from hetccl.core.vendor_comms import VendorComms

    right, destroyed = connector.Connector.connect_border, []
    destroy = VendorComms.destroy

    def counted(self: Any, *patience: float) -> None:
        destroyed.append(self.island)
        destroy(self, *patience)

    def wrong(self: Any, *_: object) -> None:
        time.sleep(0.5)  # until all are here: a vendor's library that waits for a mate does not hear that it failed
        raise HetcclError("planted")

    VendorComms.destroy = counted  # type: ignore[method-assign]
    connector.Connector.connect_border = wrong  # type: ignore[method-assign]
    open_files, watched = [], []
    for turn in range(4):
        with pytest.raises(HetcclError):
            hetccl.init(name=f"t{turn}")
        time.sleep(0.6)
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
        watched.append(len(reactor()._selector.get_map()))
    connector.Connector.connect_border = right  # type: ignore[method-assign]
    with hetccl.init(name="good") as comm:
        comm.barrier()
    return open_files, watched, sum(1 for handle in destroyed if handle)


def test_a_failed_communicator_leaves_nothing() -> None:
    for open_files, watched, destroyed in run(failing, "host@a:2,host@b:1", timeout=90)[:2]:
        assert max(open_files) <= open_files[0] + 1  # a thread that accepts may still hold one
        assert watched[1:] == watched[:1] * 3
        assert watched[0] == 1  # the reactor's own
        assert destroyed >= 4


def aborting(rank: int, size: int) -> list[str]:
    """Aborts while calls of the library are under way, then goes on with a new communicator; again and again."""
    draw = random.Random(rank)
    ends = []
    for turn in range(8):
        comm = hetccl.init(name=f"t{turn}", timeout=30)
        comm.barrier()
        data = [np.full(200_000 if i % 2 else 100, 1.0, np.float32) for i in range(12)]
        works = []
        with contextlib.suppress(AbortedError, PeerLostError):  # another rank may abort while this one still posts
            for d in data:
                works.append(comm.all_reduce(d, async_op=True))
        time.sleep(draw.random() * 0.004)
        if rank == turn % size:
            comm.abort()
        for work in works:
            with contextlib.suppress(AbortedError, PeerLostError):
                work.wait(20)  # type: ignore[union-attr]
        comm.close()
        with hetccl.init(name=f"after{turn}", timeout=20) as new:
            x = np.full(100_000, rank + 1.0, np.float32)
            new.all_reduce(x)
            ends.append("right" if (x == size * (size + 1) / 2).all() else "wrong")
    return ends


@pytest.mark.parametrize("spec", ["oneccl:2", "host:2", "oneccl:2,host:1"])
def test_after_an_abort_a_new_communicator_works(spec: str, require_vendors: Callable[[str], None]) -> None:
    require_vendors(spec)
    assert all(ends == ["right"] * 8 for ends in run(aborting, spec, timeout=150))


def secretive(rank: int, size: int) -> None:
    os.environ["HETCCL_SECRET"] = ("one secret of many bytes " if rank != 2 else "another secret, of rank 2 ") * 2
    with hetccl.init() as comm:
        comm.barrier()


def test_rank_0_says_who_presented_another_secret() -> None:
    results = run_results(secretive, "host:4", timeout=40, env={"HETCCL_TIMEOUT": "15"})
    assert isinstance(results[0].error, ConfigError)
    for r in results:
        assert "rank 2 (process" in str(r.error) and "rank 1" not in str(r.error).replace("hetccl rank", "")
        assert "many bytes" not in str(r.error)  # secrets stay secret
