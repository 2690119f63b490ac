# SPDX-License-Identifier: Apache-2.0
"""`hetccl plan`: what an operation would do on a cluster described in a file, how long it would take, and what would
change if the cluster did."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hetccl.core.algorithms.common import Shared
from hetccl.core.config import parse_bytes
from hetccl.core.cost import CostTable
from hetccl.core.explain import describe_steps
from hetccl.core.forecast import OPERATIONS, Forecast, forecast, ranks_shown, time_of
from hetccl.core.planner import Planner
from hetccl.core.selector import predict
from hetccl.core.topology import Topology
from hetccl.core.topology_file import load_topology
from hetccl.core.tuning import load_tuning
from hetccl.errors import UsageError
from hetccl.types import DType, Op, RedOp

__all__ = ["add_parser", "run"]

EPILOG = """\
--bytes is the size of the buffer of all_reduce, broadcast and reduce, of one rank's block of the others.
Times are those of a cost model: rates and latencies of the file, then of --tuning (see `hetccl tune`), then of our own.
A stage's time is how long its busiest rank is busy with it; stages overlap.

examples:
  hetccl plan all_reduce --bytes 1G --topology cluster.yaml
  hetccl plan all_reduce --bytes 1G --topology cluster.yaml --set islands.amd.rails=8
  hetccl plan broadcast --bytes 16M --topology cluster.yaml --algorithm chain --picture plan.svg --trace plan.json
