# SPDX-License-Identifier: Apache-2.0
"""Windows over TCP: order of words, damaged frames, deaths, forks, closing. The conformance suite moves the data."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import threading
import time

import pytest
from hetccl_transport_tcp._tcp import CHANNELS, MOST_SOCKETS, Streams, is_link, link_sockets
from tcp_links import End, in_child, payload, socket_pairs, wait_for

from hetccl.errors import AbortedError, PeerLostError, TransportError, UnsupportedError, UsageError

pytestmark = pytest.mark.timeout(60)
NBYTES, MAGIC = 32 << 20, 0x32544348
FRAME = struct.Struct("<IIQIIIHH4Q")


def pairs(bulk, buffer=0):
    return socket_pairs("127.0.0.1", buffer, link_sockets(bulk))


def bytes_both_ways(sock):
    """(bytes of ours that the peer has acknowledged, bytes received), from Linux's struct tcp_info."""
    return struct.unpack_from("2Q", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), 120)


class Mapped(End):
    """An end whose window is mapped."""

    def __init__(self, socks, **more):
        super().__init__(socks, **more)
        self.base, self.side, self.copies = self.table.window(self.ep, NBYTES)

    def write(self, at, data):
        ctypes.memmove(self.base + at, data, len(data))

    def read(self, at, nbytes):
        return ctypes.string_at(self.base + at, nbytes)

    def word(self, at):
        return ctypes.c_uint64.from_address(self.base + at).value

    def wait(self, at, value, limit=20.0):
        deadline = time.monotonic() + limit
        while self.word(at) != value:
            self.table.window_test(self.ep)
            assert time.monotonic() < deadline, f"the word is {self.word(at)}, not {value}"
            os.sched_yield()

    def flush(self):
        self.until(self.table.window_test)


@pytest.fixture
def windows():
    left, right = pairs(3)
    both = Mapped(left), Mapped(right, peer=0, dialled=False)
    yield both
    for end in both:
        end.close()


def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return sorted(n for n in names if n.startswith("hetccl-tcp"))


def test_words_come_behind_all_bytes_put_before(windows):
    """A small put overtakes the parts of a large one on the wire, but its word does not."""
    a, b = windows
    assert (a.side, b.side, a.copies) == (0, 1, True)
    for turn in range(30):
        large, small = payload(turn, 4_000_001), payload(turn + 100, 1000)
        a.write(1 << 20, large)
        a.write(16 << 20, small)
        assert a.table.window_put(a.ep, 1 << 20, len(large), [(0, turn + 1), (8, 7 * turn)])
        assert a.table.window_put(a.ep, 16 << 20, len(small), [(16, turn + 1)])
        b.wait(16, turn + 1)
        assert b.word(0) == turn + 1 and b.word(8) == 7 * turn
        assert b.read(1 << 20, len(large)) == large and b.read(16 << 20, len(small)) == small
        b.table.window_put(b.ep, 0, 0, [(24, turn + 1)])
        a.wait(24, turn + 1)


def test_threads_start_with_the_first_large_put_and_end_with_the_link(windows):
    a, b = windows
    a.table.window_put(a.ep, 0, 65536, [(0, 1)])
    b.wait(0, 1)
    assert threads() == []
    a.table.window_put(a.ep, 0, 65537, [(1 << 20, 2)])
    b.wait(1 << 20, 2)
    assert threads() == ["hetccl-tcp-in"] * 3 + ["hetccl-tcp-out"] * 3
    used = a.table.put_threads(a.ep)
    assert used["threads"] == 3 and used["send_ns"] > 0 and b.table.put_threads(b.ep)["receive_ns"] > 0
    a.close()
    b.close()
    assert threads() == []


def test_the_last_words_are_there_when_the_other_end_has_closed(windows):
    """Its sockets for much data end before they are read."""
    a, b = windows
    a.table.window_put(a.ep, 0, 4 << 20, [(16 << 20, 1)])
    b.wait(16 << 20, 1)
    a.table.window_put(a.ep, 0, 0, [(16 << 20, 2)])
    a.flush()
    a.close()
    time.sleep(0.3)
    with pytest.raises(PeerLostError):
        b.wait(16 << 20, 3, limit=5)
    assert b.word(16 << 20) == 2


