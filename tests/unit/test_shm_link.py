# SPDX-License-Identifier: Apache-2.0
"""How two ranks come to share memory, and the rings between two processes."""

import contextlib
import ctypes
import json
import logging
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback

import pytest

from hetccl.errors import ClosedError, ConfigError, HetcclError, PeerLostError, TimedOutError, TransportError
from hetccl.native import fdpass
from hetccl.tables import TransportTable
from hetccl.transports.base import TransportRequest
from hetccl.transports.shm.driver import ShmDriver

CONTRIBUTE, RESULT, P2P = range(3)
SECRET = b"0123456789abcdef" * 2


@pytest.mark.parametrize("sizes", [(3, 4096), (1, 4096), (2048, 4096), (8, 4095), (8, 2048), (8, 1 << 30), (-8, 4096)])
def test_sizes_that_cannot_be_used(sizes, monkeypatch):
    monkeypatch.setenv("HETCCL_SHM_SLOTS", str(sizes[0]))
    monkeypatch.setenv("HETCCL_SHM_SLOT_BYTES", str(sizes[1]))
    with pytest.raises(ConfigError, match="power of two"):
        ShmDriver().open(request(0))
    found = ShmDriver().probe()
    assert not found.ok and "HETCCL_SHM_SLOTS" in found.reason and found.remedy


def test_a_size_that_is_no_number(monkeypatch):
    monkeypatch.setenv("HETCCL_SHM_SLOT_BYTES", "64K")
    with pytest.raises(ConfigError, match="'64K' is no number"):
        ShmDriver().open(request(0))


def test_probe():
    before = open_fds()
    found = ShmDriver().probe()
    assert found.ok and found.details["slots"] == "4" and open_fds() == before


def test_probe_says_what_is_missing(monkeypatch):
    def refuse(*_):
        raise PermissionError("not here")

    monkeypatch.setattr(fdpass.os, "memfd_create", refuse)
    found = ShmDriver().probe()
    assert not found.ok and "not here" in found.reason and "seccomp" in found.remedy


# ------------------------------------------------------------------------------------------- the way to a link


@contextlib.contextmanager
def opened(rank, **change):
    transport = ShmDriver().open(request(rank, **change))
    try:
        yield transport
    finally:
        transport.close()
        transport.close()


def linked(dialer, acceptor, purpose="collective", timeout=10.0):
    """Dials from a thread; returns both links, the acceptor's None if it refused. Raises what dial raised."""
    result = []

    def run():
        try:
            result.append(dialer.dial(acceptor._request.rank, acceptor.address(), purpose, timeout))
        except HetcclError as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    accepted = acceptor.accept(timeout)
    thread.join(timeout)
    if isinstance(result[0], HetcclError):
        raise result[0]
    return result[0], accepted


def test_dial_and_accept():
    before = open_fds()
    with opened(0) as a, opened(1) as b:
        ours, theirs = linked(a, b, "p2p")
        assert (ours.peer, ours.purpose, theirs.peer, theirs.purpose) == (1, "p2p", 0, "p2p")
        back, _ = linked(b, a)  # a second link, dialled from the other side
        assert back.peer == 0
        at, bt = TransportTable(a.table), TransportTable(b.table)
        assert at.max_message == 65536 and at.slots
        assert at.send(ours.endpoint, b"hello", P2P, 9)
        data = bytearray(5)
        assert bt.recv(theirs.endpoint, data, P2P, 9) and data == b"hello"
        assert a.describe() == "shm"
    assert open_fds() == before and "memfd:hetccl-shm" not in maps()


def test_addresses_travel_as_json_and_name_the_host():
    with opened(0) as a, opened(1, host_id="elsewhere") as b:
        address = json.loads(json.dumps(a.address()))
        assert a.reachable(address) and not b.reachable(address) and not a.reachable({})


