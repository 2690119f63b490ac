# SPDX-License-Identifier: Apache-2.0
"""The bytes: whole messages of every size, in order, each channel for itself, and the right error otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import random
import select
import socket
import struct
import threading
import time

import pytest
from tcp_links import End, in_child, memory, payload, socket_pairs, wait_for

from hetccl.errors import MismatchError, UsageError

MAX = 256 << 10
SMALL_MAX = 4 << 10
EDGES = [0, 1, 15, 16, 17, 4079, 4080, 4081, 4095, 4096, 4097, 65536, MAX - 1, MAX]


def sizes(seed, count):
    chance = random.Random(seed)
    return [chance.randrange(chance.choice([64, 8192, MAX + 1])) for _ in range(count)]


def echo(end, plan):
    for number, nbytes in enumerate(plan):
        end.send(end.recv(nbytes, number % 3, number), number % 3, number)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("buffer", [0, 4096], ids=["default-buffers", "tiny-buffers"])
def test_two_processes_echo(host, buffer):
    """Every size comes back as it was sent; tiny socket buffers cut messages at arbitrary places."""
    plan = EDGES + sizes(7, 60 if buffer else 150)
    left, right = socket_pairs(host, buffer)
    child = in_child(lambda: echo(End(right, peer=0), plan))
    for sock in right:
        sock.close()
    end = End(left)
    for number, nbytes in enumerate(plan):
        data = payload(number, nbytes)
        end.send(data, number % 3, number)
        assert end.recv(nbytes, number % 3, number) == data, (number, nbytes)
    assert wait_for(child) == 0
    end.close()


@pytest.mark.timeout(120)
def test_two_processes_all_sizes_both_ways_to_receive(host):
    """Sizes 0 to 4 KiB without a gap, pipelined, received by recv and peek in turn."""
    left, right = socket_pairs(host)

    def produce():
        end = End(right, SMALL_MAX, peer=0)
        for nbytes in range(SMALL_MAX + 1):
            end.send(payload(nbytes, nbytes), 1, nbytes)
        end.recv(0)

    child = in_child(produce)
    for sock in right:
        sock.close()
    end = End(left, SMALL_MAX)
    for nbytes in range(SMALL_MAX + 1):
        if nbytes % 3 == 0:
            data = end.recv(nbytes, 1, nbytes)
        else:
            data = end.peek(1, 0, nbytes if nbytes % 3 == 1 else 0, nbytes)
            end.table.release(end.ep, 1)
        assert data == payload(nbytes, nbytes), nbytes
    end.send(b"")
    assert wait_for(child) == 0
    end.close()


@pytest.mark.timeout(120)
def test_random_interleaving_of_all_calls(host):
    """Two directions, three channels, send/reserve/recv/peek mixed at random, one process, tiny buffers."""
    left, right = socket_pairs(host, 4096)
    ends = End(left), End(right, peer=0)
    chance = random.Random(5)
    flows = [Flow(ends[side], ends[1 - side], channel, chance) for side in (0, 1) for channel in range(3)]
    deadline = time.monotonic() + 60
    while any(flow.received < Flow.MESSAGES for flow in flows):
        assert time.monotonic() < deadline, [(flow.sent, flow.received) for flow in flows]
        flow = chance.choice(flows)
        chance.choice([flow.push, flow.pull, lambda: [end.table.progress(end.ep) for end in ends]])()
    for end, other in (ends, ends[::-1]):
        counted, mirror = end.table.counters(end.ep), other.table.counters(other.ep)
        assert counted["messages_sent"] == 3 * Flow.MESSAGES == mirror["messages_received"]
        assert counted["bytes_sent"] == mirror["bytes_received"] > 0
    for end in ends:
        end.close()


class Flow:
    """One direction of one channel: pushes numbered messages by any call, pulls and checks them by any call."""

    MESSAGES = 60

    def __init__(self, source, target, channel, chance):
        self.source, self.target, self.channel, self.chance = source, target, channel, chance
        self.plan = [chance.randrange(chance.choice([1, 5, 5000, 40000])) for _ in range(self.MESSAGES)]
        self.sent = self.received = 0
        self.sending = self.receiving = None

    def data(self, number):
        return payload(number * 3 + self.channel, self.plan[number])

    def push(self):
        if self.sent == self.MESSAGES:
            return
        table, ep, number = self.source.table, self.source.ep, self.sent
        if self.sending is None and self.chance.random() < 0.5:
            address = table.reserve(ep, self.channel, self.plan[number] + 7)
            if address is None:
                return
            ctypes.memmove(address, self.data(number), self.plan[number])
            table.commit(ep, self.channel, self.plan[number], number)
            self.sent += 1
            return
        if self.sending is None:
            self.sending = bytearray(self.data(number))
        if table.send(ep, self.sending, self.channel, number):
            self.sending[:] = b"\xff" * len(self.sending)  # the memory may be used again
            self.sending, self.sent = None, number + 1

    def pull(self):
        if self.received == self.MESSAGES:
            return
        table, ep, number = self.target.table, self.target.ep, self.received
        nbytes = self.plan[number]
        if self.receiving is None:
            self.receiving = bytearray(nbytes) if self.chance.random() < 0.5 else "peek"
        if self.receiving == "peek":
            found = table.peek(ep, self.channel, 0, self.chance.choice([0, nbytes]), number)
            if found is None:
                return
            data = memory(*found)
            table.release(ep, self.channel)
        else:
            if not table.recv(ep, self.receiving, self.channel, number):
                return
            data = bytes(self.receiving)
        assert data == self.data(number), number
        self.receiving, self.received = None, number + 1


def test_peek_holds_several(ends):
    a, b = ends
    for number, nbytes in enumerate([5, 70000, 0, 9]):
        a.send(payload(number, nbytes), 0, number)
    held = [b.peek(0, index, 0, index) for index in (1, 0, 3, 2)]
    assert held == [payload(1, 70000), payload(0, 5), payload(3, 9), b""]
    with pytest.raises(UsageError, match="4 can be held"):
        b.table.peek(b.ep, 0, 4)
    for _ in range(4):
        b.table.release(b.ep, 0)
    with pytest.raises(UsageError, match="release without"):
        b.table.release(b.ep, 0)


def test_recv_takes_what_was_peeked(ends):
    a, b = ends
    a.send(b"one", 0, 1)
    a.send(b"three", 0, 1)
    assert b.peek(0, 1, 5, 1) == b"three"
    assert b.recv(3, 0, 1) == b"one" and b.recv(5, 0, 1) == b"three"


def test_several_reserved_before_the_first_commit(ends):
    a, b = ends
    places = [a.table.reserve(a.ep, 0, 100000) for _ in range(4)]
    assert None not in places and len(set(places)) == 4
    assert a.table.reserve(a.ep, 0, 1) is None
    for number, place in enumerate(places):
        ctypes.memmove(place, payload(number, 1000 * number), 1000 * number)
        a.table.commit(a.ep, 0, 1000 * number, number)
    for number in range(4):
        assert b.recv(1000 * number, 0, number) == payload(number, 1000 * number)
    with pytest.raises(UsageError, match="without reserve"):
        a.table.commit(a.ep, 0, 1)


@pytest.mark.parametrize("nbytes", [4, 100000])
@pytest.mark.parametrize("wrong", ["fingerprint", "shorter", "longer"])
def test_mismatch_names_both_and_loses_nothing(ends, nbytes, wrong):
    """recv and peek refuse the other operation's message, and it is still there, with those behind it."""
    a, b = ends
    a.send(payload(1, nbytes), 2, 0xABCD)
    a.send(b"next", 2, 1)
    expected, fingerprint = {
        "fingerprint": (nbytes, 0x1234), "shorter": (nbytes - 1, 0xABCD), "longer": (nbytes + 50000, 0xABCD)
    }[wrong]  # fmt: skip
    for call in (lambda: b.recv(expected, 2, fingerprint), lambda: b.peek(2, 0, expected, fingerprint)) * 2:
        with pytest.raises(MismatchError) as caught:
            call()
        text = str(caught.value)
        assert all(part in text for part in (f"{nbytes} bytes", "0000abcd", f"{expected} bytes", f"{fingerprint:08x}"))
    assert b.recv(nbytes, 2, 0xABCD) == payload(1, nbytes)
    assert b.recv(4, 2, 1) == b"next"
    b.table.ep_error(b.ep)