def test_too_many_bytes_under_way_are_refused_and_later_taken():
    left, right = pairs(1, 4096)
    a, b = Mapped(left, part=4096), Mapped(right, peer=0, dialled=False)
    taken = 0
    while a.table.window_put(a.ep, 0, 4 << 20, [(1 << 20, taken + 1)]):
        taken += 1
        assert taken < 100
    b.wait(1 << 20, taken)
    assert a.until(a.table.window_put, 0, 4 << 20, [(1 << 20, taken + 1)])
    b.wait(1 << 20, taken + 1)
    a.flush()
    a.close()
    b.close()


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize(
    "change",
    [{0: 1}, {1: NBYTES + 1}, {2: NBYTES}, {4: 0}, {5: 9}, {6: 3}, {8: 4}, {8: NBYTES}, {3: 1 << 30}],
    ids=["magic", "nbytes", "at", "parts", "sequence", "n_words", "unaligned", "outside", "put"],
)
def test_frames_that_make_no_sense(change, bulk):
    left, right = pairs(1)
    b = Mapped(right, peer=0, dialled=False)
    start = [MAGIC, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    frame = [MAGIC, 10, 64, 0, 1, int(not bulk), 1, 0, 0, 5, 0, 0]
    for at, value in change.items():
        frame[at] = value
    left[CHANNELS].sendall(FRAME.pack(*start))
    left[CHANNELS + bulk].sendall(FRAME.pack(*frame) + bytes(10))
    with pytest.raises(TransportError, match=r"is no frame|cannot be") as caught:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            b.table.window_test(b.ep)
    assert not isinstance(caught.value, PeerLostError)
    with pytest.raises(TransportError):  # it stays
        b.table.window_put(b.ep, 0, 0, [(0, 1)])
    assert b.word(0) == 0
    b.close()
    for sock in left:
        sock.close()


def test_killed_peer_in_the_middle_of_a_transfer():
    left, right = pairs(4)

    def child():
        for sock in left:
            sock.close()
        b = Mapped(right, peer=0, dialled=False)
        b.wait(0, 3)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = in_child(child)
    for sock in right:
        sock.close()
    a = Mapped(left)
    n = 0
    with pytest.raises(PeerLostError, match="rank 1"):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if a.table.window_put(a.ep, 1 << 20, 4 << 20, [(0, min(n, 2) + 1)]):
                n += 1
            a.table.window_test(a.ep)
            a.table.ep_error(a.ep)
    started = time.monotonic()
    a.close()
    assert time.monotonic() - started < 2 and threads() == []
    assert wait_for(pid) == -signal.SIGKILL


def test_closing_while_the_peer_does_not_read():
    left, right = pairs(2, 4096)
    a = Mapped(left)
    assert a.table.window_put(a.ep, 0, 16 << 20, [(0, 1)])
    time.sleep(0.1)
    started = time.monotonic()
    a.close()
    assert time.monotonic() - started < 2 and threads() == []
    with pytest.raises(AbortedError):
        a.table.window_put(a.ep, 0, 8)
    for sock in right:
        sock.close()


def test_closing_in_a_forked_child_leaves_the_link_alone(windows):
    a, b = windows
    a.table.window_put(a.ep, 0, 1 << 20, [(1 << 20, 1)])
    b.wait(1 << 20, 1)

    def child():
        a.close()
        b.close()

    assert wait_for(in_child(child)) == 0
    a.table.window_put(a.ep, 0, 1 << 20, [(1 << 20, 2)])
    b.wait(1 << 20, 2)


def test_puts_that_cannot_be(windows):
    a, _ = windows
    for at, nbytes, words in ((NBYTES, 1, []), (0, NBYTES + 1, []), (0, 0, [(4, 1)]), (0, 0, [(NBYTES, 1)]),
                              (0, 0, [(0, 1)] * 3)):  # fmt: skip
        with pytest.raises(UsageError, match="were put into a window"):
            a.table.window_put(a.ep, at, nbytes, words)
    with pytest.raises(UsageError, match="a window of"):
        a.table.window(a.ep, 1 << 30)


def test_what_a_link_can_have():
    assert [link_sockets(n) for n in (0, 1, 8)] == [CHANNELS, CHANNELS + 3, CHANNELS + 17]
    counts = [n for n in range(100) if is_link(n)]
    assert counts == [link_sockets(n) for n in range(MOST_SOCKETS + 1)]
    with pytest.raises(ValueError, match=f"{CHANNELS} descriptors are needed.*{CHANNELS + 2} were given"):
        Streams(4096).open(1, range(1000, 1000 + CHANNELS + 2))


def test_data_goes_one_way_on_a_socket():
    """A sender and a receiver of one socket would hold each other up in the kernel."""
    left, right = pairs(3)
    sockets = [sock.dup() for sock in left[CHANNELS + 1 :]]
    a, b = Mapped(left), Mapped(right, peer=0, dialled=False)
    for turn in range(1, 5):
        for end in (a, b):
            end.table.window_put(end.ep, 1 << 20, 8 << 20, [(0, turn)])
        a.wait(0, turn)
        b.wait(0, turn)
    a.close()
    b.close()
    acked, received = zip(*(bytes_both_ways(sock) for sock in sockets), strict=True)
    assert sum(acked[:3]) >= 32 << 20 and sum(received[3:]) >= 32 << 20
    assert max(*received[:3], *acked[3:]) <= 1  # Linux counts SYN and FIN
    for sock in sockets:
        sock.close()


def test_a_link_without_bulk_sockets_has_no_window():
    left, right = socket_pairs("127.0.0.1")
    a = End(left)
    for call in (lambda: a.table.window(a.ep, 4096), lambda: a.table.window_put(a.ep, 0, 0)):
        with pytest.raises(UnsupportedError, match="without sockets"):
            call()
    a.close()
    for sock in right:
        sock.close()


def test_sleeper_is_woken_by_words(windows):
    a, b = windows
    timer = threading.Timer(0.2, lambda: a.table.window_put(a.ep, 0, 0, [(0, 1)]))
    timer.start()
    poller = select.poll()
    for fd, writable in b.table.wait_fds():
        poller.register(fd, select.POLLOUT if writable else select.POLLIN)
    assert poller.poll(5000)
    b.wait(0, 1)
    timer.join()


