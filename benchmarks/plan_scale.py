# SPDX-License-Identifier: Apache-2.0
"""How planning grows with the number of ranks: time of one rank's plan and of `hetccl plan`, and its memory.

    python benchmarks/plan_scale.py --svg docs/results/plan-scale.svg --json docs/results/raw/plan-scale.json

Clusters of 64 islands and of 8, half of either vendor, 256 ranks an island at most. Times are of the process's own
CPU, so that other jobs on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from typing import Any

ALGORITHMS = ("exchange", "owners", "ring", "tree")


def cluster(islands: int, size: int) -> str:
    lines = ["islands:"]
    for i in range(islands):
        vendor = ("nccl", "rccl")[i % 2]
        lines.append(
            f"  i{i}: {{vendor: {vendor}, ranks: {size}, hosts: {max(1, size // 8)}, rails: {min(8, size)}, "
            "rate: 50GB/s, latency: 5us, inside: {rate: 300GB/s, latency: 20us}}"
        )
    return "\n".join(lines) + "\n"


def measure(islands: int, size: int) -> dict[str, Any]:
    """Runs in a process of its own, for its memory."""
    from hetccl.core.algorithms.common import Shared
    from hetccl.core.forecast import forecast
    from hetccl.core.planner import ALGORITHMS as ALL
    from hetccl.core.planner import Planner
    from hetccl.core.topology_file import parse_topology
    from hetccl.types import DType, Op, RedOp

    shared = Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM)
    wall, start = time.perf_counter(), time.process_time()
    topology = parse_topology(cluster(islands, size)).topology()
    found = forecast(Planner(topology, 0, {}, verify="off"), shared, 1 << 30)
    whole, wall = time.process_time() - start, time.perf_counter() - wall
    one = {}
    for name in ALGORITHMS:
        fresh = parse_topology(cluster(islands, size)).topology()
        _ = fresh.digest, fresh.border.units, fresh.border.pieces()  # of the topology, whatever is planned
        rank = fresh.size // 2
        start = time.process_time()
        ALL[Op.ALL_REDUCE][name](fresh, shared, rank, None)
        one[name] = time.process_time() - start
    return {
        "ranks": topology.size,
        "islands": islands,
        "forecast_s": whole,
        "forecast_wall_s": wall,
        "plan_s": one,
        "algorithm": found.plan.algorithm,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def svg(rows: list[dict[str, Any]]) -> str:
    """Both figures over the number of ranks, both axes logarithmic."""
    width, height, left, top = 640, 360, 70, 40
    series = []
    for islands, colour in ((8, "#4c78a8"), (64, "#e45756")):
        mine = [r for r in rows if r["islands"] == islands]
        series.append((f"hetccl plan, {islands} islands", colour, "", [(r["ranks"], r["forecast_s"]) for r in mine]))
        slowest = [(r["ranks"], max(r["plan_s"].values())) for r in mine]
        series.append((f"one rank's slowest plan, {islands} islands", colour, "5 4", slowest))
    x0, x1 = min(r["ranks"] for r in rows), max(r["ranks"] for r in rows)
    y0, y1 = 1e-5, 10.0

    def at(n: float, t: float) -> tuple[float, float]:
        x = left + (width - left - 20) * math.log(n / x0) / math.log(x1 / x0)
        y = top + (height - top - 50) * (1 - math.log(max(t, y0) / y0) / math.log(y1 / y0))
        return x, y

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 90}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height + 90}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">Planning an all_reduce of 1 GiB: CPU time by number of ranks</text>',
    ]
    for k in range(-5, 2):
        _, y = at(x0, 10.0**k)
        label = f"{10.0 ** (k + 3):g} ms" if k < 0 else f"{10.0**k:g} s"
        out.append(f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for n in sorted({r["ranks"] for r in rows}):
        x, _ = at(n, 1.0)
        out.append(f'<text x="{x:.1f}" y="{height - 30}" text-anchor="middle" font-size="10">{n}</text>')
    for number, (name, colour, dash, points) in enumerate(series):
        line = " ".join("{:.1f},{:.1f}".format(*at(n, t)) for n, t in points)
        style = f'stroke="{colour}" stroke-width="2" fill="none" stroke-dasharray="{dash}"'
        out.append(f'<polyline points="{line}" {style}/>')
        out += ['<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*at(n, t), colour) for n, t in points]
        y = height + 4 + 20 * number
        out.append(f'<line x1="{left}" x2="{left + 30}" y1="{y}" y2="{y}" {style}/>')
        out.append(f'<text x="{left + 38}" y="{y + 4}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", default="", help="write the plot there")
    parser.add_argument("--json", default="", help="write the figures there")
    parser.add_argument("--one", nargs=2, type=int, metavar=("ISLANDS", "SIZE"), help="one cluster, in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    rows = []
    print("ranks  islands  hetccl plan (cpu, wall)  one rank's plan by algorithm          memory")
    for islands in (8, 64):
        for size in (1, 4, 16, 64, 256):
            command = [sys.executable, os.path.abspath(__file__), "--one", str(islands), str(size)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
            rows.append(row)
            one = ", ".join(f"{name} {t * 1e3:.2f} ms" for name, t in row["plan_s"].items())
            print(
                f"{row['ranks']:5}  {islands:7}  {row['forecast_s']:.2f} s, {row['forecast_wall_s']:.2f} s  {one}  "
                f"{row['memory_mib']:.0f} MiB",
                flush=True,
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    if args.svg:
        with open(args.svg, "w", encoding="utf-8") as file:
            file.write("<!-- SPDX-License-Identifier: Apache-2.0 -->\n" + svg(rows))


if __name__ == "__main__":
    main()
