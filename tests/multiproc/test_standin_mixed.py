# SPDX-License-Identifier: Apache-2.0
"""Two GPUs in one island beside two CPU ranks in another, on stand-ins: the same bits on all four ranks although sums
are rounded, whoever combines, and the GPU library is really called. That every operation is exact, the matrix tests."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import standin_bodies as bodies

import hetccl
from hetccl.core import registry
from hetccl.errors import HetcclError, PluginNotFoundError
from hetccl.testing.launch import run
from hetccl.types import DType, Op, RedOp

COUNTS = (1, 1003, 60_001)  # both classes of plans
FULL = os.environ.get("HETCCL_TEST_FULL") == "1"
CASES = [(v, c, w) for v in ("nccl", "rccl") for c in ("host", "oneccl") for w in ("device", "border", "host")]
QUICK = {("nccl", "host", "device"), ("nccl", "host", "border"), ("rccl", "oneccl", "host")}


@pytest.mark.parametrize(("vendor", "cpus", "combine"), [c for c in CASES if FULL or c in QUICK])
def test_all_four_ranks_hold_the_same_bits(
    vendor: str,
    cpus: str,
    combine: str,
    environment: dict[str, str],
    require: Callable[[object, str, str], None],
) -> None:
    for name in (vendor, cpus):
        try:
            registry.vendor(name, probe=name == "oneccl")
        except PluginNotFoundError:
            require(False, f"the plug-in {name}", f"pip install ./plugins/hetccl-vendor-{name}")
        except HetcclError:
            require(False, "oneCCL", "hetccl fetch oneccl")
    env = {**environment, "HETCCL_COMBINE": combine}
    results = run(rounded, f"{vendor}:2,{cpus}:2", timeout=100, env=env, args=(vendor,))
    for cell in results[0]["bits"]:
        assert len({one["bits"][cell] for one in results}) == 1, f"{cell}: ranks differ"
    assert not [fault for one in results for fault in one["faults"]]
    for one in results[:2]:
        assert one["vendor"] == vendor and sum(one["calls"].values()) > 0
        assert combine in one["combined_by"]


def rounded(rank: int, size: int, vendor: str) -> dict[str, Any]:
    """Reductions of random numbers, on device memory where the rank has a GPU: digests of the bits, and faults."""
    import ctypes

    import numpy as np

    bits, faults = {}, []
    with hetccl.init() as comm:
        runtime = bodies.Runtime(vendor) if comm.vendor == vendor else None
        stream = runtime.pointer("StreamCreateWithFlags", 1) if runtime else -1

        def reduced(values: Any, count: int, dtype: DType, redop: RedOp) -> Any:
            call = (count, int(dtype), int(redop))
            if runtime is None:
                comm.run(Op.ALL_REDUCE, values.ctypes.data, values.ctypes.data, *call)
                return values
            x = runtime.memory(values, stream)
            comm.run(Op.ALL_REDUCE, x, x, *call, stream=stream)
            found = runtime.read(x, values, stream)
            runtime.call("Free", ctypes.c_void_p(x))
            return found

        for dtype in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16):
            for redop in (RedOp.SUM, RedOp.AVG, RedOp.MAX):
                for count in COUNTS:
                    rows = [np.random.default_rng(1000 * r + count).standard_normal(count) for r in range(size)]
                    rows = [narrowed(row, dtype) for row in rows]
                    out = reduced(rows[rank].copy(), count, dtype, redop)
                    cell = f"{redop.label} {dtype.label} {count}"
                    bits[cell] = hashlib.sha256(out.tobytes()).hexdigest()
                    exact = np.stack([widened(row, dtype) for row in rows])
                    want = exact.max(0) if redop == RedOp.MAX else exact.sum(0) / (size if redop == RedOp.AVG else 1)
                    off = float(np.linalg.norm(widened(out, dtype) - want) / np.linalg.norm(want))
                    if not off < (2e-2 if dtype in (DType.FLOAT16, DType.BFLOAT16) else 1e-6):
                        faults.append(f"{cell}: off by {off:.1e}")
        told = comm.explain("all_reduce", 60_001 * 4)
        return {
            "bits": bits, "faults": faults, "vendor": comm.vendor, "calls": comm.stats()["vendor_calls"],
            "combined_by": told.combined_by,
        }  # fmt: skip


def narrowed(row: Any, dtype: DType) -> Any:
    import numpy as np

    if dtype == DType.BFLOAT16:
        return (row.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return row.astype({DType.FLOAT32: np.float32, DType.FLOAT64: np.float64, DType.FLOAT16: np.float16}[dtype])


def widened(row: Any, dtype: DType) -> Any:
    import numpy as np

    if dtype == DType.BFLOAT16:
        return (row.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return row.astype(np.float64)
