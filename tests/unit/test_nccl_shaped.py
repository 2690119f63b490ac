# SPDX-License-Identifier: Apache-2.0
"""The data-driven ccl table over a library that records its calls: every C shape, every map, every guard."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetccl.dynlib import open_library
from hetccl.errors import (
    AbortedError,
    ConfigError,
    HetcclError,
    PluginLoadError,
    TimedOutError,
    UnsupportedError,
    UsageError,
    VendorError,
)
from hetccl.tables import CclTable
from hetccl.types import DType, RedOp
from hetccl.vendors.nccl_shape import Caps, NcclShape, Result, Status
from hetccl.vendors.nccl_shaped import NcclShapedCcl

RESULTS: Mapping[int, Result] = {
    0: Result(Status.OK, "fakeSuccess"),
    3: Result(Status.VENDOR, "fakeInternal"),
    4: Result(Status.INVALID, "fakeInvalid"),
    7: Result(Status.IN_PROGRESS, "fakeInProgress"),
    12: Result(Status.UNSUPPORTED, "fakeNotImplemented"),
}
CALLS = ("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "all_to_all", "send", "recv")


class Record(ctypes.Structure):
    """`struct record` of fake_nccl.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("send", "recv")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("count", "ranks")]
    _fields_ += [
        (name, ctypes.c_int)
        for name in (
            "dtype",
            "redop",
            "peer",
            "rank",
            "calls",
            "sends",
            "recvs",
            "inits",
            "destroys",
            "finalizes",
            "aborts",
        )
    ]
    _fields_ += [(name, ctypes.c_int) for name in ("groups", "config")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("comm", "stream")]
    _fields_ += [(name, ctypes.c_int) for name in ("id_first", "id_last", "overlap")]


class Fake:
    """The compiled library, its record, and a table over it."""

    def __init__(self, path: Path, **shape: Any) -> None:
        self.c = ctypes.CDLL(str(path))
        self.record = Record.in_dll(self.c, "fake")
        self.shape = NcclShape(
            **{"name": "Fake", "libraries": (str(path),), "prefix": "fake", "results": RESULTS, **shape}
        )
        self.ccl = NcclShapedCcl(self.shape, open_library(self.shape.libraries))
        self.table = CclTable(self.ccl.table)

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.c, name).value = value

    def join(self, rank: int = 1, size: int = 3, timeout: float = 10.0) -> int:
        unique_id = bytes([11]) + bytes(self.shape.id_bytes - 2) + bytes([22])
        comm: int = self.table.init(rank, size, unique_id, timeout)
        return comm


Make = Callable[..., Fake]


