# SPDX-License-Identifier: Apache-2.0
"""A seeded part of the product with Intel's real library in one of the islands (at most four ranks in it)."""

from __future__ import annotations

import os
import random
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import matrix

from hetccl.testing.launch import run

FULL = os.environ.get("HETCCL_TEST_FULL") == "1"
SEED = int(os.environ.get("HETCCL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)

HOST_ONECCL = {
    "1+1": "host:1,oneccl:1",
    "2+2": "oneccl:2,host:2",
    "1+2": "host:1,oneccl:2",
    "2+1+1": "oneccl:2,host@a:1,host@b:1",
    "3+1": "oneccl:3,host:1",
    "1+4": "host:1,oneccl:4",
    "2+2+1": "host:2,oneccl:2,sim-b:1",
    "alternating 7": "host,oneccl,host,oneccl,host,oneccl,host",
    "one of 4": "oneccl:4",
}
ONECCL_SIM = {
    "1+1": "oneccl:1,sim-a:1",
    "2+2": "sim-a:2,oneccl:2",
    "2+1+1": "oneccl:2,sim-a:1,sim-b:1",
    "1+4": "oneccl:1,sim-a:4",
}
QUICK = {"2+2", "1+2", "alternating 7", "2+1+1"}


pytestmark = pytest.mark.usefixtures("oneccl")


@pytest.mark.parametrize("mix", [m for m in HOST_ONECCL if FULL or m in QUICK])
def test_host_and_oneccl(mix: str) -> None:
    check(HOST_ONECCL[mix])


@pytest.mark.parametrize("mix", [m for m in ONECCL_SIM if FULL or m == "2+2"])
def test_oneccl_and_sim(mix: str) -> None:
    check(ONECCL_SIM[mix])


def check(spec: str) -> None:
    print(f"seed {SEED}")
    results = run(
        matrix.body, spec, timeout=1200 if FULL else 150, args=(0.1 if FULL else 0.05, 0.1 if FULL else 0.004, SEED)
    )
    assert results[0]["cells"] > 15
    faults = [fault for r in results for fault in r["faults"]]
    assert not faults, f"seed {SEED}:\n" + "\n".join(faults)
    carried = [r["stats"]["vendor_calls"] for r in results if r["stats"]["vendor"] == "oneccl"]
    assert carried
    assert spec.count("oneccl:1") or all(sum(calls.values()) for calls in carried), carried