def test_a_full_channel_does_not_hold_up_another(ends):
    a, b = ends
    block = bytes(MAX)
    sent = 0
    while a.table.send(a.ep, block, 0, 7):
        sent += 1
    assert sent > 0
    a.send(b"flows", 1, 8)
    assert b.recv(5, 1, 8) == b"flows"
    b.send(b"back", 0, 9)
    assert a.recv(4, 0, 9) == b"back"
    assert any(writable for _, writable in a.table.wait_fds()), "the full channel must be waited for"
    for _ in range(sent):
        assert b.recv(MAX, 0, 7) == block
    received = threading.Thread(target=b.recv, args=(MAX, 0, 7))
    received.start()
    a.send(block, 0, 7)
    received.join()
    assert not any(writable for _, writable in a.table.wait_fds())


def test_progress_alone_finishes_a_send_that_was_begun(ends):
    a, b = ends
    block = payload(3, MAX)
    sent = 0
    while a.table.send(a.ep, block, 0, 7):
        sent += 1
    done = []
    reader = threading.Thread(target=lambda: done.extend(b.recv(MAX, 0, 7) for _ in range(sent)))
    reader.start()
    deadline = time.monotonic() + 20
    while a.table.counters(a.ep)["messages_sent"] <= sent and time.monotonic() < deadline:
        a.table.progress(a.ep)
        if a.table.counters(a.ep)["bytes_sent"] == sent * MAX and not reader.is_alive():
            break
    reader.join()
    begun = a.table.counters(a.ep)["messages_sent"] == sent + 1
    a.send(block, 0, 7)  # reports the end of the send that was begun, or begins it now
    assert a.table.counters(a.ep)["messages_sent"] == sent + 1, f"sent twice (progress had finished it: {begun})"
    assert b.recv(MAX, 0, 7) == block and done == [block] * sent


