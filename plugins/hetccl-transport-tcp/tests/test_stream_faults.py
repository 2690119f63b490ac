# SPDX-License-Identifier: Apache-2.0
"""Broken peers and bytes that are not ours: the right error, and nothing hangs."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time

import pytest
from tcp_links import End, in_child, socket_pairs, wait_for

from hetccl.errors import AbortedError, PeerLostError, TransportError

MAX = 256 << 10
SMALL_MAX = 4 << 10


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ((0x31544348, 4, 0, 1), "out of sequence"),
        ((0x31544348, MAX + 1, 0, 0), "too long"),
        ((0x31544348, 0xFFFFFFFF, 0, 0), "too long"),
        ((0x12345678, 4, 0, 0), "no message header"),
    ],
)
@pytest.mark.parametrize("call", ["recv", "peek"])
def test_bytes_that_are_not_ours(host, header, text, call):
    """A header that cannot be is an error that stays, and nothing is allocated or read on its word."""
    left, right = socket_pairs(host)
    end = End(left)
    right[0].sendall(struct.pack("<IIII", *header) + bytes(64))
    for _ in range(2):
        with pytest.raises(TransportError, match=text if _ == 0 else "lost before"):
            end.recv(4) if call == "recv" else end.peek()
    with pytest.raises(TransportError):
        end.table.ep_error(end.ep)
    end.close()
    for sock in right:
        sock.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reading", [True, False])
def test_killed_peer(host, reading):
    """SIGKILL: the survivor's recv and send raise at once, the error stays, and what had arrived can still be read."""
    left, right = socket_pairs(host)

    def live():
        end = End(right, peer=0)
        end.send(b"last words", 1, 5)
        signal.pause()

    child = in_child(live)
    for sock in right:
        sock.close()
    end = End(left)
    end.table.ep_error(end.ep)
    select.select([end.table.wait_fds()[1][0]], [], [], 10)
    os.kill(child, signal.SIGKILL)
    assert wait_for(child) == -signal.SIGKILL
    assert end.recv(10, 1, 5) == b"last words"
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1"):
        while True:
            if reading:
                end.recv(4)
            else:
                end.send(bytes(MAX), 2)
    assert time.monotonic() - start < 2
    for _ in range(2):
        with pytest.raises(PeerLostError):
            end.table.ep_error(end.ep)
    end.close()


def test_ep_error_alone_notices(host):
    left, right = socket_pairs(host)
    end = End(left)
    right[2].sendall(struct.pack("<IIII", 0x31544348, 2, 0, 0) + b"ok")
    for sock in right:
        sock.close()
    with pytest.raises(PeerLostError):
        for _ in range(1000):
            end.table.ep_error(end.ep)
            time.sleep(0.001)
    assert end.recv(2, 2) == b"ok", "what has arrived is still good"
    assert end.table.wait_fds(), "channels that nobody has read to their end can still be waited for"
    end.close()


def test_end_in_the_middle_of_a_message(host):
    left, right = socket_pairs(host)
    end = End(left)
    right[0].sendall(struct.pack("<IIII", 0x31544348, 100, 0, 0) + bytes(50))
    for sock in right:
        sock.close()
    with pytest.raises(PeerLostError, match="in the middle of a message"):
        end.recv(100)
    end.close()


def test_counters_count_payload(ends):
    a, b = ends
    for nbytes in (0, 10, 5000):
        a.send(bytes(nbytes), 2)
        b.recv(nbytes, 2)
    sent, received = {"bytes_sent": 5010, "messages_sent": 3}, {"bytes_received": 5010, "messages_received": 3}
    assert a.table.counters(a.ep) == {**sent, "bytes_received": 0, "messages_received": 0}
    assert b.table.counters(b.ep) == {**received, "bytes_sent": 0, "messages_sent": 0}


def test_sleeping_on_wait_fds(ends):
    """A message wakes a poll on the descriptors."""
    a, b = ends
    poller = select.poll()
    for fd, writable in b.table.wait_fds():
        poller.register(fd, select.POLLOUT if writable else select.POLLIN)
    assert b.table.arm() and poller.poll(0) == []
    a.send(b"wake", 1)
    assert [fd for fd, _ in poller.poll(5000)] == [b.table.wait_fds()[1][0]]
    b.table.disarm()
    assert b.recv(4, 1) == b"wake"


def test_closed_endpoint_is_an_error_not_a_crash(ends):
    a, _ = ends
    a.table.ep_close(a.ep)
    a.table.ep_close(a.ep)
    calls = lambda: a.send(b"x"), lambda: a.recv(1), lambda: a.table.ep_error(a.ep), lambda: a.table.progress(a.ep)
    for call in calls:
        with pytest.raises(AbortedError, match="closed on this side"):
            call()
    assert a.table.wait_fds() == []


def test_table_outlives_its_streams(host):
    left, right = socket_pairs(host)
    end = End(left)
    del end.streams
    assert len(end.table.wait_fds()) == 3
    end.table.ep_close(end.ep)
    for sock in right:
        sock.close()


def test_closing_in_a_forked_child_leaves_the_connection_alone(ends):
    a, b = ends
    assert wait_for(in_child(a.close)) == 0
    a.send(b"alive")
    assert b.recv(5) == b"alive"


def test_busy_receiver_is_not_taken_for_dead(ends):
    """A peer that does not read for a while (zero window) is alive: no user timeout may end the connection."""
    a, _ = ends
    while a.table.send(a.ep, bytes(MAX)):
        pass
    fd = a.table.wait_fds()[0][0]
    with socket.socket(fileno=os.dup(fd)) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        a.table.progress(a.ep)
        a.table.ep_error(a.ep)
        time.sleep(0.05)