@pytest.mark.parametrize("change", [{"secret": b"another" * 5}, {"job": "another"}])
def test_a_stranger_is_refused_and_the_next_is_served(change, caplog):
    before = open_fds()
    with opened(0) as a, opened(1) as b, opened(0, **change) as stranger:
        with caplog.at_level(logging.WARNING, "hetccl.transports.shm"), pytest.raises(TransportError, match="secret"):
            linked(stranger, b)
        assert f"refused a connection of process {os.getpid()}" in caplog.text
        ours, theirs = linked(a, b)
        assert ours and theirs
    assert open_fds() == before


def test_noise_is_refused(caplog):
    with opened(0) as a, opened(1) as b:
        for noise in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(100000)):
            sock = fdpass.connect(b._listener.name, 5).socket
            with sock, contextlib.suppress(TimeoutError, ConnectionError):
                sock.settimeout(0.1)
                sock.send(noise)
                sock.shutdown(socket.SHUT_WR)
            assert b.accept(1) is None
        assert caplog.text.count("refused a connection") == 3
        assert all(linked(a, b))


def test_other_sizes_are_refused_on_both_sides(monkeypatch, caplog):
    before = open_fds()
    with opened(1) as b:
        monkeypatch.setenv("HETCCL_SHM_SLOT_BYTES", "32768")
        with (
            opened(0) as a,
            pytest.raises(TransportError, match=r"4 slots of 32768.*4 slots of 65536.*HETCCL_SHM_SLOT_BYTES"),
        ):
            linked(a, b)
    assert "HETCCL_SHM_SLOT_BYTES" in caplog.text and open_fds() == before


def test_the_wrong_rank_at_an_address():
    with opened(0) as a, opened(1) as b:
        b_claims_2 = b.address()
        thread = threading.Thread(target=b.accept, args=(5,))
        thread.start()
        with pytest.raises(TransportError, match="rank 2 was wanted"):
            a.dial(2, b_claims_2, "p2p", 5)
        thread.join(5)


def test_dial_keeps_its_deadline_and_names_the_rank():
    before = open_fds()
    with opened(0) as a, opened(1) as b:
        start = time.monotonic()
        with pytest.raises((TimedOutError, TransportError), match="rank 1"):
            a.dial(1, b.address(), "collective", 0.2)  # nobody accepts
        assert time.monotonic() - start < 2
        assert b.accept(0.1) is None
        assert b.accept(0.1) is None
        gone = b.address()
    with opened(0) as a, pytest.raises(TransportError, match=r"dialling rank 1.*nobody listens"):
        a.dial(1, gone, "collective", 1)
    assert open_fds() == before


def test_use_after_close():
    with opened(0) as a, opened(1) as b:
        address = b.address()
        a.close()
        with pytest.raises(ClosedError):
            a.dial(1, address, "p2p", 1)
        with pytest.raises(ClosedError):
            a.accept(1)
        assert a.fileno() == -1


def test_a_forked_child_is_told_and_leaves_the_parent_alone():
    with opened(0) as a, opened(1) as b:
        ours, theirs = linked(a, b)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                a.dial(1, b.address(), "p2p", 1)
            except ClosedError as error:
                code = 0 if "forked child" in str(error) else 2
            a.close()
            b.close()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        TransportTable(a.table).send(ours.endpoint, b"x")
        assert TransportTable(b.table).recv(theirs.endpoint, bytearray(1))


def test_a_link_made_while_its_owner_sleeps_wakes_it():
    with opened(0) as a, opened(1) as b:
        bt = TransportTable(b.table)
        assert bt.arm()
        ours, theirs = linked(a, b)
        ((bell, _),) = bt.wait_fds()
        assert select.select([bell], [], [], 1)[0]
        os.read(bell, 8)
        TransportTable(a.table).send(ours.endpoint, b"x")
        assert select.select([bell], [], [], 1)[0]
        bt.disarm()
        assert bt.recv(theirs.endpoint, bytearray(1))


# ------------------------------------------------------------------------------------------------ two processes


