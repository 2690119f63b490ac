# SPDX-License-Identifier: Apache-2.0
"""A rank that cannot join says why, and the others do not wait for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import bodies

from hetccl.core import registry
from hetccl.errors import HetcclError
from hetccl.testing.launch import run_results

CASES = {
    "vendor not installed": (
        "nosuch:1,host:1", {}, "PluginNotFoundError", ["nosuch", "pip install hetccl-vendor-nosuch", "host"],
    ),
    "transport not installed": (
        "host@a:1,host@b:1", {"HETCCL_TRANSPORTS": "shm,pigeon"}, "PluginNotFoundError",
        ["pigeon", "pip install hetccl-transport-pigeon", "shm"],
    ),
    "library not found": (
        "oneccl:1,host:1", {"HETCCL_ONECCL_PATH": "/nonexistent"}, "PluginLoadError",
        ["/nonexistent", "HETCCL_ONECCL_PATH"],
    ),
    "no such interface": (
        "host@a:1,host@b:1", {"HETCCL_TRANSPORTS": "tcp", "HETCCL_SOCKET_IFNAME": "eth77"}, "ConfigError",
        ["HETCCL_SOCKET_IFNAME", "eth77", "lo"],
    ),
    "too few ranks named": ("host:3", {"WORLD_SIZE": "2"}, "ConfigError", ["3", "2"]),
    "no path": (
        "host@a:1,host@b:1", {"HETCCL_TRANSPORTS": ","}, "ConfigError", ["HETCCL_TRANSPORTS"],
    ),
    "secret required": (
        "host@a:1,host@b:1", {"HETCCL_REQUIRE_SECRET": "1"}, "ConfigError",
        ["HETCCL_REQUIRE_SECRET", "HETCCL_SECRET_FILE"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    spec, env, kind, words = CASES[case]
    started = time.monotonic()
    results = run_results(bodies.joins, spec, timeout=40, env=env)
    assert time.monotonic() - started < 15, "the others waited"
    told = [r.value for r in results]
    assert "none" not in {name for name, _ in told}, told
    right = [text for name, text in told if name == kind]
    assert right, told
    assert all(word in right[0] for word in words), right[0]


def test_the_others_learn_who_could_not_join() -> None:
    results = run_results(bodies.joins, "host:1,nosuch:1,host:1", timeout=40)
    assert results[1].value[0] == "PluginNotFoundError"
    for r in (results[0], results[2]):
        assert r.value[0] == "HetcclError"
        assert "rank 1: PluginNotFoundError" in r.value[1]


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_trouble_after_the_control_plane_stands(how: str) -> None:
    started = time.monotonic()
    results = run_results(bodies.fails_late, "host@a:1,host@b:1,host@c:1", timeout=40, args=(how,))
    assert time.monotonic() - started < 12, "the others waited"
    for r in (results[0], results[2]):
        assert r.value[0] in ("HetcclError", "PeerLostError", "TransportError"), r.value
        assert "rank 1" in r.value[1], r.value


@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mix", ["host:3,sim-a:1", "sim-a:3,host:1", "oneccl:2,host:1"])
def test_nobody_waits_in_a_library_for_a_mate_that_failed(
    mix: str, victim: int, how: str, require: Callable[[object, str, str], None]
) -> None:
    """Creating a vendor's communicator blocks until all ranks of the island have come."""
    if "oneccl" in mix:
        require(usable("oneccl"), "oneCCL", "pip install ./plugins/hetccl-vendor-oneccl && hetccl fetch oneccl")
    started = time.monotonic()
    results = run_results(bodies.leaves_the_island, mix, timeout=50, args=(victim, how))
    assert time.monotonic() - started < 30, "somebody waited for the deadline, or did not end"
    for r in results:
        if r.rank == victim:
            assert r.returncode == (-9 if how == "dies" else r.returncode), r
            continue
        kind, text, seconds = r.value
        assert kind in ("HetcclError", "PeerLostError"), r.value
        assert f"rank {victim}" in text and seconds < 15, r.value


def usable(vendor: str) -> bool:
    try:
        registry.vendor(vendor)
    except HetcclError:
        return False
    return True


def test_two_jobs_at_once_do_not_meet(tmp_path: object) -> None:
    """Same names, same host, own stores."""
    import threading

    found: list[object] = []

    def job(spec: str) -> None:
        found.append([r.value for r in run_results(bodies.reopens, spec, timeout=60)])

    threads = [threading.Thread(target=job, args=(spec,)) for spec in ("host@a:1,host@b:1", "host:2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(isinstance(value, int) for values in found for value in values), found  # type: ignore[attr-defined]
