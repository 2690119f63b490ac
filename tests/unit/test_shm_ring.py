# SPDX-License-Identifier: Apache-2.0
"""The rings of the shared-memory transport, both ends in this process."""

import ctypes
import mmap
import os
import random
import select
import struct

import pytest

from hetccl.errors import HetcclError, MismatchError, PeerLostError, TransportError
from hetccl.native import fdpass
from hetccl.tables import TransportTable
from hetccl.transports.shm._shm import INLINE_BYTES, Rings

CONTRIBUTE, RESULT, P2P = range(3)
SLOTS, SLOT = 4, 4096


class End:
    """One rank's end of a link inside this process."""

    def __init__(self, rings, endpoint, doorbell):
        self.rings, self.ep, self.doorbell = rings, endpoint, doorbell
        self.table = TransportTable(rings.table())

    def put(self, data, channel=CONTRIBUTE, fingerprint=1):
        return self.table.send(self.ep, data, channel, fingerprint)

    def get(self, nbytes, channel=CONTRIBUTE, fingerprint=1):
        data = bytearray(nbytes)
        return bytes(data) if self.table.recv(self.ep, data, channel, fingerprint) else None

    def look(self, channel=CONTRIBUTE, index=0):
        found = self.table.peek(self.ep, channel, index)
        return None if found is None else ctypes.string_at(*found)

    def take(self, channel=CONTRIBUTE):
        data = self.look(channel)
        if data is not None:
            self.table.release(self.ep, channel)
        return data

    def answer(self, change, nbytes=None):
        """Rewrites the oldest contribution and hands it back. False: no room."""
        address, length = self.table.peek(self.ep, CONTRIBUTE, 0)
        data = change(ctypes.string_at(address, length))
        ctypes.memmove(address, data, len(data))
        return self.table.answer(self.ep, len(data) if nbytes is None else nbytes, 1)

    def rings_at(self, timeout):
        return bool(select.select([self.doorbell], [], [], timeout)[0])


@pytest.fixture
def ends():
    """Two ends in this process, and the memory between them as `memory`."""
    before = open_fds()
    bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
    rings = [Rings(rank, SLOTS, SLOT, bells[rank]) for rank in range(2)]
    region = fdpass.create_region(rings[0].region_bytes, "test")
    pair = [End(rings[r], rings[r].attach(1 - r, r == 0, region, os.dup(bells[1 - r])), bells[r]) for r in range(2)]
    pair[0].memory = mmap.mmap(region, 0)
    os.close(region)
    yield pair
    pair[0].memory.close()
    for end in pair:
        end.rings.close()
        end.rings.close()
        os.close(end.doorbell)
    assert open_fds() == before
    assert "memfd:hetccl-shm" not in maps()


def test_every_size_on_every_channel(ends):
    a, b = ends
    data = os.urandom(SLOT)
    for nbytes in range(SLOT + 1):
        channel = nbytes % 3
        for x, y in ((a, b), (b, a)):
            assert x.put(data[:nbytes], channel, nbytes)
            assert y.get(nbytes, channel, nbytes) == data[:nbytes]


def test_a_message_longer_than_a_slot_is_refused(ends):
    a, b = ends
    assert a.table.max_message == SLOT
    with pytest.raises(HetcclError, match=r"4097 bytes.*4096"):
        a.put(bytes(SLOT + 1))
    with pytest.raises(HetcclError, match="4097"):
        a.table.reserve(a.ep, 0, SLOT + 1)
    assert a.put(b"after") and b.take() == b"after"


def test_a_channel_that_does_not_exist(ends):
    for channel in (3, -1):
        with pytest.raises(HetcclError, match=f"channel {channel} does not exist"):
            ends[0].put(b"x", channel)
        with pytest.raises(HetcclError, match=f"channel {channel} does not exist"):
            ends[0].table.release(ends[0].ep, channel)


