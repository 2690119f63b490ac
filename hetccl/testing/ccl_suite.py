# SPDX-License-Identifier: Apache-2.0
"""What a vendor's collective library must do inside one island, with one process a rank.

class TestCcl(CclSuite):
    vendor = "foo"
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from hetccl.core import registry
from hetccl.errors import HetcclError, PeerLostError, UnsupportedError
from hetccl.tables import CclTable, DeviceTable
from hetccl.testing import oracle
from hetccl.testing.launch import run
from hetccl.testing.meeting import Meeting
from hetccl.testing.usable import require_vendor
from hetccl.types import DType, RedOp
from hetccl.vendors.base import Vendor, VendorRequest

__all__ = ["CclSuite"]

BLOCKING, ABORT, MULTI_COMM, IN_PLACE = 1 << 0, 1 << 1, 1 << 4, 1 << 6
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
MOVING = ("broadcast", "all_gather", "all_to_all")


class CclSuite:
    """Subclass it under a name that pytest collects and set `vendor`."""

    vendor: ClassVar[str]
    env: ClassVar[Mapping[str, str]] = {}  # for the ranks
    timeout: ClassVar[float] = 100.0  # seconds for the ranks of one test

    def ranks(self, body: Any, n: int, *args: Any) -> list[Any]:
        """Runs `body(rank, size, vendor, *args)` on `n` ranks, or skips if the vendor is not usable here."""
        require_vendor(self.vendor)
        return run(body, n, self.timeout, self.env, (self.vendor, *args))

    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("op", REDUCING)
    def test_reduces_exactly(self, op: str, size: int) -> None:
        """Every type and operator of reduce_mask, bit for bit; inputs stay untouched."""
        wrong = self.ranks(reduce_body, size, op, (1, 7, 1000) if size < 4 else (33,))
        assert wrong == [[]] * size

    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("op", MOVING)
    def test_moves_any_bits(self, op: str, size: int) -> None:
        """Every type of move_mask, every root."""
        wrong = self.ranks(move_body, size, op, (1, 7, 1000) if size < 4 else (33,))
        assert wrong == [[]] * size

    def test_large_buffers(self) -> None:
        assert self.ranks(large_body, 2, 1_300_003) == [[]] * 2

    @pytest.mark.parametrize("size", [2, 3])
    def test_send_and_receive(self, size: int) -> None:
        """Rank 0 exchanges messages with each other rank; a message has its sender's bytes, in order."""
        assert self.ranks(send_body, size) == [[]] * size

    def test_in_place(self) -> None:
        """With HETCCL_CCL_IN_PLACE: NCCL's in-place forms."""
        assert self.ranks(in_place_body, 2) == [[]] * 2

    def test_says_what_it_cannot_do(self) -> None:
        """A pair outside reduce_mask is refused as unsupported, or right all the same; the communicator lives on."""
        assert self.ranks(unsupported_body, 2) == [[]] * 2

    def test_communicators_one_after_another(self) -> None:
        assert self.ranks(again_body, 2) == [[]] * 2

    def test_two_communicators_at_once(self) -> None:
        """With HETCCL_CCL_MULTI_COMM: calls on both, in the same order, do not mix."""
        assert self.ranks(two_comms_body, 2) == [[]] * 2

    def test_a_missing_rank_ends_init_in_time(self) -> None:
        """One of two ranks never comes: init raises within its timeout and some seconds."""
        kinds = self.ranks(missing_body, 1)
        assert kinds[0] in ("TimedOutError", "VendorError"), kinds

    def test_init_asks_whether_to_go_on(self) -> None:
        """One of two ranks never comes: what the core's check raises ends init, long before its timeout."""
        kinds = self.ranks(vain_body, 1)
        assert kinds[0] == "PeerLostError", kinds

    def test_abort_frees_a_waiting_rank(self) -> None:
        """With HETCCL_CCL_ABORT: a call whose partner never comes returns with an error after abort()."""
        assert all(self.ranks(abort_body, 2))


