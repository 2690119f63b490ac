# SPDX-License-Identifier: Apache-2.0
"""`hetccl bench --all-algorithms`: every algorithm of an operation, by turns, and whether the chosen one is the best.

The chosen one runs on two communicators; how far those two lie apart is the noise floor of the size."""

from __future__ import annotations

import json
import os
from typing import Any

from hetccl.types import DType, Op, RedOp

__all__ = ["measure", "report", "verdict"]

WITHIN = 0.10
BUDGET = 0.3  # seconds for each algorithm at one size
CHOSEN, AGAIN = "chosen", "chosen again"


def measure(options: dict[str, Any]) -> None:
    """Runs in each rank; rank 0 appends a line of JSON a size."""
    import numpy as np

    from hetccl.cli.bench_ops import SHAPES, addresses
    from hetccl.cli.rivals import Rivals
    from hetccl.core.communicator import Communicator
    from hetccl.core.start import meeting

    op, dtype, redop = Op[options["op"].upper()], DType[options["dtype"].upper()], RedOp[options["redop"].upper()]
    store, rank, size = meeting()
    with Communicator(store, rank, size) as world:
        names = world.algorithms(op)
        ways = {CHOSEN: "", **{name: name for name in names}, AGAIN: ""}
        blocks = size if SHAPES[op.label].blocks else 1
        a, b = (np.zeros(max(options["sizes"]) + 4096, np.uint8) for _ in range(2))
        a[:], b[:] = 0, 0
        budget = BUDGET if not options["iters"] else 1e9
        with (
            Rivals(store, rank, size, op, ways) as rivals,
            open(options["rows"] if rank == 0 else os.devnull, "a", encoding="utf-8") as rows,
        ):
            for nbytes in options["sizes"]:
                count = max(1, nbytes // blocks // dtype.itemsize)
                places = addresses(op.label, rank, a, a if blocks == 1 else b)
                times = rivals.times(world, places, count, dtype, redop, budget)
                row = {
                    "op": op.label,
                    "nbytes": count * blocks * dtype.itemsize,
                    "count": count,
                    "algorithm": rivals.comms[CHOSEN].explain(op.label, count * dtype.itemsize, dtype, redop).algorithm,
                    "times_us": {label: t * 1e6 for label, t in times.items()},
                    "ranks": options["ranks"],
                }
                rows.write(json.dumps(row) + "\n")
                rows.flush()


def verdict(row: dict[str, Any]) -> dict[str, Any]:
    """Chosen against best: {time, best, best_time, noise, excess, good}. Excess and noise are shares of the best."""
    times = dict(row["times_us"])
    one, two = times.pop(CHOSEN), times.pop(AGAIN)
    time, noise = (one + two) / 2, abs(one - two) / min(one, two)
    best = min(times, key=lambda name: times[name])
    excess = time / times[best] - 1
    return {
        "time": time,
        "best": best,
        "best_time": times[best],
        "noise": noise,
        "excess": excess,
        "good": row["algorithm"] == best or excess <= WITHIN + noise,
    }


def report(rows: list[dict[str, Any]], target: str) -> int:
    """Prints the table, or the rows as JSON ("-"), or both. Exit code 0."""
    verdicts = [verdict(row) for row in rows]
    if target == "-":
        print(json.dumps([{**row, **v} for row, v in zip(rows, verdicts, strict=True)], indent=1))
        return 0
    names = [name for name in rows[0]["times_us"] if name not in (CHOSEN, AGAIN)]
    lines = [["size B", *(f"{name} us" for name in names), "chosen", "us", "best", "over it", "noise", "within 10 %"]]
    for row, v in zip(rows, verdicts, strict=True):
        lines.append(
            [
                str(row["nbytes"]),
                *(f"{row['times_us'][name]:.1f}" for name in names),
                row["algorithm"],
                f"{v['time']:.1f}",
                v["best"],
                f"{v['excess']:+.1%}",
                f"{v['noise']:.1%}",
                "yes" if v["good"] else "NO",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    good = sum(v["good"] for v in verdicts)
    print(
        f"{rows[0]['op']}: the chosen algorithm is within 10 % of the best, beyond the noise, for {good} of "
        f"{len(rows)} sizes ({good / len(rows):.0%})"
    )
    if target:
        with open(target, "w", encoding="utf-8") as file:
            json.dump([{**row, **v} for row, v in zip(rows, verdicts, strict=True)], file, indent=1)
    return 0