def test_another_fingerprint_or_length_is_a_mismatch_and_stays(ends):
    a, b = ends
    a.put(b"1234", fingerprint=0xAB)
    with pytest.raises(
        MismatchError, match=r"4 bytes with fingerprint 0xac.*rank 0 sent 4 bytes with fingerprint 0xab"
    ):
        b.get(4, fingerprint=0xAC)
    with pytest.raises(MismatchError, match=r"expected 5 bytes.*sent 4 bytes"):
        b.get(5, fingerprint=0xAB)
    with pytest.raises(MismatchError):
        b.table.peek(b.ep, CONTRIBUTE, 0, 4, 0xAC)
    assert b.table.peek(b.ep, CONTRIBUTE, 0, 4, 0xAB) is not None
    assert b.get(4, fingerprint=0xAB) == b"1234"


def test_a_full_channel_does_not_block_another(ends):
    a, b = ends
    for i in range(SLOTS):
        assert a.put(b"%d" % i)
    assert not a.put(b"more")
    assert a.table.reserve(a.ep, CONTRIBUTE, 1) is None
    assert a.put(b"other", RESULT) and b.take(RESULT) == b"other"
    assert b.take() == b"0" and a.put(b"more")
    assert [b.take() for _ in range(SLOTS + 1)] == [b"1", b"2", b"3", b"more", None]


@pytest.mark.parametrize("nbytes", [1, INLINE_BYTES, INLINE_BYTES + 1, SLOT])
def test_many_reserved_before_the_first_commit(ends, nbytes):
    a, b = ends
    for base in range(0, 40, SLOTS):
        places = [a.table.reserve(a.ep, CONTRIBUTE, nbytes) for _ in range(SLOTS)]
        assert None not in places and len(set(places)) == SLOTS
        assert a.table.reserve(a.ep, CONTRIBUTE, nbytes) is None
        for i, place in reversed(list(enumerate(places))):
            ctypes.memset(place, base + i, nbytes)
            assert b.look() is None
        with pytest.raises(HetcclError, match="4 reserved messages wait for commit"):
            a.put(b"x")
        for i in range(SLOTS):
            a.table.commit(a.ep, CONTRIBUTE, nbytes)
            assert b.look(index=i) == bytes([base + i]) * nbytes
            assert b.look(index=i + 1) is None
        for i in range(SLOTS):
            assert b.take() == bytes([base + i]) * nbytes


def test_a_commit_may_be_shorter_than_its_reserve_not_longer(ends):
    a, b = ends
    place = a.table.reserve(a.ep, CONTRIBUTE, 100)
    ctypes.memmove(place, b"abcdef", 6)
    with pytest.raises(HetcclError, match="101 bytes; 100 were reserved"):
        a.table.commit(a.ep, CONTRIBUTE, 101)
    a.table.commit(a.ep, CONTRIBUTE, 3)
    assert b.take() == b"abc"
    with pytest.raises(HetcclError, match="without a reserve"):
        a.table.commit(a.ep, CONTRIBUTE, 0)


def test_release_of_nothing(ends):
    with pytest.raises(HetcclError, match="no message has arrived"):
        ends[0].table.release(ends[0].ep, CONTRIBUTE)


def test_counters_count_payload(ends):
    a, b = ends
    for nbytes in (0, 10, 1000):
        a.put(bytes(nbytes))
        b.take()
    a.put(bytes(500))
    b.answer(lambda data: data)
    a.take(RESULT)
    sent, got = a.table.counters(a.ep), b.table.counters(b.ep)
    assert (sent["bytes_sent"], sent["messages_sent"]) == (1510, 4) == (got["bytes_received"], got["messages_received"])
    assert (got["bytes_sent"], got["messages_sent"]) == (500, 1) == (sent["bytes_received"], sent["messages_received"])


@pytest.mark.parametrize("nbytes", [0, 4, INLINE_BYTES, INLINE_BYTES + 1, SLOT])
def test_an_answer_comes_back_in_its_slot(ends, nbytes):
    a, b = ends
    for i in range(5 * SLOTS):
        data = bytes([i]) * nbytes
        assert a.put(data)
        assert b.answer(lambda data: bytes(255 - x for x in data))
        assert b.look() is None
        assert a.get(nbytes, RESULT) == bytes([255 - i]) * nbytes