class Island:
    """This rank's side of one vendor communicator, with helpers that fit host and device memory."""

    def __init__(self, rank: int, size: int, vendor: str, name: str = "0", timeout: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self.opened = open_vendor(vendor)
        self.device, self.ccl = DeviceTable(self.opened.device_table), CclTable(self.opened.ccl_table)
        self.device.bind_thread()
        meeting = Meeting()
        if rank == 0:
            meeting.put(f"id{name}", self.opened.new_id())
        self.comm = self.opened.create_comm(rank, size, meeting.get(f"id{name}", timeout), timeout)
        self.stream = 0 if self.ccl.blocking else self.device.stream_create()

    def call(
        self, op: str, sent: Any, received_bytes: int, count: int, dtype: DType, redop: RedOp = RedOp.SUM, peer: int = 0
    ) -> tuple[Any, Any]:
        """Runs a collective out of place; returns the receive and the send buffer as they are afterwards, as bytes."""
        send, recv = self.device.alloc(max(sent.nbytes, 1)), self.device.alloc(max(received_bytes, 1))
        try:
            self.device.copy(send, sent.ctypes.data, sent.nbytes, self.stream)
            self.device.memset(recv, 0xA5, received_bytes, self.stream)
            self.device.stream_sync(self.stream)
            self.ccl.call(op, self.comm, send, recv, count, dtype, redop, peer, self.stream)
            return self.read(recv, received_bytes), self.read(send, sent.nbytes)
        finally:
            self.device.free(send)
            self.device.free(recv)

    def read(self, ptr: int, nbytes: int) -> bytes:
        back = np.zeros(max(nbytes, 1), np.uint8)
        self.device.copy(back.ctypes.data, ptr, nbytes, self.stream)
        self.device.stream_sync(self.stream)
        return back[:nbytes].tobytes()

    def check(self, op: str, dtype: DType, redop: RedOp, count: int, root: int = 0) -> list[str]:
        """Runs `op` with the oracle's data; returns what was wrong."""
        sent = oracle.call_input(op, dtype, redop, self.rank, self.size, count, root)
        want = oracle.call_output(op, dtype, redop, self.rank, self.size, count, root)
        received = want.nbytes if want is not None else sent.nbytes
        what = f"{op} {dtype.label} {redop.label if op in REDUCING else ''} count {count} root {root} rank {self.rank}"
        try:
            got, left = self.call(op, sent, received, count, dtype, redop, root)
        except HetcclError as error:
            return [f"{what}: {type(error).__name__}: {error}"]
        wrong = []
        if want is not None and got != want.tobytes():
            elements = np.frombuffer(got, want.dtype)
            first = (
                int(
                    np.flatnonzero(
                        elements.view(np.uint8).reshape(len(want), -1) != want.view(np.uint8).reshape(len(want), -1)
                    )[0]
                )
                // want.itemsize
            )
            wrong.append(
                f"{what}: element {first} is {oracle.decode(elements, dtype)[first]}, "
                f"not {oracle.decode(want, dtype)[first]}"
            )
        if left != sent.tobytes():
            wrong.append(f"{what}: the input was changed")
        return wrong

    def close(self) -> None:
        self.ccl.destroy(self.comm)
        if self.stream:
            self.device.stream_destroy(self.stream)


def open_vendor(name: str) -> Vendor:
    """The vendor, opened for this rank."""
    found = registry.vendor(name)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    return found.driver.open(VendorRequest(found.variant, index, host_id=socket.gethostname(), interface="lo"))


def reduce_body(rank: int, size: int, vendor: str, op: str, counts: tuple[int, ...]) -> list[str]:
    island, wrong, done = Island(rank, size, vendor), [], 0
    for dtype in DType:
        for redop in oracle.reducible(dtype):
            if not island.ccl.reduces(dtype, redop):
                continue
            for count in counts:
                wrong += island.check(op, dtype, redop, count, root=size - 1)
                done += 1
    island.close()
    return wrong if done else ["reduce_mask is empty: no type can be reduced"]


def move_body(rank: int, size: int, vendor: str, op: str, counts: tuple[int, ...]) -> list[str]:
    island, wrong, done = Island(rank, size, vendor), [], 0
    for dtype in DType:
        if not island.ccl.moves(dtype):
            continue
        for count in counts:
            for root in range(size) if op == "broadcast" else (0,):
                wrong += island.check(op, dtype, RedOp.SUM, count, root)
                done += 1
    island.close()
    return wrong if done else ["move_mask is empty: no type can be moved"]


def large_body(rank: int, size: int, vendor: str, count: int) -> list[str]:
    island = Island(rank, size, vendor)
    wrong = [w for op in (*REDUCING, *MOVING) for w in island.check(op, DType.FLOAT32, RedOp.SUM, count)]
    island.close()
    return wrong


def send_body(rank: int, size: int, vendor: str) -> list[str]:
    island, wrong = Island(rank, size, vendor), []
    for peer in range(1, size):
        for number, nbytes in enumerate((1, 1000, 300_000)):
            for source, target in ((0, peer), (peer, 0)):
                message = oracle.moved(DType.UINT8, source, nbytes, salt=number)
                if rank == source:
                    island.call("send", message, 0, nbytes, DType.UINT8, peer=target)
                elif rank == target:
                    got, _ = island.call("recv", np.zeros(0, np.uint8), nbytes, nbytes, DType.UINT8, peer=source)
                    if got != message.tobytes():
                        wrong.append(f"rank {target} received other bytes than rank {source} sent ({nbytes} bytes)")
    island.close()
    return wrong


def in_place_body(rank: int, size: int, vendor: str) -> list[str]:
    island, wrong, count = Island(rank, size, vendor), [], 999
    if island.ccl.caps & IN_PLACE:
        for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            sent = oracle.call_input(op, DType.FLOAT32, RedOp.SUM, rank, size, count)
            want = oracle.call_output(op, DType.FLOAT32, RedOp.SUM, rank, size, count)
            assert want is not None
            room = max(sent.nbytes, want.nbytes)
            block = island.device.alloc(room)
            # Where the smaller of the two buffers lies within the larger: the rank's own part of it.
            send = block + (rank * count * 4 if op == "all_gather" else 0)
            recv = block + (rank * count * 4 if op == "reduce_scatter" else 0)
            island.device.copy(send, sent.ctypes.data, sent.nbytes, island.stream)
            island.device.stream_sync(island.stream)
            island.ccl.call(op, island.comm, send, recv, count, DType.FLOAT32, RedOp.SUM, 0, island.stream)
            if island.read(recv, want.nbytes) != want.tobytes():
                wrong.append(f"{op} in place on rank {rank} is wrong")
            island.device.free(block)
    island.close()
    return wrong


def unsupported_body(rank: int, size: int, vendor: str) -> list[str]:
    island, wrong = Island(rank, size, vendor), []
    for dtype in DType:
        refused = [redop for redop in oracle.reducible(dtype) if not island.ccl.reduces(dtype, redop)]
        for redop in refused[:1]:
            sent, want = oracle.data(dtype, redop, rank, size, 4), oracle.expected(dtype, redop, size, 4)
            try:
                got, _ = island.call("all_reduce", sent, sent.nbytes, 4, dtype, redop)
                if got != want.tobytes():
                    wrong.append(f"{dtype.label} {redop.label} is not in reduce_mask, but went through and is wrong")
            except UnsupportedError:
                pass
    usable = next(d for d in (DType.FLOAT32, *DType) if island.ccl.reduces(d, RedOp.SUM))
    wrong += island.check("all_reduce", usable, RedOp.SUM, 10)
    island.close()
    return wrong


def again_body(rank: int, size: int, vendor: str) -> list[str]:
    wrong = []
    for name in "abc":
        island = Island(rank, size, vendor, name)
        wrong += island.check("all_reduce", DType.FLOAT32, RedOp.SUM, 100)
        island.close()
    return wrong


def two_comms_body(rank: int, size: int, vendor: str) -> list[str]:
    first = Island(rank, size, vendor, "a")
    if not first.ccl.caps & MULTI_COMM:
        first.close()
        return []
    second = Island(rank, size, vendor, "b")
    wrong = []
    for count in (5, 50, 5000):
        wrong += first.check("all_reduce", DType.FLOAT32, RedOp.SUM, count)
        wrong += second.check("all_gather", DType.FLOAT32, RedOp.SUM, count)
        wrong += second.check("all_reduce", DType.INT32, RedOp.MAX, count)
    second.close()
    wrong += first.check("all_reduce", DType.FLOAT32, RedOp.SUM, 7)
    first.close()
    return wrong


def missing_body(rank: int, size: int, vendor: str) -> str:
    return alone(vendor, 3.0, lambda: None)


def vain_body(rank: int, size: int, vendor: str) -> str:
    def check() -> None:
        raise PeerLostError("rank 1 has died", ranks=(1,))

    return alone(vendor, 60.0, check)


def alone(vendor: str, timeout: float, check: Callable[[], None]) -> str:
    """What ends the wait for a second rank that never comes."""
    opened = open_vendor(vendor)
    start = time.monotonic()
    try:
        opened.create_comm(0, 2, opened.new_id(), timeout, check)
    except HetcclError as error:
        kind = type(error).__name__
    else:
        kind = "no error"
    took = time.monotonic() - start
    return kind if took < 15 else f"{kind} after {took:.0f} s"


def abort_body(rank: int, size: int, vendor: str) -> bool:
    island, meeting = Island(rank, size, vendor), Meeting()
    if island.ccl.caps & ABORT and rank == 0:
        timer = threading.Timer(0.5, island.ccl.abort, (island.comm,))
        timer.start()
        start = time.monotonic()
        try:
            island.call("all_reduce", np.zeros(10, np.float32), 40, 10, DType.FLOAT32)
            island.ccl.async_error(island.comm)
            raised = False
        except HetcclError:
            raised = True
        timer.join()
        meeting.put("aborted", b"1")
        return raised and time.monotonic() - start < 20
    if island.ccl.caps & ABORT:
        meeting.get("aborted", 40)
    else:
        island.close()
    return True
