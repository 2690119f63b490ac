# SPDX-License-Identifier: Apache-2.0
"""Deaths, silence, mismatches, interrupts: every rank gets a typed error that names who and why, soon, and ends by
itself."""

from __future__ import annotations

import os
import sys
import time

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import bodies

from hetccl.core import registry
from hetccl.testing.launch import run, run_results

MIX = "host@a:2,host@b:2"


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    assert not left, f"left in /dev/shm: {left}"


@pytest.mark.parametrize("mix", [MIX, "host:2,sim-a:2", "host@a:1,host@b:1,host@c:1"])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_killed_rank_is_named_within_five_seconds(mix: str, transports: str) -> None:
    victim = 2
    results = run_results(
        bodies.dies_in_all_reduce, mix, timeout=60, env={"HETCCL_TRANSPORTS": transports}, args=(victim,)
    )
    for r in results:
        if r.rank == victim:
            assert r.returncode == -9
            continue
        assert r.error is None, r.traceback
        assert r.value["error"] == "PeerLostError", r.value
        assert f"rank {victim} (" in r.value["text"], r.value
        assert r.value["seconds"] < 5
        assert r.value["again"] == "PeerLostError"
        assert r.returncode == 0


@pytest.mark.parametrize("victim", [2, 0])
def test_killed_rank_beside_a_library_without_abort(victim: int, oneccl: None) -> None:
    """The demo's mix. Killing a rank of oneCCL leaves its mate in a call that never returns: it must end all the
    same."""
    started = time.monotonic()
    results = run_results(bodies.dies_in_all_reduce, "oneccl:2,host:2", timeout=60, args=(victim,))
    assert time.monotonic() - started < 40
    for r in results:
        if r.rank == victim:
            assert r.returncode == -9
            continue
        if victim == 0 and r.rank == 1 and r.returncode == -6:
            continue  # the library itself ended its process: its own socket to the dead rank had broken
        assert r.returncode in (0, 1, 70), r
        if r.returncode == 70:  # it sat in the library's own call
            assert f"rank {victim} (" in r.stderr
            continue
        assert r.value["error"] == "PeerLostError", (r.value, r.stderr)
        assert f"rank {victim} (" in r.value["text"], r.value
        assert r.value["seconds"] < 5
    if victim == 0:  # a process that the library ended after its survivors had left: nobody was there to clean up
        names = [name.split(":")[0] for name in os.listdir("/dev/shm")]
        registry.vendor("oneccl").driver.remove_leftovers([int(pid) for pid in names if pid.isdigit()])


@pytest.mark.parametrize("mix", [MIX, "host:2,sim-a:2", "host:3"])
def test_timeout_names_who_is_missing(mix: str) -> None:
    results = run_results(bodies.stops, mix, timeout=60, args=(1, 1.5))
    for r in results:
        assert r.error is None, r.traceback
        if r.rank == 1:
            continue
        assert r.value["error"] == "TimedOutError", r.value
        assert 1 in r.value["missing"], r.value
        assert "rank 1 (" in r.value["text"]
        assert 1.4 < r.value["seconds"] < 4


@pytest.mark.parametrize("mix", [MIX, "host@a:1,host@b:1", "host:2"])
def test_mismatch_shows_what_each_rank_called(mix: str) -> None:
    results = run_results(bodies.mismatched, mix, timeout=60)
    assert "none" not in {r.value[0] for r in results}
    told = [r.value[1] for r in results if r.value[0] == "MismatchError"]
    assert told
    assert any("1010 x float32" in text and "1000 x float32" in text for text in told), told


def test_abort_ends_everybody() -> None:
    results = run_results(bodies.aborts, MIX, timeout=60)
    for r in results:
        assert r.error is None, r.traceback
        if r.rank != 1:
            assert r.value[0] == "AbortedError", r.value
            assert r.value[2] < 3
            assert r.rank == 0 or "rank 0 (" in r.value[1]


def test_interrupt_during_a_wait() -> None:
    results = run_results(bodies.interrupted, "host@a:1,host@b:1", timeout=30)
    assert results[0].value == "interrupted", results[0]
    assert [r.returncode for r in results] == [0, 0]


def test_forked_child_is_refused_and_harmless() -> None:
    for status, text, right in run(bodies.forks, MIX, timeout=60):
        assert status == 0
        assert text.startswith("ClosedError") and "fork" in text
        assert right


def test_communicators_one_after_another_and_two_at_once() -> None:
    assert all(n < 60 for n in run(bodies.reopens, MIX, timeout=90))


def test_exit_without_close_is_quiet() -> None:
    for r in run_results(bodies.exits_without_close, "host:2,sim-a:2", timeout=60):
        assert r.returncode == 0, r
        assert "Error" not in r.stderr and "Traceback" not in r.stderr, r.stderr


def test_use_after_close() -> None:
    for name, text in run(bodies.uses_after_close, "host@a:1,host@b:1", timeout=60):
        assert name == "ClosedError"
        assert "closed" in text and "create a new one" in text


def test_bad_arguments_say_what_is_wrong() -> None:
    want = {
        "wrong size": ("UsageError", "must have"),
        "other dtype": ("UsageError", "float64"),
        "overlap": ("UsageError", "overlaps"),
        "unknown dtype": ("UnsupportedError", "no path supports dtype"),
        "unsupported": ("UnsupportedError", "prod of complex64"),
        "unknown operator": ("UnsupportedError", "median"),
        "root": ("UsageError", "root"),
        "peer": ("UsageError", "peer"),
        "self": ("UsageError", "itself"),
        "read-only": ("UsageError", "read-only"),
        "no array": ("UsageError", "NumPy"),
    }
    for found in run(bodies.bad_arguments, "host@a:1,host@b:2", timeout=60):
        for name, kind, text in found:
            assert kind == want[name][0], (name, kind, text)
            assert want[name][1] in text, (name, text)


@pytest.mark.parametrize("mix", ["host@a:1,host@b:1", "host:1,sim-a:2"])
def test_strided_arrays(mix: str) -> None:
    run(bodies.strided, mix, timeout=60)