def wait_for(table, step, timeout=10.0, spins=0):
    """Repeats `step` until it is not None or False, sleeping on the table's descriptor in between."""
    deadline = time.monotonic() + timeout
    fds = [fd for fd, _ in table.wait_fds()]
    while True:
        for _ in range(spins + 1):
            found = step()
            if found is not None and found is not False:
                return found
        left = deadline - time.monotonic()
        assert left > 0, "nothing came in time: a wake-up was lost"
        if table.arm():
            select.select(fds, [], [], left)
        table.disarm()


def every_size(rank, table, ep):
    data = bytes(range(256)) * 256
    sizes = [*range(300), *range(4000, 4200), 32767, 32768, 65535, 65536]
    for i, nbytes in enumerate(sizes):
        channel = i % 3
        if rank == 0:
            assert wait_for(table, lambda n=nbytes, c=channel: table.send(ep, data[:n], c, n))
        got = bytearray(nbytes)
        assert wait_for(table, lambda n=nbytes, c=channel, g=got: table.recv(ep, g, c, n))
        assert got == data[:nbytes]
        if rank == 1:
            assert wait_for(table, lambda n=nbytes, c=channel, g=got: table.send(ep, bytes(g), c, n))


def sleep_and_wake(rank, table, ep):
    """Always asleep at once: a lost wake-up would run into the deadline."""
    for i in range(3000):
        if rank == i % 2:
            assert table.send(ep, struct.pack("<I", i), i % 3, i)
        else:
            got = bytearray(4)
            wait_for(table, lambda i=i, got=got: table.recv(ep, got, i % 3, i), spins=i % 4)
            assert got == struct.pack("<I", i)


def full_ring(rank, table, ep):
    """The sender always runs out of room, the receiver dawdles: credit must wake the sender."""
    for i in range(400):
        data = struct.pack("<I", i) * 300
        if rank == 0:
            assert wait_for(table, lambda i=i, data=data: table.send(ep, data, 0, i))
        else:
            if i % 50 == 0:
                time.sleep(0.01)
            got = bytearray(len(data))
            wait_for(table, lambda i=i, got=got: table.recv(ep, got, 0, i))
            assert got == data


class AllReduce:
    """The pattern of an all_reduce of two: both contribute, both answer in place, both take the results."""

    def __init__(self, rank, table, ep, lengths, rng):
        self.rank, self.table, self.ep, self.lengths, self.rng = rank, table, ep, lengths, rng
        self.sent = self.combined = self.answered = self.taken = 0

    def done(self):
        return self.answered == self.taken == len(self.lengths)

    def step(self):
        """Tries everything in a random order, or stops early. False only if nothing at all could be done."""
        before = (self.sent, self.combined, self.answered, self.taken)
        parts = [self.contribute, self.combine, self.take]
        self.rng.shuffle(parts)
        for part in parts:
            part()
            if self.rng.random() < 0.3 and (self.sent, self.combined, self.answered, self.taken) != before:
                return True
        return (self.sent, self.combined, self.answered, self.taken) != before

    def contribute(self):
        i = self.sent
        if i < len(self.lengths):
            data = bytes([i + self.rank]) * self.lengths[i]
            self.sent += self.table.send(self.ep, data, CONTRIBUTE, i)

    def combine(self):
        i = self.answered
        if i < len(self.lengths) and (found := self.table.peek(self.ep, CONTRIBUTE, 0, self.lengths[i], i)):
            if self.combined == i:  # else it was combined before, but could not be answered for want of room
                assert ctypes.string_at(*found) == bytes([i + 1 - self.rank]) * self.lengths[i]
                ctypes.memset(found[0], 2 * i + 1, found[1])
                self.combined += 1
            self.answered += self.table.answer(self.ep, found[1], i)

    def take(self):
        i = self.taken
        if i < len(self.lengths) and (found := self.table.peek(self.ep, RESULT, 0, self.lengths[i], i)):
            assert ctypes.string_at(*found) == bytes([2 * i + 1]) * self.lengths[i]
            self.table.release(self.ep, RESULT)
            self.taken += 1