def test_a_slot_with_an_answer_is_not_reused_before_its_release(ends):
    a, b = ends
    for round_ in range(3):
        for i in range(SLOTS):
            assert a.put(bytes([10 * round_ + i]) * 100)
        for _ in range(SLOTS):
            assert b.answer(lambda data: bytes(x + 100 for x in data))
        assert not a.put(bytes(100))  # credit has come, but the answers still lie there
        for i in range(SLOTS):
            assert a.look(RESULT) == bytes([10 * round_ + i + 100]) * 100
            a.table.release(a.ep, RESULT)
            if round_ == 1:
                assert a.put(b"%d" % i * 60)
        for i in range(SLOTS if round_ == 1 else 0):
            assert b.take() == b"%d" % i * 60


def test_an_answer_needs_a_contribution_and_room(ends):
    a, b = ends
    with pytest.raises(HetcclError, match="no contribution"):
        b.table.answer(b.ep, 0)
    a.put(bytes(100))
    with pytest.raises(HetcclError, match="101 bytes to a contribution of 100"):
        b.table.answer(b.ep, 101)
    for _ in range(SLOTS):
        assert b.put(b"result", RESULT)
    assert not b.answer(lambda data: b"y" * 100)
    assert a.take(RESULT) == b"result"
    assert b.answer(lambda data: b"y" * 100)
    assert [a.take(RESULT) for _ in range(SLOTS)] == [b"result"] * (SLOTS - 1) + [b"y" * 100]