def test_begun_calls_must_be_repeated_unchanged(host):
    left, right = socket_pairs(host, 4096)
    a, b = End(left), End(right, peer=0)
    block, other = bytes(MAX), bytes(MAX)
    assert not a.table.send(a.ep, block, 0, 7), "a message larger than all buffers cannot leave at once"
    with pytest.raises(UsageError, match="unfinished"):
        a.table.send(a.ep, other, 0, 7)
    target, second = bytearray(MAX), bytearray(MAX)
    while not select.select([b.table.wait_fds()[0][0]], [], [], 1)[0]:
        pass
    assert not b.table.recv(b.ep, target, 0, 7)
    with pytest.raises(UsageError, match="unfinished"):
        b.table.recv(b.ep, second, 0, 7)
    with pytest.raises(UsageError, match="unfinished"):
        b.table.peek(b.ep, 0, 0, MAX, 7)
    for end in (a, b):
        end.close()


def test_a_send_of_which_nothing_has_left_holds_no_memory():
    """It may be given up or given again from elsewhere, and the socket is still waited for."""
    # A full Unix socket takes nothing at all; a TCP socket's idea of full changes with every acknowledgement.
    pairs = [socket.socketpair() for _ in range(3)]
    left, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    left[0].setblocking(False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += left[0].send(b"x")
    end = End(left)
    assert not end.table.send(end.ep, bytearray(b"a"), 0, 7)
    assert any(writable for _, writable in end.table.wait_fds())
    another = bytearray(b"z")
    assert not end.table.send(end.ep, another, 0, 9)
    while filled:
        filled -= len(right[0].recv(filled))
    end.send(another, 0, 9)
    assert right[0].recv(100) == struct.pack("<IIII", 0x31544348, 1, 9, 0) + b"z"
    assert not any(writable for _, writable in end.table.wait_fds())
    end.close()
    for sock in right:
        sock.close()


def test_recv_goes_on_where_peek_has_begun(host):
    left, right = socket_pairs(host)
    end = End(left)
    data = payload(1, 9000)
    right[0].sendall(struct.pack("<IIII", 0x31544348, 9000, 7, 0) + data[:5000])
    select.select([end.table.wait_fds()[0][0]], [], [], 5)
    assert end.table.peek(end.ep, 0, 0, 9000, 7) is None
    assert not end.table.recv(end.ep, bytearray(9000), 0, 7)
    right[0].sendall(data[5000:])
    assert end.recv(9000, 0, 7) == data
    end.close()
    for sock in right:
        sock.close()


def test_too_long(ends):
    with pytest.raises(UsageError, match="HETCCL_TCP_CHUNK_BYTES"):
        ends[0].table.send(ends[0].ep, bytes(MAX + 1))
    with pytest.raises(UsageError, match="HETCCL_TCP_CHUNK_BYTES"):
        ends[0].table.recv(ends[0].ep, bytearray(MAX + 1))
    with pytest.raises(UsageError, match="HETCCL_TCP_CHUNK_BYTES"):
        ends[0].table.reserve(ends[0].ep, 0, MAX + 1)
    with pytest.raises(UsageError, match="channel 3"):
        ends[0].table.send(ends[0].ep, b"x", 3)
