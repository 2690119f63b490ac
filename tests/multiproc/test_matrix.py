# SPDX-License-Identifier: Apache-2.0
"""A seeded part of the product of operations, dtypes, operators and sizes over mixes of islands.

HETCCL_TEST_SEED repeats a run; HETCCL_TEST_FULL=1 takes all of it (`tox -e full`).
"""

from __future__ import annotations

import os
import random
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import matrix

from hetccl.testing.launch import run

SEED = int(os.environ.get("HETCCL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)

MIXES = {
    "1": "host:1",
    "1+1": "host:1,sim-a:1",
    "2+2": "host:2,sim-a:2",
    "1+2": "host:1,sim-a:2",
    "2+1+1": "host:2,sim-a:1,sim-b:1",
    "3+1": "host:3,sim-a:1",
    "3+3": "host:3,sim-a:3",
    "1+4": "sim-a:1,host:4",
    "2+2+1": "host:2,sim-a:2,sim-b:1",
    "alternating 7": "host,sim-a,host,sim-a,host,sim-b,host",
    "all 7 in one": "host:7",
    "two of one vendor": "host@a:1,host@b:1",
    "sim alone": "sim-b:3",
}


@pytest.mark.parametrize("mix", MIXES)
def test_every_cell(mix: str, full: bool) -> None:
    share, large = (1.0, 1.0) if full else (0.15, 0.005)
    print(f"seed {SEED}")
    results = run(matrix.body, MIXES[mix], timeout=3600 if full else 240, args=(share, large, SEED))
    assert len({r["cells"] for r in results}) == 1
    assert results[0]["cells"] > (3000 if full else 300)
    faults = [fault for r in results for fault in r["faults"]]
    assert not faults, f"seed {SEED}:\n" + "\n".join(faults)
