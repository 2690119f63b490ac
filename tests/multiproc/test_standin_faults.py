# SPDX-License-Identifier: Apache-2.0
"""NCCL and RCCL that fail, dawdle, lack calls or lose a peer, and streams that are captured: on stand-ins."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
import matrix
import standin_bodies as bodies
from bodies import leaves_the_island

from hetccl.core import registry
from hetccl.errors import PluginNotFoundError
from hetccl.testing.launch import run, run_results

VENDORS = ("nccl", "rccl")
SOON = 25.0  # seconds; two or three on an idle machine, and less than any deadline that would end it otherwise


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest, require: Callable[[object, str, str], None]) -> str:
    name: str = request.param
    try:
        registry.vendor(name, probe=False)
    except PluginNotFoundError:
        require(False, f"the plug-in {name}", f"pip install ./plugins/hetccl-vendor-{name}")
    return name


def outcomes(
    vendor: str, environment: dict[str, str], ranks: int, who: int, variables: dict[str, str], timeout: float = 30.0
) -> list[Any]:
    arguments = (vendor, who, variables, timeout)
    return run(bodies.failing, f"{vendor}:{ranks}", timeout=100, env=environment, args=arguments)


@pytest.mark.parametrize(("ranks", "call", "code", "word"), [
    (2, 1, 3, "internal error"), (3, 4, 1, "unhandled"), (4, 2, 5, "invalid usage"),
])  # fmt: skip
def test_error_n_on_call_k_everywhere(
    vendor: str, ranks: int, call: int, code: int, word: str, environment: dict[str, str]
) -> None:
    """All calls before it went well; the error says the library's call and its word for the code."""
    found = outcomes(vendor, environment, ranks, -1, {"STANDIN_CCL_FAIL": f"ncclAllReduce:{call}:{code}"})
    for well, kind, text, _ in found:
        assert well == (call - 1) // 2, found
        assert kind in ("VendorError", "UsageError", "AbortedError"), text
    assert any("AllReduce" in text and word in text for _, _, text, _ in found), found


def test_an_error_on_one_rank_reaches_all(vendor: str, environment: dict[str, str]) -> None:
    found = outcomes(vendor, environment, 3, 1, {"STANDIN_CCL_FAIL": "ncclAllReduce:3:3"})
    assert found[1][1] == "VendorError" and "internal error" in found[1][2]
    for rank in (0, 2):
        assert found[rank][1] == "AbortedError" and "rank 1" in found[rank][2], found[rank]
        assert found[rank][3] < SOON


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_nobody_waits_for_a_mate_that_never_joins(vendor: str, environment: dict[str, str], how: str) -> None:
    results = run_results(leaves_the_island, f"{vendor}:3", timeout=50, env=environment, args=(1, how))
    for r in (results[0], results[2]):
        kind, text, seconds = r.value
        assert kind in ("HetcclError", "PeerLostError") and "rank 1" in text and seconds < SOON, r.value
        assert r.returncode is not None, "it did not end"


def test_in_progress_is_waited_for(vendor: str, environment: dict[str, str]) -> None:
    found = outcomes(vendor, environment, 2, -1, {"STANDIN_CCL_BUSY": "ncclAllReduce:2:40"})
    assert [one[:2] for one in found] == [(6, "")] * 2, found


def test_in_progress_for_ever_ends_at_the_deadline(vendor: str, environment: dict[str, str]) -> None:
    found = outcomes(vendor, environment, 2, -1, {"STANDIN_CCL_BUSY": "ncclAllReduce:3:2000000000"}, timeout=2.0)
    for well, kind, text, seconds in found:
        assert well == 1 and kind in ("TimedOutError", "AbortedError"), text
        assert seconds < SOON
    assert any(kind == "TimedOutError" for _, kind, _, _ in found)


def test_an_error_that_shows_later_is_found(vendor: str, environment: dict[str, str]) -> None:
    found = outcomes(vendor, environment, 2, 0, {"STANDIN_CCL_ASYNC": "1:6", "STANDIN_BUSY": "50"})
    assert found[0][1] in ("VendorError", "TransportError"), found
    assert "remote process" in found[0][2] or "remote error" in found[0][2], found
    assert found[0][3] < SOON, found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_dead_peer_ends_the_others(vendor: str, ranks: int, environment: dict[str, str]) -> None:
    results = run_results(bodies.bereaved, f"{vendor}:{ranks}", timeout=100, env=environment, args=(vendor,))
    assert results[-1].returncode == -9
    for result in results[:-1]:
        assert result.error is None, result.traceback
        kind, text, seconds = result.value
        assert kind == "PeerLostError" and f"rank {ranks - 1}" in text, result.value
        assert seconds < SOON


def test_two_ranks_on_one_device_are_refused(vendor: str, environment: dict[str, str]) -> None:
    """As the real libraries do, when they join."""
    found = run(bodies.joined_twice, f"{vendor}:2", timeout=100, env=environment)
    assert all(kind for kind, _ in found), found
    assert any("Duplicate GPU" in text for _, text in found), found


def test_a_library_of_an_older_version(vendor: str, build: Any, tmp_path: Path) -> None:
    """Without all_to_all, which is then made of sends and receives."""
    build.build(tmp_path, None, "-DOLD")
    env = {**build.environment(tmp_path), "STANDIN_VERSION": "21805"}
    results = run(matrix.body, f"{vendor}:2,host:1", timeout=100, env=env, args=(0.05, 0.0, 7))
    assert not [fault for one in results for fault in one["faults"]]
    (alone, _) = run(swapped, f"{vendor}:2", timeout=100, env=env)
    assert alone["all_to_all"] == 1 and alone["transfer"] == 0


def swapped(rank: int, size: int) -> dict[str, int]:
    import numpy as np

    import hetccl

    with hetccl.init() as comm:
        out = np.zeros(8, np.int32)
        comm.all_to_all(np.arange(8, dtype=np.int32) + 100 * rank, out)
        want = [100 * q + 4 * rank + i for q in range(size) for i in range(4)]
        assert out.tolist() == want
        calls: dict[str, int] = comm.stats()["vendor_calls"]
        return calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_captured_calls_are_replayed(vendor: str, ranks: int, environment: dict[str, str]) -> None:
    assert run(bodies.captured, f"{vendor}:{ranks}", timeout=100, env=environment, args=(vendor,)) == [[]] * ranks


@pytest.mark.parametrize("spec", ["{0}@a:1,{0}@b:1", "{0}:2,host:1"])
def test_capture_between_islands_is_refused(vendor: str, spec: str, environment: dict[str, str]) -> None:
    for found in run(bodies.refused, spec.format(vendor), timeout=100, env=environment, args=(vendor,)):
        for kind, text in found:
            assert kind == "UnsupportedError" and "captured" in text and "inside one island" in text, text
