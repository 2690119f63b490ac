# SPDX-License-Identifier: Apache-2.0
"""What a count costs that was never seen: 10,000 all_reduces of different counts of a known class, against as many of
one count, on two ranks of two islands.

    python benchmarks/new_counts.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

COUNTS = 10_000


def body(rank: int, size: int) -> dict[str, Any]:
    import numpy as np

    import hetccl
    from hetccl.types import DType, Op, RedOp

    box = np.zeros(COUNTS + 1, np.uint8)
    with hetccl.init() as comm:
        comm.all_reduce(box)

        def timed(counts: list[int]) -> list[float]:
            taken = []
            for count in counts:
                start = time.perf_counter()
                comm.run(Op.ALL_REDUCE, box.ctypes.data, box.ctypes.data, count, DType.UINT8, RedOp.SUM)
                taken.append(time.perf_counter() - start)
            return taken

        middle = COUNTS // 2
        comm.run(Op.ALL_REDUCE, box.ctypes.data, box.ctypes.data, middle, DType.UINT8, RedOp.SUM)
        before = comm.stats()
        new: list[float] = []
        old: list[float] = []
        for part in range(10):  # by turns
            new += timed(list(range(part + 1, COUNTS + 1, 10)))
            old += timed([middle] * (COUNTS // 10))
        after = comm.stats()
    return {
        "new": statistics.median(new),
        "old": statistics.median(old),
        "mean_new": statistics.mean(new),
        "mean_old": statistics.mean(old),
        "plans": after["plan_cache_misses"] - before["plan_cache_misses"],
        "buckets": after["plan_cache_hits"] - before["plan_cache_hits"],
    }


def main() -> None:
    from hetccl.testing.launch import run

    alone = run(body, "host:1", timeout=300)[0]
    print(
        f"one rank, which waits for nobody: {COUNTS} different counts: median {alone['new'] * 1e6:.2f} us a call, one "
        f"count: {alone['old'] * 1e6:.2f} us"
    )
    found = run(body, "host@a:1,host@b:1", timeout=300)
    for rank, r in enumerate(found):
        print(
            f"rank {rank}: {COUNTS} different counts: median {r['new'] * 1e6:.2f} us a call (mean "
            f"{r['mean_new'] * 1e6:.2f}), one count: {r['old'] * 1e6:.2f} us (mean {r['mean_old'] * 1e6:.2f}); "
            f"plans made: {r['plans']}, found in the cache: {r['buckets']}"
        )
    worst = max(r["new"] - r["old"] for r in found)
    print(f"a new count costs {max(0.0, worst) * 1e6:.2f} us more than a known one, the whole call less than "
          f"{max(r['new'] for r in found) * 1e6:.2f} us")  # fmt: skip


if __name__ == "__main__":
    main()
