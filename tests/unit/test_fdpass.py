# SPDX-License-Identifier: Apache-2.0
"""Descriptors over abstract Unix sockets, and sealed memory."""

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from hetccl.native import fdpass


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def listener():
    with fdpass.FdListener() as listener:
        yield listener


@pytest.fixture
def ends(listener):
    """Two connected sockets."""
    a = fdpass.connect(listener.name, 5).socket
    b = listener.accept(5).socket
    with a, b:
        yield a, b


def test_descriptors_and_payload_arrive(ends):
    a, b = ends
    r, w = os.pipe()
    fdpass.send(a, b"here", [r, w])
    os.close(r)
    os.close(w)
    payload, (r2, w2) = fdpass.recv(b, 2, 5)
    assert payload == b"here"
    os.write(w2, b"through")
    assert os.read(r2, 100) == b"through"
    assert not os.get_inheritable(r2) and not os.get_inheritable(w2)
    fdpass.close_all([r2, w2])


def test_messages_keep_their_borders(ends):
    a, b = ends
    for payload in (b"", b"x", b"y" * 5000):
        fdpass.send(a, payload)
    for payload in (b"", b"x", b"y" * 5000):
        assert fdpass.recv(b, 0, 5) == (payload, [])


def test_a_large_message_waits_for_its_reader(ends):
    a, b = ends
    payload = os.urandom(fdpass.MAX_PAYLOAD)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    got = []
    reader = threading.Thread(target=lambda: got.append(fdpass.recv(b, 0, 5)))
    reader.start()
    fdpass.send(a, payload, timeout=5)
    reader.join(5)
    assert got == [(payload, [])]


def test_the_kernel_names_the_peer(listener):
    code = (
        "import sys; from hetccl.native import fdpass\n"
        "sock, pid = fdpass.connect(bytes.fromhex(sys.argv[1]), 5); print(pid, flush=True); fdpass.recv(sock, 0, 5)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, listener.name.hex()], stdout=subprocess.PIPE, text=True
    ) as child:
        sock, pid = listener.accept(10)
        with sock:
            assert pid == child.pid
            assert int(child.stdout.readline()) == os.getpid()
            fdpass.send(sock, b"done")
        assert child.wait(10) == 0


def test_another_user_is_refused(listener, monkeypatch):
    with contextlib.closing(fdpass.connect(listener.name, 5).socket):
        monkeypatch.setattr(fdpass.os, "geteuid", lambda: 4711)
        with pytest.raises(fdpass.StrangerError, match="4711"):
            listener.accept(5)
        with pytest.raises(fdpass.StrangerError):
            fdpass.connect(listener.name, 5)


def test_accept_and_recv_keep_their_deadline(listener):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        listener.accept(0)
    with pytest.raises(TimeoutError):
        listener.accept(0.1)
    a = fdpass.connect(listener.name, 5).socket
    b = listener.accept(5).socket
    with a, b:
        with pytest.raises(TimeoutError):
            fdpass.recv(b, 1, 0.1)
        a.send(b"\0\0")  # a head that drips
        with pytest.raises(TimeoutError, match="2 of 8"):
            fdpass.recv(b, 1, 0.1)
        with pytest.raises(TimeoutError, match="took no data"):
            while True:
                fdpass.send(a, bytes(60000), timeout=0.1)
    assert 0.3 < time.monotonic() - start < 4


def test_a_full_queue_times_out():
    refused = pytest.raises(TimeoutError, match="did not take")
    with fdpass.FdListener(backlog=0) as listener, contextlib.ExitStack() as stack, refused:
        for _ in range(10):
            stack.enter_context(fdpass.connect(listener.name, 0.1).socket)


def test_nobody_listens():
    with pytest.raises(fdpass.FdPassError, match="network namespace"):
        fdpass.connect(b"no such name", 1)


def test_a_name_is_taken_once(listener):
    with pytest.raises(fdpass.FdPassError, match="in use"):
        fdpass.FdListener(listener.name)


def test_the_name_is_random_and_not_on_disk(listener):
    with fdpass.FdListener() as other:
        assert len(listener.name) == 16 and other.name != listener.name
    assert listener._socket.getsockname()[:1] == b"\0"


def test_too_many_descriptors_are_closed_not_kept(ends):
    a, b = ends
    r, w = os.pipe()
    fdpass.send(a, b"", [r, w, r, w])
    fdpass.close_all([r, w])
    with pytest.raises(fdpass.FdPassError):
        fdpass.recv(b, 1, 5)  # the fixture counts what is open


def test_descriptors_that_were_announced_must_come(ends):
    a, b = ends
    a.send(struct.pack("!II", 0, 1))
    with pytest.raises(fdpass.FdPassError, match="1 descriptors were announced, 0 came"):
        fdpass.recv(b, 1, 5)


def test_an_oversized_message_is_refused_before_memory_is_taken(ends):
    a, b = ends
    a.send(struct.pack("!II", 1 << 31, 0))
    with pytest.raises(fdpass.FdPassError, match="2147483648"):
        fdpass.recv(b, 0, 5)


def test_the_end_of_the_peer_is_told(ends):
    a, b = ends
    a.send(b"\0\0\0")
    a.close()
    with pytest.raises(fdpass.FdPassError, match="closed after 3 of 8"):
        fdpass.recv(b, 0, 5)
    b.setblocking(True)
    with pytest.raises(fdpass.FdPassError):
        fdpass.send(b, b"x")


def test_a_region_cannot_change_its_size():
    fd = fdpass.create_region(8192, "test")
    try:
        assert os.fstat(fd).st_size == 8192 and not os.get_inheritable(fd)
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with mmap.mmap(fd, 8192) as memory:
            assert memory[:] == bytes(8192)
            memory[5] = 1
        with open("/proc/self/maps") as maps:
            assert "hetccl-test" not in maps.read()
    finally:
        os.close(fd)


def open_fds():
    return sorted(os.listdir("/proc/self/fd"))
