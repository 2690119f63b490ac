# SPDX-License-Identifier: Apache-2.0
"""What a transport must do between processes of one host.

class TestTransport(TransportSuite):
    transport = "foo"
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from hetccl.errors import MismatchError, PeerLostError, TransportError
from hetccl.testing import oracle
from hetccl.testing.launch import run, run_results
from hetccl.testing.transport_peer import Peer
from hetccl.testing.usable import require_transport
from hetccl.types import DType

__all__ = ["TransportSuite"]

CHANNELS = 3


class TransportSuite:
    """Subclass it under a name that pytest collects and set `transport`."""

    transport: ClassVar[str]
    env: ClassVar[Mapping[str, str]] = {}  # for the ranks, e.g. the interface to use
    timeout: ClassVar[float] = 60.0  # seconds for the ranks of one test
    notices_death: ClassVar[bool] = True  # False: memory alone cannot tell; hetccl's control plane does

    def ranks(self, body: Any, n: int, *args: Any) -> list[Any]:
        """Runs `body(rank, size, transport, *args)` on `n` ranks, or skips if the transport is not usable here."""
        require_transport(self.transport)
        return run(body, n, self.timeout, self.env, (self.transport, *args))

    def test_messages_of_any_size_both_ways_at_once(self) -> None:
        assert self.ranks(sizes_body, 2) == [[], []]

    def test_channels_do_not_mix(self) -> None:
        assert self.ranks(channels_body, 2) == [[], []]

    def test_a_full_channel_does_not_hold_up_another(self) -> None:
        assert self.ranks(full_body, 2) == [[], []]

    def test_many_messages_keep_their_order(self) -> None:
        assert self.ranks(order_body, 2, 3000) == [[], []]

    def test_another_operation_is_a_mismatch(self) -> None:
        assert self.ranks(mismatch_body, 2) == [None, ["fingerprint", "length"]]

    def test_in_place(self) -> None:
        """With HETCCL_TRANSPORT_SLOTS: reserve, commit, peek, release, several at a time, wrapping round often."""
        assert self.ranks(slots_body, 2) == [[], []]

    def test_counters_count_payload(self) -> None:
        assert self.ranks(counters_body, 2) == [[], []]

    def test_a_sleeper_is_woken(self) -> None:
        """arm, sleep on the descriptors, be woken by a message; and arm refuses while something has arrived already."""
        slept, _ = self.ranks(sleep_body, 2)
        assert 0.2 < slept < 5

    def test_windows(self) -> None:
        """With HETCCL_TRANSPORT_WINDOW: what is written, and put where each rank has a copy, comes before its word."""
        assert self.ranks(window_body, 2) == [[], []]

    def test_two_links_and_three_ranks(self) -> None:
        assert self.ranks(mesh_body, 3) == [[]] * 3

    def test_a_killed_peer_is_noticed(self) -> None:
        """Within seconds. Where `notices_death` is False: nothing is received from it, and the link can be closed."""
        require_transport(self.transport)
        results = run_results(killed_body, 2, self.timeout, self.env, (self.transport, self.notices_death))
        assert results[1].returncode == -signal.SIGKILL
        assert results[0].error is None, results[0].traceback
        assert results[0].returncode == 0 and results[0].value < 5, f"it took {results[0].value:.1f} s"

    def test_a_closed_peer_is_noticed_after_its_last_message(self) -> None:
        assert self.ranks(closed_body, 2)[0] == []

    def test_a_stranger_is_refused_and_the_job_goes_on(self) -> None:
        assert self.ranks(stranger_body, 2) == [[], []]

    def test_nothing_is_left_open(self) -> None:
        for before, after in self.ranks(leftovers_body, 2):
            assert after == before


def sizes_body(rank: int, size: int, name: str) -> list[str]:
    wrong = []
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        most = peer.table.max_message
        for number, nbytes in enumerate((1, 2, 63, 64, 65, 4096, 65_537, 300_001, most - 1, most)):
            nbytes = min(nbytes, most)
            mine = oracle.moved(DType.UINT8, rank, nbytes, number)
            got = np.zeros(nbytes, np.uint8)
            peer.exchange(link, mine, got, fingerprint=number)
            if not np.array_equal(got, oracle.moved(DType.UINT8, 1 - rank, nbytes, number)):
                wrong.append(f"a message of {nbytes} bytes arrived changed at rank {rank}")
        peer.finish()
    return wrong


def channels_body(rank: int, size: int, name: str) -> list[str]:
    wrong = []
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        for channel in range(CHANNELS):  # sent in this order, received in the reverse one
            peer.send(link, oracle.moved(DType.UINT8, rank, 1000, channel), channel, 100 + channel)
        for channel in reversed(range(CHANNELS)):
            got = peer.recv(link, 1000, channel, 100 + channel)
            if not np.array_equal(got, oracle.moved(DType.UINT8, 1 - rank, 1000, channel)):
                wrong.append(f"channel {channel} brought another channel's message")
        peer.finish()
    return wrong


def full_body(rank: int, size: int, name: str) -> list[str]:
    """Rank 0 fills channel 0, which nobody reads; channel 2 must still work, and channel 0 later."""
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        block = oracle.moved(DType.UINT8, 7, min(peer.table.max_message, 256 << 10))
        sent = 0
        if rank == 0:
            stuck_since = None
            while sent < 4000:
                if peer.table.send(link, block, 0, sent):
                    sent, stuck_since = sent + 1, None
                else:
                    stuck_since = stuck_since or time.monotonic()
                    peer.table.progress(link)
                    if time.monotonic() - stuck_since > 0.3:
                        break
            peer.meeting.put("sent", str(sent).encode())
            if sent == 4000:
                return ["channel 0 never became full: it has no bound"]
            peer.send(link, np.arange(10, dtype=np.uint8), 2, 1)
            wrong = [] if peer.recv(link, 3, 2, 2).tobytes() == b"abc" else ["the answer on channel 2 is wrong"]
            peer.send(link, block, 0, sent)  # ends the one that was begun
        else:
            sent = int(peer.wait("sent"))
            got = peer.recv(link, 10, 2, 1)
            wrong = [] if got.tobytes() == bytes(range(10)) else ["channel 2 is wrong beside a full channel 0"]
            peer.send(link, np.frombuffer(b"abc", np.uint8), 2, 2)
            for number in range(sent + 1):
                if not np.array_equal(peer.recv(link, block.nbytes, 0, number), block):
                    wrong.append(f"message {number} of the full channel is wrong")
        peer.finish()
        return wrong


def order_body(rank: int, size: int, name: str, count: int) -> list[str]:
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        wrong = []
        if rank == 0:
            for number in range(count):
                peer.send(link, np.full(1 + number % 700, number % 251, np.uint8), 1, number)
        else:
            for number in range(count):
                got = peer.recv(link, 1 + number % 700, 1, number)
                if not (got == number % 251).all():
                    wrong.append(f"message {number} is wrong")
        peer.finish()
    return wrong


def mismatch_body(rank: int, size: int, name: str) -> list[str] | None:
    """The receiver expects another fingerprint, and on another channel another length."""
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        if rank == 0:
            peer.send(link, np.zeros(100, np.uint8), 0, 1)
            peer.send(link, np.zeros(100, np.uint8), 1, 1)
            peer.wait("seen")
            return None
        seen = []
        for what, channel, fingerprint, nbytes in (("fingerprint", 0, 2, 100), ("length", 1, 1, 60)):
            try:
                peer.recv(link, nbytes, channel, fingerprint)
            except MismatchError:
                seen.append(what)
        peer.meeting.put("seen", b"")
        return seen


def slots_body(rank: int, size: int, name: str) -> list[str]:
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        table, wrong = peer.table, []
        if not table.slots:
            peer.finish()
            return []
        nbytes = min(table.max_message, 128 << 10)
        if rank == 0:
            for number in range(0, 200, 2):
                both = [peer.until(lambda: table.reserve(link, 0, nbytes), "reserve", link) for _ in range(2)]
                for place, address in enumerate(both):
                    data = oracle.moved(DType.UINT8, 0, nbytes - number, number + place)
                    ctypes.memmove(address, data.ctypes.data, data.nbytes)
                for place in range(2):
                    table.commit(link, 0, nbytes - number, number + place)
        else:
            for number in range(0, 200, 2):
                for place in range(2):
                    look = partial(table.peek, link, 0, place, nbytes - number, number + place)
                    address, got = peer.until(look, "peek", link)
                    found = np.ctypeslib.as_array((ctypes.c_uint8 * got).from_address(address))
                    if address % 64 or not np.array_equal(found, oracle.moved(DType.UINT8, 0, got, number + place)):
                        wrong.append(f"slot {number + place} is wrong or not aligned to 64 bytes")
                table.release(link, 0)
                table.release(link, 0)
        peer.finish()
        return wrong


def counters_body(rank: int, size: int, name: str) -> list[str]:
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        for _ in range(5):
            peer.exchange(link, np.zeros(1001, np.uint8), np.zeros(1001, np.uint8), 3)
        peer.barrier("counted")
        want = {"bytes_sent": 5005, "bytes_received": 5005, "messages_sent": 5, "messages_received": 5}
        got = peer.table.counters(link)
        return [] if got == want else [f"counters are {got}"]


def sleep_body(rank: int, size: int, name: str) -> float:
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        peer.barrier("ready")
        if rank == 1:
            time.sleep(0.4)
            peer.send(link, np.zeros(10, np.uint8), 0, 1)
            peer.meeting.put("second", b"")
            peer.finish()
            return 0.0
        start, buffer = time.monotonic(), np.zeros(10, np.uint8)
        while not peer.table.recv(link, buffer, 0, 1):
            if peer.table.arm():
                poller = select.poll()
                for fd, writable in peer.table.wait_fds():
                    poller.register(fd, select.POLLOUT if writable else select.POLLIN)
                woken = poller.poll(10_000)
                assert woken, "slept for 10 s though a message came"
            peer.table.disarm()
            peer.table.progress(link)
        slept = time.monotonic() - start
        peer.finish()
        return slept


def mesh_body(rank: int, size: int, name: str) -> list[str]:
    with Peer(rank, size, name) as peer:
        wrong = []
        links = {(o, p): peer.connect(o, p) for o in range(size) if o != rank for p in ("collective", "p2p")}
        for (_, purpose), link in links.items():
            peer.send(link, np.frombuffer(f"{purpose} {rank}".encode(), np.uint8), 0, rank)
        for (other, purpose), link in links.items():
            want = f"{purpose} {other}".encode()
            if peer.recv(link, len(want), 0, other).tobytes() != want:
                wrong.append(f"the {purpose} link of {rank} with {other} brought something else")
        peer.finish()
    return wrong


def killed_body(rank: int, size: int, name: str, notices: bool) -> float:
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        peer.exchange(link, np.zeros(10, np.uint8), np.zeros(10, np.uint8), 1)
        peer.barrier("ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start, buffer = time.monotonic(), np.zeros(10, np.uint8)
        if notices:
            with pytest.raises(PeerLostError):
                peer.recv(link, 10, 0, 2, timeout=20)
            took = time.monotonic() - start
            with pytest.raises(PeerLostError):
                peer.table.ep_error(link)  # and it stays so
            return took
        while time.monotonic() < start + 1:
            assert not peer.table.recv(link, buffer, 0, 2), "received from a dead peer"
            peer.table.send(link, buffer, 1, 2)
            time.sleep(0.01)
        peer.close(link)
        return 0.0


def closed_body(rank: int, size: int, name: str) -> list[str]:
    with Peer(rank, size, name) as peer:
        link = peer.connect(1 - rank)
        if rank == 1:
            peer.send(link, np.arange(100, dtype=np.uint8), 0, 1)
            peer.wait("got")
            peer.close(link)
            peer.wait("done")
            return []
        wrong = [] if peer.recv(link, 100, 0, 1).tobytes() == bytes(range(100)) else ["the last message is wrong"]
        peer.meeting.put("got", b"")
        try:
            peer.recv(link, 1, 0, 2, timeout=10)
            wrong.append("received from a closed link")
        except PeerLostError:
            pass
        finally:
            peer.meeting.put("done", b"")
        return wrong


def window_body(rank: int, size: int, name: str) -> list[str]:
    """Both ranks fill slots of four and take the other's, 80 of sizes around every seam, both ways at once."""
    slot, sizes = 4 << 20, (1, 8, 65_536, 65_537, 300_001, 1 << 20, (1 << 20) + 1, 4 << 20)
    wrong: list[str] = []
    with Peer(rank, size, name) as peer:
        link, table = peer.connect(1 - rank), peer.table
        if not table.caps & (1 << 8):
            return wrong
        base, side, copies = table.window(link, 64 << 20)
        assert table.window(link, 64 << 20) == (base, side, copies)
        memory = np.ctypeslib.as_array(ctypes.cast(base, ctypes.POINTER(ctypes.c_uint8)), (64 << 20,))
        words = memory[:4096].view(np.uint64)
        sent, taken = side * 16, 64 + side * 16  # words; the other rank's with 1 - side
        theirs, their_taken = (1 - side) * 16, 64 + (1 - side) * 16
        assert not memory[: 1 << 20].any() or copies is False
        peer.barrier("mapped")

        def tell(at: int, nbytes: int, word: int, value: int) -> None:
            if copies:
                peer.until(lambda: table.window_put(link, at, nbytes, [(word * 8, value)]) or None, "put", link)
            words[word] = value

        given = got = 0
        deadline = time.monotonic() + 40
        while given < 80 or got < 80:
            if copies:
                table.window_test(link)
            if given < 80 and given - int(words[taken]) < 4:
                nbytes = sizes[given % 8]
                at = (8 << 20) + (side * 4 + given % 4) * slot
                memory[at : at + nbytes] = oracle.moved(DType.UINT8, rank, nbytes, given)
                tell(at, nbytes, sent, given + 1)
                given += 1
            if got < int(words[theirs]):
                nbytes = sizes[got % 8]
                at = (8 << 20) + ((1 - side) * 4 + got % 4) * slot
                if not np.array_equal(memory[at : at + nbytes], oracle.moved(DType.UINT8, 1 - rank, nbytes, got)):
                    wrong.append(f"what was put as number {got}, {nbytes} bytes, is not what lies there")
                got += 1
                tell(0, 0, their_taken, got)
            assert time.monotonic() < deadline, f"{given} given, {got} got, {int(words[taken])} taken after 40 s"
            time.sleep(0)
        while copies and not table.window_test(link):
            assert time.monotonic() < deadline, "what was put does not leave"
        peer.finish()
    return wrong