def test_random_use_against_a_model(ends):
    """Thousands of random steps; queues in Python say what must come out. The seed is in the failure's output."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    queues = {(x, c): [] for x in (0, 1) for c in range(3)}  # messages on their way to end 1 - x
    for _ in range(20000):
        x, channel = rng.randrange(2), rng.randrange(3)
        end, incoming = ends[x], queues[1 - x, channel]
        nbytes = rng.choice([0, 1, INLINE_BYTES, INLINE_BYTES + 1, 300, SLOT])
        action = rng.randrange(4)
        if action == 0:
            data = rng.randbytes(nbytes)
            if end.put(data, channel):
                queues[x, channel].append(data)
        elif action == 1:
            assert end.take(channel) == (incoming.pop(0) if incoming else None)
        elif action == 2 and incoming:
            index = rng.randrange(len(incoming))
            assert end.look(channel, index) == incoming[index]
            assert end.look(channel, len(incoming)) is None
        elif action == 3 and channel == CONTRIBUTE and incoming:
            data = bytes(255 - y for y in incoming[0])
            if end.answer(lambda _, data=data: data):
                incoming.pop(0)
                queues[x, RESULT].append(data)
            else:
                incoming[0] = data


def test_a_corrupt_length_is_refused_for_good(ends):
    a, b = ends
    a.put(bytes(100))
    poke(a.memory, struct.pack("<I", 100) + struct.pack("<I", 1), struct.pack("<I", SLOT + 1))
    with pytest.raises(HetcclError, match="damaged: length of a message is 4097, at most 4096"):
        b.get(100)
    for use in (lambda: b.get(100), lambda: b.put(b"x"), lambda: b.table.ep_error(b.ep)):
        with pytest.raises(HetcclError, match="damaged"):
            use()


def test_a_corrupt_length_beside_the_header_is_refused(ends):
    a, b = ends
    a.put(bytes(48), fingerprint=77)
    poke(a.memory, struct.pack("<II", 48, 77), struct.pack("<I", 49))
    with pytest.raises(HetcclError, match="49, at most 48"):
        b.look()


def test_a_corrupt_credit_is_refused(ends):
    a, b = ends
    for _ in range(SLOTS):
        a.put(b"x")
    b.take()
    assert a.put(b"x") and not a.put(b"x")
    poke(a.memory, struct.pack("<I", 1), struct.pack("<I", 1000), start=384, stop=384 + 6 * 128)
    with pytest.raises(HetcclError, match="damaged: number of released slots is 999, at most 4"):
        a.put(b"x")


def test_a_foreign_region_is_refused():
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    rings = Rings(0, SLOTS, SLOT, bell)
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, rings.region_bytes)
    small = fdpass.create_region(4096, "small")
    empty = fdpass.create_region(rings.region_bytes, "empty")
    with pytest.raises(TransportError, match="not sealed"):
        rings.attach(1, False, plain, -1)
    with pytest.raises(TransportError, match="4096 bytes"):
        rings.attach(1, False, small, -1)
    with pytest.raises(TransportError, match="laid out differently"):
        rings.attach(1, False, empty, -1)
    with pytest.raises(TransportError, match="memory file"):
        rings.attach(1, False, bell, -1)
    fdpass.close_all([plain, small, empty, bell])
    rings.close()


def test_what_was_sent_before_a_close_still_arrives(ends):
    a, b = ends
    a.put(b"last")
    a.table.ep_close(a.ep)
    a.table.ep_close(a.ep)
    b.table.ep_error(b.ep)  # not lost while something is unread
    assert b.take() == b"last"
    with pytest.raises(PeerLostError, match="rank 0 has closed"):
        b.take()
    with pytest.raises(PeerLostError):
        b.table.ep_error(b.ep)
    with pytest.raises(PeerLostError):
        b.put(b"x")
    with pytest.raises(HetcclError, match="closed on this side"):
        a.put(b"x")


def test_close_is_told_to_a_sender_without_room(ends):
    a, b = ends
    for _ in range(SLOTS):
        a.put(b"x")
    b.table.ep_close(b.ep)
    with pytest.raises(PeerLostError):
        a.put(b"x")


def test_the_table_outlives_the_rings(ends):
    a, _ = ends
    a.rings.close()
    with pytest.raises(HetcclError, match="closed on this side"):
        a.put(b"x")
    assert a.table.arm()
    a.table.counters(a.ep)


def test_arm_tells_once_what_came_before_it(ends):
    a, b = ends
    assert b.table.arm()
    b.table.disarm()
    a.put(b"x")
    assert not b.table.arm()
    assert b.table.arm()  # it was told; nothing more came
    b.table.disarm()
    a.put(b"y")
    assert not b.table.arm()
    assert b.take() == b"x" and b.take() == b"y"
    assert b.table.arm()
    assert not b.rings_at(0)


def test_arm_tells_of_later_messages_behind_one_that_was_seen(ends):
    a, b = ends
    a.put(b"0")
    assert b.look() == b"0" and b.look(index=2) is None
    assert b.table.arm()
    b.table.disarm()
    a.put(b"1")
    assert not b.table.arm() and b.look(index=2) is None
    a.put(b"2")
    assert not b.table.arm() and b.look(index=2) == b"2"


def test_a_sleeper_is_rung_once(ends):
    a, b = ends
    assert b.table.wait_fds() == [(b.doorbell, False)]
    assert b.table.arm()
    for _ in range(3):
        a.put(b"x")
    assert b.rings_at(0)
    assert os.read(b.doorbell, 8) == struct.pack("=Q", 1)
    b.table.disarm()
    a.put(b"x")
    assert not b.rings_at(0.01)


def test_release_wakes_a_sender_without_room(ends):
    a, b = ends
    for _ in range(SLOTS):
        a.put(b"x")
    assert not a.put(b"y")
    b.take()
    assert not a.table.arm()  # room came meanwhile
    assert a.put(b"y") and not a.put(b"z")
    assert a.table.arm()
    b.take()
    assert a.rings_at(0)
    a.table.disarm()
    assert a.put(b"z") and not a.rings_at(0)


def test_close_wakes_a_sleeper(ends):
    a, b = ends
    assert b.table.arm()
    a.table.ep_close(a.ep)
    assert b.rings_at(0)
    b.table.disarm()
    assert not b.table.arm()


# ---------------------------------------------------------------------------------------------------- helpers


def open_fds():
    return sorted(os.listdir("/proc/self/fd"))


def maps():
    with open("/proc/self/maps") as file:
        return file.read()


def poke(memory, pattern, value, start=0, stop=None):
    """Overwrites the first place where the shared memory holds `pattern`, as a broken peer would."""
    at = memory.find(pattern, start, len(memory) if stop is None else stop)
    assert at >= 0
    memory[at : at + len(value)] = value
