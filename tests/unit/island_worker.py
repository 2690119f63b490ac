# SPDX-License-Identifier: Apache-2.0
"""One rank of test_island.py: `python island_worker.py CASE ID RANK SIZE SHARERS THREADS`, where
THREADS is "3,1" if even ranks have three and odd ones one.

Prints one line of JSON; exits 1 on a wrong result.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable

import numpy as np

from hetccl.errors import AbortedError, ClosedError, MismatchError, TimedOutError, UnsupportedError, UsageError
from hetccl.native.island import Island
from hetccl.types import DType, RedOp

COUNTS = (0, 1, 7, 1024, 1000003)
F32 = DType.FLOAT32
GUARD = 64  # elements on either side of an output, which nobody may touch
MARK = 77


class Rank:
    """This rank's island, and the oracle: what every rank puts in can be computed by all."""

    def __init__(self, island: Island) -> None:
        self.island, self.rank, self.size = island, island.rank, island.size

    def inputs(self, count: int, dtype: DType, seed: int) -> list[np.ndarray]:
        """Of all ranks. Small whole numbers, so that every sum is exact."""
        return [((np.arange(count) * (seed + 3) + r * 5 + seed) % 11).astype(dtype.label) for r in range(self.size)]

    def buffer(self, values: np.ndarray, count: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
        """A buffer of `count` elements that begins with `values`, `shift` bytes off its alignment, between guards."""
        item = values.itemsize
        raw = np.full((count + 2 * GUARD) * item + 16, MARK, np.uint8)
        inner = raw[GUARD * item + shift : (GUARD + count) * item + shift]
        inner[: values.nbytes] = np.frombuffer(values.tobytes(), np.uint8)
        return raw, inner

    def expect(self, what: object, raw: np.ndarray, inner: np.ndarray, expected: np.ndarray) -> None:
        found = np.frombuffer(inner.tobytes(), expected.dtype)
        if not np.array_equal(found, expected):
            at = int(np.flatnonzero(found != expected)[0])
            raise AssertionError(f"rank {self.rank}: {what}: element {at} is {found[at]}, not {expected[at]}")
        begin = inner.ctypes.data - raw.ctypes.data
        if (raw[:begin] != MARK).any() or (raw[begin + inner.nbytes :] != MARK).any():
            raise AssertionError(f"rank {self.rank}: {what}: wrote outside its output")

    def collective(
        self, name: str, count: int, dtype: DType, redop: RedOp, root: int, in_place: bool, shift: int
    ) -> None:
        """Runs one operation and compares with the oracle. `count` is as in island.h."""
        what = (name, count, dtype.label, redop.label, root, in_place, shift)
        n, r, item = self.size, self.rank, dtype.itemsize
        wide = {"reduce_scatter": (n, 1), "all_gather": (1, n), "all_to_all": (n, n)}.get(name, (1, 1))
        puts = self.inputs(count * wide[0], dtype, count % 5 + root)
        reduced = reduce_all(puts, redop, dtype)
        blocks = [p.reshape(wide[0], count) for p in puts]
        expected = {
            "all_reduce": reduced,
            "reduce": reduced,
            "reduce_scatter": reduced.reshape(wide[0], count)[r % wide[0]],
            "all_gather": np.concatenate(puts),
            "broadcast": puts[root],
            "all_to_all": np.concatenate([b[r % wide[0]] for b in blocks]),
        }[name]
        if in_place:
            total = count * max(wide)
            if name == "all_gather":  # NCCL's form: send = recv + rank * count
                raw, inner = self.buffer(np.full(total, 3, dtype.label), total, shift)
                inner[r * count * item : (r + 1) * count * item] = np.frombuffer(puts[r].tobytes(), np.uint8)
                send, recv, out = inner.ctypes.data + r * count * item, inner.ctypes.data, inner
            else:
                raw, inner = self.buffer(puts[r], total, shift)
                send = recv = inner.ctypes.data
                out = inner
                if name == "reduce_scatter":  # recv = send + rank * count
                    recv += r * count * item
                    out = inner[r * count * item : (r + 1) * count * item]
                    before = inner.copy()
        else:
            sraw, sinner = self.buffer(puts[r], count * wide[0], shift)
            raw, inner = self.buffer(np.full(count * wide[1], 3, dtype.label), count * wide[1], shift)
            send, recv, out = sinner.ctypes.data, inner.ctypes.data, inner
        if name in ("all_reduce", "reduce_scatter"):
            getattr(self.island, name)(send, recv, count, dtype, redop)
        elif name == "reduce":
            self.island.reduce(send, recv, count, dtype, redop, root)
        elif name == "broadcast":
            self.island.broadcast(send, recv, count, dtype, root)
        else:
            getattr(self.island, name)(send, recv, count, dtype)
        if name == "reduce" and r != root:
            expected = puts[r] if in_place else np.full(count, 3, dtype.label)  # not touched
        if in_place and name == "reduce_scatter":
            found = np.frombuffer(out.tobytes(), dtype.label)
            assert np.array_equal(found, expected), what
            out[:] = before[r * count * item : (r + 1) * count * item]
            self.expect(what, raw, inner, puts[r])  # and nothing else has changed
        else:
            self.expect(what, raw, out, expected)
        if not in_place:
            self.expect((*what, "send"), sraw, sinner, puts[r])


def reduce_all(puts: list[np.ndarray], redop: RedOp, dtype: DType) -> np.ndarray:
    """In rank order, as every combination in an island is."""
    ufunc = {
        RedOp.SUM: np.add,
        RedOp.AVG: np.add,
        RedOp.PROD: np.multiply,
        RedOp.MAX: np.maximum,
        RedOp.MIN: np.minimum,
        RedOp.BXOR: np.bitwise_xor,
    }[redop]
    total = puts[0].copy()
    for p in puts[1:]:
        total = ufunc(total, p)
    if redop == RedOp.AVG:
        total = (
            total / dtype_of(dtype).type(len(puts))
            if dtype in (DType.FLOAT32, DType.FLOAT64)
            else np.trunc(total / len(puts))
        ).astype(total.dtype)
    return total


def dtype_of(dtype: DType) -> np.dtype:
    return np.dtype(dtype.label)


NAMES = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def every_operation(rank: Rank) -> object:
    """All operations, counts, forms; float32, and other types where the message is not huge."""
    for name, count, in_place, shift in itertools.product(NAMES, COUNTS, (False, True), (0, 4)):
        each = count // rank.size if name in ("reduce_scatter", "all_gather", "all_to_all") and count > 2000 else count
        rank.collective(name, each, F32, RedOp.SUM, (count + shift) % rank.size, in_place, shift)
    if max(threads) > 1:  # several parts a track; and blocks that are cut up, each within its buffer
        for name, in_place in itertools.product(NAMES, (False, True)):
            count = 5_000_011 if name in ("all_reduce", "reduce", "broadcast") else 700_001
            rank.collective(name, count, F32, RedOp.SUM, 0, in_place, 4)
    for name, count in itertools.product(NAMES, (1, 13, 1025, 40001)):
        for dtype, redop, shift in (
            (DType.INT64, RedOp.PROD, 8),
            (DType.UINT8, RedOp.MAX, 1),
            (DType.FLOAT64, RedOp.AVG, 8),
            (DType.INT16, RedOp.BXOR, 1),
            (DType.FLOAT16, RedOp.MIN, 2),
            (DType.INT32, RedOp.AVG, 3),
        ):
            rank.collective(name, count, dtype, redop, count % rank.size, count % 2 == 0, shift)
    rank.island.barrier()
    return "done"


def same_bits(rank: Rank) -> object:
    """Sums that depend on the order: all ranks must hold the same bits, those of rank order."""
    digests = []
    for count in (1, 14, 15, 100, 1024, 1025, 30011, 300007):
        puts = []
        for rng in map(np.random.default_rng, range(rank.size)):
            puts.append((rng.standard_normal(count) * 10.0 ** rng.integers(-9, 9, count)).astype(np.float32))
        data = puts[rank.rank].copy()
        rank.island.all_reduce(data.ctypes.data, data.ctypes.data, count, F32, RedOp.SUM)
        expected = reduce_all(puts, RedOp.SUM, F32)
        assert data.tobytes() == expected.tobytes(), f"rank {rank.rank}: {count} elements: not the sum in rank order"
        digests.append(zlib.crc32(data.tobytes()))
    return digests


def soak(rank: Rank) -> object:
    """Operations of all kinds and sizes in a random order that all ranks share; a rank dawdles now and then."""
    shared, own = np.random.default_rng(11), np.random.default_rng(rank.rank)
    for _ in range(400):
        name, size = str(shared.choice(NAMES)), float(shared.random())
        count, root = int(10 ** (size * 5)), int(shared.integers(rank.size))
        in_place, shift = bool(shared.random() < 0.5), int(shared.integers(8))
        if own.random() < 0.05:
            time.sleep(0.002)
        rank.collective(name, count, F32, RedOp.SUM, root, in_place, shift)
        if shared.random() < 0.2:
            rank.island.barrier()
    return "done"


def messages(rank: Rank) -> object:
    """A ring of messages of growing size, in both directions; then one of the wrong length."""
    n, r, island = rank.size, rank.rank, rank.island
    for step, count in ((s, c) for s in (1, n - 1) for c in (0, 1, 5, 4096, 16384, 200003)):
        to, source = (r + step) % n, (r - step) % n
        mine = (np.arange(count) + r).astype(np.float32)
        got = np.zeros(count, np.float32)
        for first in (True, False):
            if first == (r % 2 == 0):
                island.send(mine.ctypes.data, count, F32, to)
            else:
                island.recv(got.ctypes.data, count, F32, source)
        if n % 2 == 0 or count <= 4096:
            assert (got == np.arange(count) + source).all(), (step, count)
    island.barrier()
    if r == 0:
        island.send(mine.ctypes.data, 3, F32, 1)
    if r == 1:
        try:
            island.recv(got.ctypes.data, 4, F32, 0)
        except MismatchError as error:
            return str(error)
    return ""


def late(rank: Rank) -> object:
    """The last rank stays away; the others time out or are told. Nobody waits longer than its deadline."""
    begin, data = time.monotonic(), np.zeros(50000, np.float32)
    rank.island.barrier()
    if rank.rank == rank.size - 1:
        time.sleep(2.5)
    try:
        rank.island.all_reduce(data.ctypes.data, data.ctypes.data, 50000, F32, RedOp.SUM)
    except TimedOutError as error:
        return ["timed out", list(error.missing), rank.island.waiting_for, time.monotonic() - begin]
    except AbortedError as error:
        return ["aborted", str(error), rank.island.error, time.monotonic() - begin]
    return ["returned"]


def killed(rank: Rank) -> object:
    """The last rank dies without a word; another thread of rank 0 aborts; all others come back at once."""
    data = np.zeros(1 << 20, np.float32)
    rank.island.all_reduce(data.ctypes.data, data.ctypes.data, 1 << 20, F32, RedOp.SUM)
    if rank.rank == rank.size - 1:
        os._exit(0)
    begin = time.monotonic()
    if rank.rank == 0:
        threading.Timer(0.5, rank.island.abort).start()
    try:
        rank.island.all_reduce(data.ctypes.data, data.ctypes.data, 1 << 20, F32, RedOp.SUM)
    except AbortedError as error:
        took = time.monotonic() - begin
        try:
            rank.island.barrier()
        except AbortedError:
            return ["aborted", error.rank, took]
    return ["returned"]


def misuse(rank: Rank) -> object:
    """Wrong arguments are refused and leave the island alive; a fork and a closed island are refused."""
    island, data = rank.island, np.zeros(8, np.float32)
    address = data.ctypes.data
    large = np.zeros(1 << 19, np.float32)  # starts threads, if there are to be any
    island.all_reduce(large.ctypes.data, large.ctypes.data, large.size, F32, RedOp.SUM)
    refused: list[str] = []
    for call, kind in (
        (lambda: island.all_reduce(address, address, 8, 99, RedOp.SUM), UsageError),
        (lambda: island.all_reduce(address, address, 1 << 62, F32, RedOp.SUM), UsageError),
        (lambda: island.all_reduce(address, address, 8, F32, RedOp.BAND), UnsupportedError),
        (lambda: island.broadcast(address, address, 8, F32, rank.size), UsageError),
        (lambda: island.send(address, 8, F32, rank.rank), UsageError),
    ):
        try:
            call()
        except kind as error:
            refused.append(type(error).__name__)
    island.barrier()
    child = os.fork()
    if child == 0:
        try:
            island.barrier()
        except ClosedError:
            os._exit(7)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    island.barrier()
    island.close()
    island.close()
    try:
        island.barrier()
    except ClosedError:
        return [refused, code]
    return []


def figures(rank: Rank) -> object:
    """Median microseconds of an in-place float32 all_reduce, by bytes."""
    result = {}
    for nbytes, rounds in ((4, 4000), (1024, 4000), (65536, 1000), (1 << 20, 200), (16 << 20, 12), (64 << 20, 6)):
        data = np.zeros(nbytes // 4, np.float32)
        address, count, call = data.ctypes.data, nbytes // 4, rank.island.all_reduce
        times = []
        for _ in range(rounds + 3):
            begin = time.perf_counter_ns()
            call(address, address, count, 7, 0)
            times.append(time.perf_counter_ns() - begin)
        result[nbytes] = round(sorted(times[3:])[rounds // 2] / 1000, 2)
    return result


CASES: dict[str, tuple[Callable[[Rank], object], float]] = {
    "every_operation": (every_operation, 20.0),
    "same_bits": (same_bits, 20.0),
    "soak": (soak, 20.0),
    "messages": (messages, 20.0),
    "late": (late, 1.0),
    "killed": (killed, 20.0),
    "misuse": (misuse, 20.0),
    "figures": (figures, 20.0),
}

if __name__ == "__main__":
    case, (island_id, rank, size) = sys.argv[1], (bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    function, timeout = CASES[case]
    threads = [int(n) for n in sys.argv[6].split(",")]
    opened = Island(island_id, rank, size, 20.0, int(sys.argv[5]), threads=threads[rank % len(threads)])
    opened.timeout = timeout
    print(json.dumps(function(Rank(opened))))