def all_reduce(rank, table, ep):
    for call in range(200):
        lengths = random.Random(call).choices([1, 48, 49, 5000, 65536], k=20)
        work = AllReduce(rank, table, ep, lengths, random.Random(call + rank))
        while not work.done():
            wait_for(table, work.step)


def close_is_seen(rank, table, ep):
    if rank == 0:
        assert table.send(ep, b"last")
        time.sleep(0.1)
        return  # the transport closes
    assert wait_for(table, lambda: table.recv(ep, bytearray(4)))
    with pytest.raises(PeerLostError, match="rank 0 has closed"):
        wait_for(table, lambda: table.recv(ep, bytearray(4)))


@pytest.mark.parametrize("body", [every_size, sleep_and_wake, full_ring, all_reduce, close_is_seen])
def test_two_processes(body):
    two_processes(body, timeout=60)


def test_a_killed_pair_leaves_nothing():
    code = (
        "import sys, threading, time; sys.path[:0] = sys.argv[1:2]; import test_shm_link as t\n"
        "a, b = (t.ShmDriver().open(t.request(r)) for r in range(2)); t.linked(a, b)\n"
        "print(a.address()['socket'], flush=True); time.sleep(30)"
    )
    here = os.path.dirname(__file__)
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", code, here], stdout=subprocess.PIPE, text=True) as child:
        name = bytes.fromhex(child.stdout.readline())
        fdpass.connect(name, 5).socket.close()
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    with pytest.raises(fdpass.FdPassError, match="nobody listens"):
        fdpass.connect(name, 5)
    assert not {f for f in set(os.listdir("/dev/shm")) - before if "hetccl" in f and str(child.pid) in f}


# ---------------------------------------------------------------------------------------------------- helpers


def request(rank, **change):
    return TransportRequest(**{"rank": rank, "size": 2, "job": "test", "host_id": "here", "secret": SECRET, **change})


def open_fds():
    return sorted(os.listdir("/proc/self/fd"))


def maps():
    with open("/proc/self/maps") as file:
        return file.read()


def two_processes(body, timeout):
    """Runs body(rank, table, endpoint) in two forked processes that are linked; fails with their traceback."""
    pipes = socket.socketpair()
    children, outputs = [], []
    for rank in range(2):
        r, w = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(timeout + 5)
            code = 1
            try:
                os.close(r)
                one_process(rank, pipes[rank], body)
                code = 0
            except BaseException:
                os.write(w, traceback.format_exc().encode())
            finally:
                os._exit(code)
        os.close(w)
        children.append(child)
        outputs.append(r)
    for pipe in pipes:
        pipe.close()
    deadline = time.monotonic() + timeout
    texts = []
    for rank, (child, out) in enumerate(zip(children, outputs, strict=True)):
        if not select.select([out], [], [], max(deadline - time.monotonic(), 0))[0]:
            os.kill(child, signal.SIGKILL)
            texts.append(f"rank {rank} did not end in {timeout} s")
        else:
            while part := os.read(out, 65536):
                texts.append(part.decode())
        os.close(out)
        status = os.waitpid(child, 0)[1]
        if status and not texts:
            texts.append(f"rank {rank} ended with status {status}")
    assert not texts, "\n".join(texts)


def one_process(rank, pipe, body):
    before = open_fds()
    transport = ShmDriver().open(request(rank))
    pipe.sendall(json.dumps(transport.address()).encode().ljust(200))
    address = json.loads(pipe.recv(200, socket.MSG_WAITALL))
    link = transport.dial(1, address, "collective", 10) if rank == 0 else transport.accept(10)
    assert link is not None
    table = TransportTable(transport.table)
    body(rank, table, link.endpoint)
    if body is not close_is_seen:  # neither leaves before the other has all it needs
        pipe.sendall(b".")
        assert pipe.recv(1)
    transport.close()
    assert open_fds() == before
    assert "memfd:hetccl-shm" not in maps()
