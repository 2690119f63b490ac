# SPDX-License-Identifier: Apache-2.0
"""The matrix on NCCL and RCCL ranks, on stand-ins of their libraries, alone and beside CPU ranks."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import matrix

from hetccl.core import registry
from hetccl.errors import PluginNotFoundError
from hetccl.testing.launch import run

FULL = os.environ.get("HETCCL_TEST_FULL") == "1"
SEED = int(os.environ.get("HETCCL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
MIXES = {
    "one island": "{}:2",
    "beside host": "{}:2,host:2",
    "islands of one": "{0}@a:1,{0}@b:1",
    "three": "{}:3,host:1",
    "alternating": "host,{0},host,{0},{0}",
}
QUICK = {"one island", "beside host", "islands of one"}


def installed(vendor: str) -> bool:
    try:
        registry.vendor(vendor, probe=False)
    except PluginNotFoundError:
        return False
    return True


@pytest.mark.parametrize("vendor", ["nccl", "rccl"])
@pytest.mark.parametrize("mix", [m for m in MIXES if FULL or m in QUICK])
def test_matrix(
    vendor: str, mix: str, environment: dict[str, str], require: Callable[[object, str, str], None]
) -> None:
    require(installed(vendor), f"the plug-in {vendor}", f"pip install ./plugins/hetccl-vendor-{vendor}")
    check(MIXES[mix].format(vendor), environment)


def test_both_vendors_in_one_job(environment: dict[str, str], require: Callable[[object, str, str], None]) -> None:
    """Both say "cuda", and export the same names: each has its own library and its own island."""
    for vendor in ("nccl", "rccl"):
        require(installed(vendor), f"the plug-in {vendor}", f"pip install ./plugins/hetccl-vendor-{vendor}")
    check("nccl:2,rccl:2", environment)


def check(spec: str, environment: dict[str, str]) -> None:
    print(f"seed {SEED}")
    env = {**environment, "STANDIN_SEED": str(SEED)}
    results = run(matrix.body, spec, timeout=110, env=env, args=(0.1, 0.1 if FULL else 0.01, SEED))
    assert results[0]["cells"] > 15
    faults = [fault for r in results for fault in r["faults"]]
    assert not faults, f"seed {SEED}:\n" + "\n".join(faults)
    if ":2" in spec or ":3" in spec:
        carried = [r["stats"]["vendor_calls"] for r in results if r["stats"]["vendor"] in ("nccl", "rccl")]
        assert all(sum(calls.values()) for calls in carried), carried