"""
MOST_ROWS = 48  # ranks in a picture
MOST_TRACED = 256


def add_parser(commands: Any) -> None:
    p = commands.add_parser(
        "plan",
        help="show what an operation would do on a cluster",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("op", choices=OPERATIONS, metavar="OPERATION", help=", ".join(OPERATIONS))
    p.add_argument("--bytes", default="64M", metavar="SIZE", help="e.g. 4, 64K, 1G (default 64M)")
    p.add_argument("--topology", required=True, metavar="FILE", help="the cluster, as YAML")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the file's value: what if")
    p.add_argument("--tuning", default="", metavar="FILE", help="what paths and libraries cost")
    p.add_argument("--dtype", default="float32", choices=[d.label for d in DType], metavar="TYPE", help="element type")
    p.add_argument("--op", dest="redop", default="sum", choices=[r.label for r in RedOp], help="operator (default sum)")
    p.add_argument("--root", type=int, default=0, help="of rooted operations (default 0)")
    p.add_argument("--algorithm", default="", metavar="NAME", help="this one, instead of the one that takes least time")
    p.add_argument("--steps", type=int, default=-1, metavar="RANK", help="show the steps of a rank")
    p.add_argument("--picture", default="", metavar="FILE", help="draw the timeline by rank and lane, as SVG")
    p.add_argument("--trace", default="", metavar="FILE", help="the same for a trace viewer, e.g. Perfetto")
    p.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        nbytes = parse_bytes(args.bytes)
    except ValueError:
        raise UsageError(f"{args.bytes} is no size; write e.g. 4, 64K or 1G") from None
    topology = load_topology(args.topology, args.set).topology()
    table = load_tuning(args.tuning) if args.tuning else CostTable()
    shared = Shared(Op[args.op.upper()], DType[args.dtype.upper()], RedOp[args.redop.upper()], args.root)
    if nbytes < shared.dtype.itemsize:
        raise UsageError(f"{nbytes} bytes are no element of {args.dtype}")
    forced = {args.op: args.algorithm} if args.algorithm else {}
    planner = _planner(topology, forced, table)
    topology = planner.topology
    planner.check(shared)
    found = forecast(planner, shared, nbytes)
    before = None
    if args.set:
        plain = _planner(load_topology(args.topology).topology(), forced, table)
        plain.check(shared)
        before = time_of(plain, shared, nbytes)
    if args.json:
        print(json.dumps(figures(topology, found, before), indent=1))
    else:
        print("\n".join(describe(topology, found, before, args.set)))
    if args.steps >= 0:
        if args.steps >= topology.size:
            raise UsageError(f"--steps {args.steps}: there are ranks 0 to {topology.size - 1}")
        algorithm, its = planner.algorithm_of(shared, found.choice)
        print(f"  steps of rank {args.steps}:")
        print("\n".join(f"    {line}" for line in describe_steps(algorithm(topology, its, args.steps, None))))
    if args.picture:
        from hetccl.cli.plan_picture import draw

        _write(args.picture, draw(topology, _timed(planner, shared, nbytes, found, MOST_ROWS), title(topology, found)))
    if args.trace:
        from hetccl.cli.plan_trace import trace

        _write(args.trace, trace(topology, _timed(planner, shared, nbytes, found, MOST_TRACED), title(topology, found)))
    return 0


def _planner(topology: Topology, forced: dict[str, str], table: CostTable) -> Planner:
    """Within one host devices take the direct path, as ranks find out when they start."""
    planner = Planner(topology, 0, forced, verify="off", table=table)
    devices = any(not i.host_memory for i in topology.islands)
    if devices and len(topology.islands) > 1 and len(set(topology.host_ids)) == 1:
        planner.use_direct()
    return planner


def describe(topology: Topology, found: Forecast, before: float | None, sets: list[str]) -> list[str]:
    """The forecast as lines."""
    timeline, total = found.timeline, found.timeline.total
    lines = [title(topology, found)]
    for text in _islands(topology):
        lines.append(f"  island {text}")
    segments = timeline.segments
    lines.append(f"  algorithm: {found.plan.algorithm} ({found.plan.plan_class} class), {segments} segment(s)")
    if found.others:
        others = sorted(found.others.items(), key=lambda item: item[1])
        lines.append("  instead: " + ", ".join(f"{name} {seconds(t)}" for name, t in others))
    rate = found.nbytes / total / 1e9
    lines.append(f"  predicted time: {seconds(total)} ({rate:.3g} GB/s)")
    bottleneck = timeline.bottleneck
    for stage, t in timeline.stages.items():
        mark = "  <- bottleneck" if stage == bottleneck else ""
        rank = timeline.busiest.get(stage, 0)
        lines.append(f"    {stage:14} {seconds(t):>10}  {t / total:4.0%} of it, rank {rank}{mark}")
    share = f" ({found.border_bytes / found.border_bound:.3f} of it)" if found.border_bound else ""
    about = "" if found.border_exact else "about "
    lines.append(f"  border bytes: {about}{found.border_bytes}, bound of this class: {found.border_bound}{share}")
    if before is not None:
        ratio = before / total
        word = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times as slow"
        lines.append(f"  without {', '.join(sets)}: {seconds(before)}; with it {word}")
    if found.simulated < topology.size:
        lines.append(f"  ({found.simulated} of {topology.size} ranks were simulated; they stand for all)")
    return lines


def figures(topology: Topology, found: Forecast, before: float | None) -> dict[str, Any]:
    """The forecast as plain data, times in seconds."""
    return {
        "operation": found.shared.op.label,
        "bytes": found.nbytes,
        "ranks": topology.size,
        "islands": len(topology.islands),
        "algorithm": found.plan.algorithm,
        "class": found.plan.plan_class,
        "segments": found.timeline.segments,
        "seconds": found.timeline.total,
        "stages": found.timeline.stages,
        "bottleneck": found.timeline.bottleneck,
        "instead": found.others,
        "border_bytes": found.border_bytes,
        "border_bound": found.border_bound,
        "border_exact": found.border_exact,
        "seconds_without_set": before,
    }


def title(topology: Topology, found: Forecast) -> str:
    what = f"{found.shared.op.label} of {found.nbytes} bytes, {found.shared.dtype.label}"
    return f"{what}; {topology.size} ranks in {len(topology.islands)} islands"


def seconds(t: float) -> str:
    """A time in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if t >= scale:
            return f"{t / scale:.4g} {unit}"
    return f"{t * 1e6:.4g} us"


def _islands(topology: Topology) -> list[str]:
    """One line an island; those that differ in name only share one."""
    kinds: dict[str, list[str]] = {}
    for i in topology.islands:
        rails = f", {len(i.rails)} rails" if i.rails else ""
        rate = f", border {i.border_rate / 1e9:.4g} GB/s" if i.speeds else ""
        limit = f", {len(i.borders)} at the border" if i.border else ""
        inner = f", inside {i.inner_rate / 1e9:.4g} GB/s a rank" if i.inner_rate else ""
        kinds.setdefault(f"{i.vendor}, {i.size} ranks{limit}{rails}{rate}{inner}", []).append(i.label or i.vendor)
    return [
        f"{names[0]}: {text}" if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} alike): {text}"
        for text, names in kinds.items()
    ]


def _timed(planner: Planner, shared: Shared, nbytes: int, found: Forecast, most: int) -> Any:
    """A timeline with spans of the ranks that are shown."""
    algorithm, its = planner.algorithm_of(shared, found.choice)
    ranks = ranks_shown(planner.topology, shared, most)
    return predict(planner.selector.costs, its, algorithm, nbytes, ranks, spans=True, most_segments=12)[0]


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
