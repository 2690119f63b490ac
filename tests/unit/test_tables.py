# SPDX-License-Identifier: Apache-2.0
"""The wrappers of the C tables, over tables made with ctypes: old, short, newer and broken ones too."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetccl import errors
from hetccl.tables import CclTable, DeviceTable, TransportTable, capsule, raise_for_status
from hetccl.types import DType, RedOp

HEADER = (Path(__file__).resolve().parents[2] / "hetccl/include/hetccl/spi.h").read_text()
P, Z, I, U, L = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64  # noqa: E741
OK, IN_PROGRESS, UNSUPPORTED = 0, 1, 2
WRAPPERS = {"device": DeviceTable, "ccl": CclTable, "transport": TransportTable}


def struct_of(kind: str) -> type[ctypes.Structure]:
    """The table as a ctypes structure, its fields read from spi.h; functions are plain pointers here."""
    body = re.search(rf"typedef struct hetccl_{kind}_ops \{{(.*?)\}} hetccl_{kind}_ops;", HEADER, re.S)
    assert body
    text = re.sub(r"/\*.*?\*/", "", body[1], flags=re.S)
    plain = {"uint32_t version, size": [("version", U), ("size", U)], "uint64_t caps": [("caps", L)],
             "uint32_t reduce_mask[32]": [("reduce_mask", U * 32)], "uint64_t move_mask": [("move_mask", L)],
             "size_t max_message": [("max_message", Z)]}  # fmt: skip
    fields: list[tuple[str, Any]] = []
    for field in filter(None, (" ".join(f.split()) for f in text.split(";"))):
        name = re.search(r"\(\*(\w+)\)", field)
        fields += [(name[1], P)] if name else plain[field]
    return type(kind, (ctypes.Structure,), {"_fields_": fields})


class Table:
    """A table of a pretend plug-in. Keyword arguments are functions, as ctypes callbacks or addresses."""

    def __init__(self, kind: str, version: int = 1, size: int | None = None, ctx: int = 0, **fields: Any) -> None:
        made = struct_of(kind)
        self.kind, self.keep = kind, list(fields.values())
        self.ops = made(version=version, size=ctypes.sizeof(made) if size is None else size)
        for name, value in fields.items():
            function = isinstance(value, ctypes._CFuncPtr)
            setattr(self.ops, name, ctypes.cast(value, P) if function else value)
        self.pair = (P * 2)(ctypes.addressof(self.ops), ctx)

    def capsule(self) -> Any:
        return capsule(ctypes.addressof(self.pair), self.kind, owner=self)

    def open(self) -> Any:
        return WRAPPERS[self.kind](self.capsule())


def function(*types: Any, result: Any = I) -> Callable[[Any], Any]:
    return ctypes.CFUNCTYPE(result, *types)


def offset_after(kind: str, field: str) -> int:
    made = struct_of(kind)
    return int(getattr(made, field).offset + getattr(made, field).size)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_newer_version_is_refused_naming_both(kind: str) -> None:
    with pytest.raises(errors.PluginVersionError, match=r"version 7.* up to version 1"):
        Table(kind, version=7).open()
    with pytest.raises(errors.PluginVersionError):
        Table(kind, version=0).open()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_table_without_its_head_is_refused(kind: str) -> None:
    with pytest.raises(errors.PluginLoadError, match="says that it has 8 bytes"):
        Table(kind, size=8).open()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_another_capsule_is_refused(kind: str) -> None:
    other = "ccl" if kind != "ccl" else "device"
    with pytest.raises(errors.UsageError, match=f"hetccl.{kind}_ops"):
        WRAPPERS[kind](Table(other).capsule())
    with pytest.raises(errors.UsageError, match="not 3"):
        WRAPPERS[kind](3)


def test_every_null_function_of_a_device_is_a_stub() -> None:
    d = Table("device").open()
    assert d.last_error() == "" and d.caps == 0
    calls: list[Callable[[], Any]] = [
        d.bind_thread, lambda: d.alloc(1), lambda: d.free(1), lambda: d.host_alloc(1), lambda: d.host_free(1),
        lambda: d.host_register(1, 1), lambda: d.host_unregister(1), lambda: d.copy(1, 2, 3), lambda: d.memset(1, 2, 3),
        d.stream_create, lambda: d.stream_destroy(1), d.stream_sync, lambda: d.stream_wait_event(1, 2), d.event_create,
        lambda: d.event_destroy(1), lambda: d.event_record(1), lambda: d.event_query(1), lambda: d.event_sync(1),
        d.flag_alloc, lambda: d.flag_free(1), lambda: d.flag_set(1, 2), lambda: d.stream_wait_flag(1, 2),
        lambda: d.reduce(1, [2, 3], 4, "float32", "sum"), lambda: d.scale(1, 2, 3, "float32", 2.0),
        d.is_capturing, lambda: d.dmabuf_export(1, 2),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(errors.UnsupportedError, match="is not supported"):
            call()
    assert d.owns(1) is False  # unsupported is its way to say: ordinary host memory


def test_every_null_function_of_a_ccl_is_a_stub() -> None:
    c = Table("ccl").open()
    assert c.last_error() == "" and c.move_mask == 0 and not c.reduces("float32", "sum")
    ops = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "send", "recv")
    calls: list[Callable[[], Any]] = [lambda op=op: c.call(op, 1) for op in ops]
    calls += [c.unique_id, lambda: c.init(0, 1, b"", 1.0), c.group_start, c.group_end, lambda: c.async_error(1),
              lambda: c.abort(1), lambda: c.destroy(1)]  # fmt: skip
    for call in calls:
        with pytest.raises(errors.UnsupportedError):
            call()
    with pytest.raises(errors.UsageError, match="no operation"):
        c.call("all_scatter", 1)


def test_every_null_function_of_a_transport_is_a_stub() -> None:
    t = Table("transport").open()
    calls: list[Callable[[], Any]] = [
        lambda: t.send(1, b"x"), lambda: t.recv(1, bytearray(1)), lambda: t.reserve(1, 0, 1), lambda: t.commit(1, 0, 1),
        lambda: t.peek(1, 0), lambda: t.release(1, 0), lambda: t.progress(1), t.wait_fds, t.arm, t.disarm,
        lambda: t.counters(1), lambda: t.ep_error(1), lambda: t.ep_close(1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(errors.UnsupportedError):
            call()
    assert t.last_error() == ""


def test_a_shorter_table_works_and_its_missing_part_is_not_read() -> None:
    answer = function(P, P)(lambda ctx, handle: OK)
    size = offset_after("device", "free")
    d = Table("device", size=size, free=answer, event_query=answer).open()
    d.free(1)
    with pytest.raises(errors.UnsupportedError):  # a value stands there, but `size` does not cover it
        d.event_query(1)


def test_half_a_field_is_no_field() -> None:
    answer = function(P, P)(lambda ctx, handle: OK)
    with pytest.raises(errors.UnsupportedError):
        Table("device", size=offset_after("device", "free") - 4, free=answer).open().free(1)


def test_a_longer_table_works() -> None:
    answer = function(P, P)(lambda ctx, handle: OK)
    Table("device", size=4000, free=answer).open().free(1)


def test_arguments_arrive_and_results_come_back() -> None:
    seen: list[Any] = []

    def alloc(ctx: int, nbytes: int, out: Any) -> int:
        seen.append((ctx, nbytes))
        out[0] = 0x1234
        return OK

    copy = function(P, P, P, Z, P)(lambda *a: seen.append(a) or OK)
    d = Table("device", ctx=77, alloc=function(P, Z, ctypes.POINTER(P))(alloc), copy_async=copy, caps=5).open()
    assert d.alloc(100) == 0x1234
    d.copy(1, 2, 3, 4)
    assert seen == [(77, 100), (77, 1, 2, 3, 4)]
    assert d.caps == 5 and d.host_memory


def test_owns_has_three_answers() -> None:
    def device(status: int) -> Any:
        return Table("device", owns=function(P, P, Z)(lambda *a: status)).open()

    assert device(OK).owns(1) is True
    assert device(UNSUPPORTED).owns(1) is False
    with pytest.raises(errors.UsageError):
        device(3).owns(1)


def test_event_query_is_a_truth() -> None:
    for status, truth in ((OK, True), (IN_PROGRESS, False)):
        assert Table("device", event_query=function(P, P)(lambda *a, s=status: s)).open().event_query(1) is truth


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (2, errors.UnsupportedError),
        (3, errors.UsageError),
        (4, errors.PeerLostError),
        (5, errors.TimedOutError),
        (6, errors.AbortedError),
        (7, errors.MismatchError),
        (8, errors.VendorError),
        (9, errors.TransportError),
        (10, errors.VendorError),
        (99, errors.VendorError),
        (-1, errors.VendorError),
    ],
)
def test_a_status_becomes_its_exception_with_the_plug_ins_text(status: int, kind: type[Exception]) -> None:
    text = ctypes.create_string_buffer("no cigar \xe9".encode())
    last = function(P, result=P)(lambda ctx: ctypes.addressof(text))
    t = Table("transport", progress=function(P, P)(lambda *a: status), last_error=last).open()
    with pytest.raises(kind, match=r"transport call progress .*no cigar \xe9|transport call progress: .*no cigar \xe9"):
        t.progress(1)
    with pytest.raises(kind):
        raise_for_status(status, "f", "", "transport")


def test_statuses_of_spi_h_are_all_mapped() -> None:
    names = dict(re.findall(r"(HETCCL_[A-Z_]+) = (\d+)", HEADER.split("hetccl_status {")[1].split("}")[0]))
    assert {int(n) for n in names.values()} == set(range(11))
    for number in range(2, 11):
        with pytest.raises(errors.HetcclError) as caught:
            raise_for_status(number, "f")
        assert "no status" not in str(caught.value)
    raise_for_status(OK, "f")
    raise_for_status(IN_PROGRESS, "f")


def ccl(test: Callable[[], int], log: list[str]) -> Any:
    def post(ctx: int, args: int, out: Any) -> int:
        out[0] = 0x99
        return IN_PROGRESS

    note = {name: function(P, P)(lambda c, h, n=name: log.append(f"{n} {h:#x}") or OK) for name in ("abort", "destroy")}
    return Table("ccl", init_post=function(P, P, ctypes.POINTER(P))(post), init_test=function(P, P)(lambda *a: test()),
                 **note).open()  # fmt: skip


def test_init_posts_and_tests_until_it_is_there() -> None:
    answers = [IN_PROGRESS] * 5 + [OK]
    log: list[str] = []
    assert ccl(lambda: answers.pop(0), log).init(0, 2, b"id", 5.0) == 0x99
    assert answers == [] and log == []


def test_init_has_a_deadline_and_cleans_up() -> None:
    log: list[str] = []
    start = time.monotonic()
    with pytest.raises(errors.TimedOutError, match="rank 1 of 2") as caught:
        ccl(lambda: IN_PROGRESS, log).init(1, 2, b"id", 0.2)
    assert 0.2 <= time.monotonic() - start < 2
    assert caught.value.facts["phase"] == "island" and log == ["abort 0x99", "destroy 0x99"]


def test_a_failing_init_cleans_up() -> None:
    log: list[str] = []
    with pytest.raises(errors.VendorError):
        ccl(lambda: 10, log).init(0, 2, b"id", 5.0)
    assert log == ["abort 0x99", "destroy 0x99"]


def test_masks() -> None:
    masks = (U * 32)()
    masks[DType.FLOAT32] = 1 << RedOp.SUM | 1 << RedOp.MAX
    c = Table("ccl", reduce_mask=masks, move_mask=1 << DType.INT8).open()
    assert c.reduces("float32", "sum") and c.reduces(DType.FLOAT32, RedOp.MAX) and not c.reduces("float32", "min")
    assert not c.reduces("float64", "sum") and c.moves("int8") and not c.moves("uint8")
    assert c.reduce_mask("float32") == 5


def test_unique_id_has_its_own_length() -> None:
    def unique_id(ctx: int, out: int, length: Any) -> int:
        assert length[0] == 8192
        ctypes.memmove(out, b"ab\0cd", 5)
        length[0] = 5
        return OK

    assert Table("ccl", unique_id=function(P, P, ctypes.POINTER(U))(unique_id)).open().unique_id() == b"ab\0cd"


class Message(ctypes.Structure):
    _fields_ = [("size", U), ("fingerprint", U), ("channel", ctypes.c_int32), ("flags", U), ("ptr", P), ("nbytes", Z)]


def test_messages_of_buffers_and_addresses() -> None:
    seen: list[Any] = []

    def move(ctx: int, ep: int, m: Any) -> int:
        seen.append((ep, m[0].size, m[0].channel, m[0].fingerprint, ctypes.string_at(m[0].ptr, m[0].nbytes)))
        return OK if len(seen) % 2 else IN_PROGRESS

    f = function(P, P, ctypes.POINTER(Message))(move)
    t = Table("transport", send=f, recv=f).open()
    raw = ctypes.create_string_buffer(b"hello")
    assert t.send(5, b"abc", 2, 9) is True
    assert t.send(5, ctypes.addressof(raw), nbytes=4) is False
    assert t.recv(5, bytearray(b"xyz"), 1, 3, nbytes=2) is True
    assert seen == [(5, ctypes.sizeof(Message), 2, 9, b"abc"), (5, 32, 0, 0, b"hell"), (5, 32, 1, 3, b"xy")]
    with pytest.raises(errors.UsageError, match="needs nbytes"):
        t.send(5, 1)
    with pytest.raises(errors.UsageError, match="nbytes is 4, but the buffer has 3"):
        t.send(5, b"abc", nbytes=4)
    with pytest.raises((BufferError, TypeError)):
        t.recv(5, b"read-only")


def test_wait_fds() -> None:
    def wait_fds(ctx: int, fds: Any, most: int, n: Any) -> int:
        fds[0], fds[1], n[0] = 7, 8 | 1 << 30, 2
        return OK

    f = function(P, ctypes.POINTER(I), U, ctypes.POINTER(U))(wait_fds)
    assert Table("transport", wait_fds=f).open().wait_fds() == [(7, False), (8, True)]


def test_blocking_calls_let_other_threads_run() -> None:
    """stream_sync is libc's usleep here: its first argument, the context, is the number of microseconds."""
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, P).value
    d = Table("device", ctx=400_000, stream_sync=usleep).open()
    thread = threading.Thread(target=d.stream_sync)
    start = time.monotonic()
    thread.start()
    time.sleep(0.02)
    went_on = time.monotonic() - start
    thread.join()
    assert went_on < 0.2 < time.monotonic() - start


def test_the_owner_lives_as_long_as_the_table() -> None:
    table = Table("device", caps=3)
    gone = weakref.ref(table)
    wrapper = table.open()
    del table
    gc.collect()
    assert gone() is not None and wrapper.caps == 3
    del wrapper
    gc.collect()
    assert gone() is None


def test_capsule_refuses_nonsense() -> None:
    with pytest.raises(errors.UsageError, match="device, ccl and transport"):
        capsule(1, "wheel")
    with pytest.raises(errors.UsageError, match="is 0"):
        capsule(0, "ccl")
    with pytest.raises(errors.PluginLoadError, match="holds no table"):
        empty = (P * 2)()
        DeviceTable(capsule(ctypes.addressof(empty), "hetccl.device_ops"))