@pytest.fixture
def make(tmp_path: Path, require: Callable[[object, str, str], None]) -> Make:
    """make(*flags, **shape): compiles the library anew, so that no test sees another's state."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    require(compiler, "a C compiler", "install gcc")
    source = Path(__file__).with_name("fake_nccl.c")

    def build(*flags: str, **shape: Any) -> Fake:
        path = tmp_path / f"libfake{len(list(tmp_path.iterdir()))}.so"
        defaults = {"-DPREFIX": "fake", "-DID_BYTES": str(shape.get("id_bytes", 128)), "-DRANKS": "int"}
        if shape.get("ranks_are_size_t"):
            defaults["-DRANKS"] = "size_t"
        options = [
            f"{name}={value}" for name, value in defaults.items() if not any(f.startswith(name + "=") for f in flags)
        ]
        command = [str(compiler), "-shared", "-fPIC", "-w", "-o", str(path), str(source), *options, *flags]
        subprocess.run(command, check=True, timeout=60)
        return Fake(path, **shape)

    return build


@pytest.mark.parametrize("config", [b"", bytes([5, 1, 0, 0]) * 14])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", [128, 136, 4096, "pointer"])
def test_every_shape_of_init(make: Make, form: int | str, wide: bool, config: bytes) -> None:
    pointer = form == "pointer"
    shape = {"id_bytes": 777 if pointer else form, "id_by_pointer": pointer, "ranks_are_size_t": wide, "config": config}
    fake = make(*(["-DID_POINTER"] if pointer else []), **shape)
    comm = fake.join(rank=1, size=3)
    assert (fake.record.id_first, fake.record.id_last) == (11, 22)
    assert (fake.record.rank, fake.record.ranks) == (1, 3)
    assert fake.record.config == (0x0105 if config else 0)
    assert fake.table.unique_id() == bytes([7]) * fake.shape.id_bytes
    fake.table.destroy(comm)
    assert (fake.record.finalizes, fake.record.destroys) == (1, 1)


@pytest.mark.parametrize("op", CALLS)
def test_arguments_arrive(make: Make, op: str) -> None:
    fake = make("-DALL_TO_ALL=fakeAllToAll", dtypes={DType.FLOAT32: 31}, redops={RedOp.MAX: 17})
    comm = fake.join()
    fake.table.call(op, comm, send=0x1000, recv=0x2000, count=99, dtype="float32", redop="max", peer=2, stream=0x77)
    r = fake.record
    assert (r.count, r.dtype, r.stream, r.calls) == (99, 31, 0x77, 1)
    assert r.comm == ctypes.addressof(r)
    assert r.send == (None if op == "recv" else 0x1000)
    assert r.recv == (None if op == "send" else 0x2000)
    assert r.redop == (17 if "reduce" in op else 0)
    assert r.peer == (2 if op in ("reduce", "broadcast", "send", "recv") else 0)


def test_stream_is_null_where_the_library_has_none(make: Make) -> None:
    fake = make(streams=False)
    fake.table.call("all_reduce", fake.join(), 16, 32, 1, stream=0x77)
    assert fake.record.stream is None


@pytest.mark.parametrize("op", CALLS)
def test_nothing_to_move_is_no_call(make: Make, op: str) -> None:
    fake = make()
    fake.table.call(op, fake.join(), count=0)
    assert fake.record.calls == 0 and fake.record.groups == 0


def test_pairs_outside_the_data_are_refused_before_the_call(make: Make) -> None:
    redops = {RedOp.SUM: 0, RedOp.MIN: 3}
    fake = make(redops=redops, not_reduced=frozenset({(DType.FLOAT16, RedOp.MIN)}))
    comm = fake.join()
    for dtype, redop in (("float32", "avg"), ("float16", "min"), ("int16", "sum"), ("complex64", "min")):
        assert not fake.table.reduces(dtype, redop)
        with pytest.raises(UnsupportedError, match="does not reduce element type"):
            fake.table.call("all_reduce", comm, 16, 32, 4, dtype, redop)
    assert fake.record.calls == 0
    assert fake.table.reduces("float16", "sum") and fake.table.reduces("complex128", "sum")


@pytest.mark.parametrize(
    ("dtype", "number", "count"),
    [("int16", 6, 5), ("bool", 0, 5), ("complex64", 7, 10), ("complex128", 8, 10), ("float8_e5m2", 0, 5)],
)
def test_a_type_the_library_lacks_is_moved_as_another(make: Make, dtype: str, number: int, count: int) -> None:
    fake = make()
    assert fake.table.moves(dtype)
    fake.table.call("broadcast", fake.join(), 16, 32, 5, dtype)
    assert (fake.record.dtype, fake.record.count) == (number, count)


def test_complex_sums_are_sums_of_reals(make: Make) -> None:
    fake = make()
    fake.table.call("all_reduce", fake.join(), 16, 32, 5, "complex128", "sum")
    assert (fake.record.dtype, fake.record.count, fake.record.redop) == (8, 10, 0)


@pytest.mark.parametrize(
    ("code", "error"), [(3, VendorError), (4, UsageError), (12, UnsupportedError), (25, VendorError), (-1, VendorError)]
)
def test_results_become_errors_with_the_librarys_words(make: Make, code: int, error: type[HetcclError]) -> None:
    fake = make()
    comm = fake.join()
    fake.set("fake_code", code)
    with pytest.raises(error) as caught:
        fake.table.call("all_reduce", comm, 16, 32, 1)
    text = str(caught.value)
    assert f"code {code}" in text and "cable unplugged" in text and "fakeAllReduce" in text
    if code == 3:
        assert "it broke" in text and "fakeInternal" in text
    fake.table.call("all_reduce", comm, 16, 32, 1)  # the table itself lives on


def test_a_failed_init_says_so(make: Make) -> None:
    fake = make()
    fake.set("fake_init_code", 3)
    with pytest.raises(VendorError, match="it broke"):
        fake.join()


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_impossible_ranks_are_refused(make: Make, rank: int, size: int) -> None:
    fake = make()
    with pytest.raises(UsageError, match="rank must be"):
        fake.join(rank, size)
    assert fake.record.inits == 0


def test_an_id_of_another_length_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="id has another length"):
        make().table.init(0, 1, b"short", 1.0)


@pytest.mark.parametrize("op", ["reduce", "broadcast", "send", "recv"])
@pytest.mark.parametrize("peer", [-1, 3])
def test_a_peer_that_is_no_rank_is_refused(make: Make, op: str, peer: int) -> None:
    fake = make()
    with pytest.raises(UsageError, match="no rank of the communicator"):
        fake.table.call(op, fake.join(size=3), 16, 32, 1, peer=peer)
    assert fake.record.calls == 0


def test_reduce_gets_a_buffer_on_ranks_that_gave_none(make: Make) -> None:
    fake = make(recv_on_all_ranks=True)
    comm = fake.join(rank=1)
    for count in (10, 100_000, 7):
        fake.table.call("reduce", comm, 16, 0, count, peer=0)
        recv = fake.record.recv
        assert recv
        ctypes.memset(recv, 1, 4 * count)  # all of it is ours
    fake.table.call("reduce", comm, 16, 0, 5, peer=1)
    assert fake.record.recv is None  # the root's own mistake is the library's to judge
    fake.table.destroy(comm)


def test_spellings_are_tried_in_order(make: Make) -> None:
    names = {"AllToAll": ("fakeAllToAll", "fakeAlltoAll")}
    fake = make("-DALL_TO_ALL=fakeAlltoAll", spellings=names)
    fake.table.call("all_to_all", fake.join(), 16, 32, 4)
    assert fake.record.calls == 1 and fake.record.groups == 0


def test_all_to_all_is_made_of_sends_where_it_is_missing(make: Make) -> None:
    fake = make()
    fake.table.call("all_to_all", fake.join(size=3), 0x1000, 0x2000, 4, "float64")
    r = fake.record
    assert (r.groups, r.sends, r.recvs) == (1, 3, 3)
    assert (r.send, r.recv, r.peer) == (0x1000 + 2 * 32, 0x2000 + 2 * 32, 2)


def test_calls_named_as_missing_are_not_used(make: Make) -> None:
    fake = make(missing=frozenset({"CommFinalize", "AllToAll", "Send", "GetVersion"}))
    comm = fake.join()
    for op in ("send", "recv", "all_to_all"):
        with pytest.raises(UnsupportedError):
            fake.table.call(op, comm, 16, 32, 1)
    fake.table.destroy(comm)
    assert fake.record.finalizes == 0 and fake.ccl.version() is None


def test_a_library_without_the_core_calls_is_refused(make: Make) -> None:
    with pytest.raises(PluginLoadError, match="no fakeBroadcast"):
        make("-DNO_BROADCAST")


@pytest.mark.parametrize(
    "shape", [{"id_bytes": 100}, {"results": {0: Result(Status.VENDOR, "x")}}, {"config": bytes(600)}]
)
def test_data_that_cannot_be_right_are_refused(make: Make, shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Fake"):
        make(**shape)


def test_caps_fall_with_their_symbols(make: Make) -> None:
    caps = Caps.ABORT | Caps.GROUP | Caps.STREAM_ORDERED
    assert make(caps=caps).table.caps == int(caps)
    assert make("-DNO_ABORT", caps=caps, missing=frozenset({"GroupEnd"})).table.caps == int(Caps.STREAM_ORDERED)


def test_a_non_blocking_library_is_waited_for(make: Make) -> None:
    fake = make(caps=Caps.ABORT | Caps.STREAM_ORDERED | Caps.GROUP)
    fake.set("fake_init_code", 7)
    fake.set("fake_async", 7)
    fake.set("fake_async_left", 5)
    comm = fake.join()
    for start in (lambda: fake.table.call("all_reduce", comm, 16, 32, 1), fake.table.group_end):
        fake.set("fake_code", 7)
        fake.set("fake_async", 7)
        fake.set("fake_async_left", 5)
        start()
        assert ctypes.c_int.in_dll(fake.c, "fake_async_left").value == 0
    fake.table.async_error(comm)
    fake.set("fake_async", 3)
    with pytest.raises(VendorError, match="it broke"):
        fake.table.async_error(comm)


def test_a_failure_while_in_progress_is_reported(make: Make) -> None:
    fake = make()
    comm = fake.join()
    fake.set("fake_code", 7)
    fake.set("fake_async", 3)
    with pytest.raises(VendorError, match="it broke"):
        fake.table.call("all_reduce", comm, 16, 32, 1)


def test_in_progress_for_ever_ends_at_the_timeout(make: Make) -> None:
    fake = make()
    comm = fake.join(timeout=0.3)
    fake.set("fake_code", 7)
    fake.set("fake_async", 7)
    with pytest.raises(TimedOutError):
        fake.table.call("all_reduce", comm, 16, 32, 1)


def test_abort_ends_a_call_in_progress_and_all_later_ones(make: Make) -> None:
    fake = make(caps=Caps.ABORT)
    comm = fake.join()
    fake.set("fake_code", 7)
    fake.set("fake_async", 7)
    timer = threading.Timer(0.2, fake.table.abort, (comm,))
    timer.start()
    with pytest.raises(AbortedError):
        fake.table.call("all_reduce", comm, 16, 32, 1)
    timer.join(10)
    fake.table.abort(comm)
    with pytest.raises(AbortedError):
        fake.table.call("broadcast", comm, 16, 32, 1)
    fake.table.destroy(comm)
    assert (fake.record.aborts, fake.record.destroys) == (1, 0)  # abort has freed it


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_calls_of_two_threads(make: Make, one_at_a_time: bool) -> None:
    fake = make(caps=Caps.ONE_AT_A_TIME if one_at_a_time else Caps(0))
    comms = [fake.join(), fake.join()]
    fake.set("fake_sleep_us", 20000)
    threads = [threading.Thread(target=fake.table.call, args=("all_reduce", comm, 16, 32, 1)) for comm in comms * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert fake.record.overlap == (0 if one_at_a_time else 1)


def test_a_stuck_call_does_not_block_others_beyond_their_timeout(make: Make) -> None:
    fake = make(caps=Caps.ONE_AT_A_TIME)
    stuck, other = fake.join(), fake.join(timeout=0.5)
    fake.set("fake_sleep_us", 4_000_000)
    thread = threading.Thread(target=fake.table.call, args=("all_reduce", stuck, 16, 32, 1))
    thread.start()
    time.sleep(0.2)
    with pytest.raises(TimedOutError, match="one call at a time"):
        fake.table.call("all_reduce", other, 16, 32, 1)
    thread.join(20)


def test_init_in_a_thread_keeps_its_deadline(make: Make) -> None:
    fake = make(init_in_thread=True)
    fake.table.destroy(fake.join())
    fake.set("fake_hold", 1)
    start = time.monotonic()
    with pytest.raises(TimedOutError, match="not all ranks came"):
        fake.join(timeout=0.3)
    assert time.monotonic() - start < 5
    fake.set("fake_hold", 0)  # the thread that was left behind ends, and frees what nobody waits for
    until = time.monotonic() + 10
    while fake.record.inits < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert fake.record.inits == 2
    fake.set("fake_init_code", 3)
    with pytest.raises(VendorError, match="it broke"):
        fake.join()