def stranger_body(rank: int, size: int, name: str) -> list[str]:
    """Rank 1 first dials with another secret; then a rightful dial must still work."""
    wrong = []
    with Peer(rank, size, name) as peer:
        if rank == 0:
            link = peer.connect(1)  # its accept thread refuses the stranger and takes the second
        else:
            with Peer(rank, size, name, secret=b"x" * 32, listen=False) as stranger:
                try:
                    stranger.transport.dial(0, peer.address_of(0), "collective", 5.0)
                    wrong.append("a stranger with another secret was let in")
                except TransportError:
                    pass
            link = peer.connect(0)
        got = np.zeros(10, np.uint8)
        peer.exchange(link, np.full(10, rank, np.uint8), got, 1)
        if not (got == 1 - rank).all():
            wrong.append("the rightful link is wrong")
        peer.finish()
    return wrong


def leftovers_body(rank: int, size: int, name: str) -> tuple[Any, Any]:
    def one(turn: str) -> None:
        with Peer(rank, size, name, turn=turn) as peer:
            link = peer.connect(1 - rank)
            peer.exchange(link, np.zeros(10, np.uint8), np.zeros(10, np.uint8), 1)
            peer.finish()
        peer.transport.close()  # a second time: nothing happens

    one("first")  # whatever is opened once a process
    before = _open_things()
    one("second")
    deadline = time.monotonic() + 5
    while _open_things() != before and time.monotonic() < deadline:
        time.sleep(0.05)  # threads of the transport may take a moment to end
    return before, _open_things()


def _open_things() -> tuple[int, int, list[str]]:
    """Descriptors, threads and files in /dev/shm that are this user's and bear our name."""
    shm = sorted(f for f in os.listdir("/dev/shm") if "hetccl" in f)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), shm
