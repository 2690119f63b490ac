# SPDX-License-Identifier: Apache-2.0
"""`hetccl bench`: times collectives over ranks of one host or of a torchrun job, and checks every size exactly."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from hetccl.cli import bench_algorithms
from hetccl.cli.bench_ops import SHAPES, bus_factor
from hetccl.core.config import parse_bytes
from hetccl.core.launch import die_with_parent, run_ranks
from hetccl.core.ranks import parse_ranks
from hetccl.errors import UsageError
from hetccl.types import DType, RedOp

__all__ = ["add_parser", "run", "table"]

OPS = tuple(SHAPES)
EPILOG = """\
columns: size and count as in nccl-tests (all_gather, reduce_scatter, all_to_all, gather, scatter: of the larger
buffer, and of one block); time is the median of the calls on the slowest rank; algbw = size/time; busbw = algbw times
2(n-1)/n for all_reduce, 1 for broadcast and reduce, (n-1)/n for the rest. The root of rooted operations is rank 0.
wrong counts elements that were not exactly right.
border: payload that left the islands in one call, all ranks together; bound: the least that must.
--compare: time is hetccl under torch, then the other back end, ratio = time/other (below 1: hetccl is faster), and raw,
hetccl without torch, all on the same tensors, by turns, in one run.

--all-algorithms: time of each algorithm in us, the chosen one (twice: their difference is the noise), and whether it is
within 10 % of the best beyond the noise.

examples:
  hetccl bench all_gather --all-algorithms --ranks host:2,sim-a:2
  hetccl bench all_reduce --ranks host@a:1,host@b:1
  hetccl bench all_reduce -b 4 -e 64M -f 4 --ranks oneccl:1,host:1 --transports shm --compare gloo --json rows.json
  torchrun --nnodes 2 ... -m hetccl.cli.main bench all_reduce --ranks nccl:8,rccl:8
"""


def add_parser(commands: Any) -> None:
    p = commands.add_parser(
        "bench",
        help="time collectives, check them, compare with Gloo",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("op", nargs="?", default="all_reduce", choices=OPS, help="the collective (default all_reduce)")
    p.add_argument("-b", "--begin", default="4", metavar="SIZE", help="smallest size, e.g. 4, 64K, 1M (default 4)")
    p.add_argument("-e", "--end", default="64M", metavar="SIZE", help="largest size (default 64M)")
    p.add_argument("-f", "--factor", type=int, default=4, help="from one size to the next (default 4)")
    p.add_argument(
        "--ranks", default="", metavar="SPEC", help="vendors in rank order (default: HETCCL_RANKS or host@a:1,host@b:1)"
    )
    p.add_argument("--transports", default="", metavar="NAMES", help="best first, e.g. shm,tcp")
    p.add_argument("--dtype", default="float32", choices=[d.label for d in DType], metavar="TYPE", help="element type")
    p.add_argument("--op", dest="redop", default="sum", choices=[r.label for r in RedOp], help="operator (default sum)")
    p.add_argument("--iters", default="auto", help="timed calls a size (default auto)")
    p.add_argument("--warmup", default="auto", help="calls before that (default auto)")
    p.add_argument("--compare", default="", metavar="BACKEND", help="gloo: time torch's back end beside ours")
    p.add_argument(
        "--all-algorithms", action="store_true", help="time every algorithm by turns: is the chosen one the best?"
    )
    p.add_argument("--starts", type=int, default=1, help="repeat in so many fresh starts; medians over them")
    p.add_argument("--busy", type=int, default=0, metavar="N", help="N processes that keep a core busy meanwhile")
    p.add_argument("--pin", action="store_true", help="pin each rank to a core")
    p.add_argument("--timeout", type=float, default=600.0, help="seconds for one start (default 600)")
    p.add_argument(
        "--json", default="", metavar="FILE", help="write the rows there as well; - for stdout, without table"
    )
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark. Exit code 0, or 1 if a size was wrong."""
    under_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    options = _options(args, under_launcher)
    if under_launcher:
        return _as_rank(args, options)
    n = len(parse_ranks(options["ranks"]))
    if args.all_algorithms:
        rows = _one_start(options, n, args.timeout, "")
        return bench_algorithms.report(rows, args.json)
    quiet = args.json == "-"
    if not quiet:
        print(
            f"# {n} ranks: {options['ranks']}, transports {options['transports'] or 'by preference'}; "
            f"memcpy of one thread: {memcpy_gbps():.1f} GB/s"
        )
    starts = []
    busy = [_busy_process() for _ in range(args.busy)]
    try:
        for number in range(args.starts):
            starts.append(_one_start(options, n, args.timeout, f"start {number + 1}/{args.starts}, "))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    rows = merge(starts)
    return _report(rows, args.json)


def merge(starts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a size from several starts: medians over the starts of the times and of the ratio."""
    rows = []
    for same in zip(*starts, strict=True):
        row = dict(same[0])
        for key in ("time_us", "raw_time_us", "compare_time_us"):
            row[key] = statistics.median(r[key] for r in same) if row[key] is not None else None
        ratios = [r["time_us"] / r["compare_time_us"] for r in same if r["compare_time_us"]]
        raw_ratios = [r["raw_time_us"] / r["compare_time_us"] for r in same if r["compare_time_us"]]
        row["ratio"] = statistics.median(ratios) if ratios else None
        row["ratios"] = ratios
        row["raw_ratio"] = statistics.median(raw_ratios) if raw_ratios else None
        row["wrong"] = sum(r["wrong"] for r in same)
        row["correct"] = all(r["correct"] for r in same)
        row["starts"] = len(same)
        n, gbps = row["world"], row["nbytes"] / row["time_us"] / 1e3
        row["algbw_gbps"] = gbps
        row["busbw_gbps"] = gbps * bus_factor(row["op"], n)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    compare = rows[0]["compare_name"] if rows else ""
    head = ["size B", "count", "type", "redop", "time us", "algbw GB/s", "busbw GB/s", "wrong", "border B", "bound B"]
    if compare:
        head += [f"{compare} us", "ratio", "raw us", "raw ratio"]
    lines = [head]
    for r in rows:
        line = [str(r["nbytes"]), str(r["count"]), r["dtype"], r["redop"] or "-", f"{r['time_us']:.1f}",
                f"{r['algbw_gbps']:.3f}", f"{r['busbw_gbps']:.3f}", str(r["wrong"]), str(r["border_bytes"]),
                str(r["border_bound"])]  # fmt: skip
        if compare:
            line += [f"{r['compare_time_us']:.1f}", f"{r['ratio']:.3f}", f"{r['raw_time_us']:.1f}",
                     f"{r['raw_ratio']:.3f}"]  # fmt: skip
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def sizes(begin: str, end: str, factor: int) -> list[int]:
    """begin, begin * factor, ... up to end. Raises `UsageError`."""
    try:
        first, last = parse_bytes(begin), parse_bytes(end)
    except ValueError as error:
        raise UsageError(f"{error} is no size; write e.g. 4, 64K or 16M") from None
    if not 0 < first <= last or factor < 2:
        raise UsageError(
            f"sizes from {begin} to {end} by factor {factor}: begin must be more than 0 and at most end, "
            "the factor 2 or more"
        )
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found


def memcpy_gbps(nbytes: int = 64 << 20) -> float:
    """What one thread copies, best of five: no transport through host memory can be faster with one thread."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return nbytes / best / 1e9


def _options(args: argparse.Namespace, under_launcher: bool) -> dict[str, Any]:
    default = "" if under_launcher else "host@a:1,host@b:1"
    for value in (args.iters, args.warmup):
        if value != "auto" and not (value.isdigit() and int(value) > 0):
            raise UsageError(f"--iters and --warmup take auto or a number of calls, not {value!r}")
    if args.all_algorithms and (args.compare or args.starts != 1 or args.busy):
        raise UsageError("--all-algorithms goes without --compare, --starts and --busy")
    if args.compare not in ("", "gloo"):
        raise UsageError(f"--compare knows gloo, not {args.compare!r}")
    return {
        "op": args.op,
        "sizes": sizes(args.begin, args.end, args.factor),
        "ranks": args.ranks or os.environ.get("HETCCL_RANKS", "") or default,
        "transports": args.transports or os.environ.get("HETCCL_TRANSPORTS", ""),
        "dtype": args.dtype,
        "redop": args.redop,
        "iters": 0 if args.iters == "auto" else int(args.iters),
        "warmup": 0 if args.warmup == "auto" else int(args.warmup),
        "compare": args.compare,
        "all_algorithms": args.all_algorithms,
        "pin": args.pin,
        "rows": os.devnull,
    }


def _one_start(options: dict[str, Any], n: int, timeout: float, label: str) -> list[dict[str, Any]]:
    """One job; its rows. Raises `LaunchError` with the ranks' output if it fails."""
    with tempfile.TemporaryDirectory(prefix="hetccl-bench-") as folder:
        path = os.path.join(folder, "rows")
        open(path, "w").close()

        def show(seconds: float) -> None:
            with open(path, encoding="utf-8") as file:
                done = sum(1 for _ in file)
            todo = options["sizes"]
            now = f"size {todo[done]} B" if done < len(todo) else "closing"
            sys.stderr.write(f"\r{label}{done}/{len(todo)} sizes, {now}, {seconds:.0f} s \x1b[K")
            sys.stderr.flush()

        terminal = sys.stderr.isatty()
        argv = ["-m", "hetccl.cli.bench_rank", json.dumps({**options, "rows": path})]
        env = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        job = run_ranks(argv, n, env, timeout, on_idle=show if terminal else None)
        if terminal:
            sys.stderr.write("\r\x1b[K")
        job.check()
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def _as_rank(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Under torchrun and the like: this process is a rank."""
    from hetccl.cli import bench_rank

    if args.starts != 1 or args.busy:
        raise UsageError("--starts and --busy need `hetccl bench` to start the ranks itself; call it without torchrun")
    with tempfile.TemporaryDirectory(prefix="hetccl-bench-") as folder:
        path = os.path.join(folder, "rows")
        code = bench_rank.main(json.dumps({**options, "rows": path}))
        if os.environ["RANK"] != "0":
            return code
        with open(path, encoding="utf-8") as file:
            if args.all_algorithms:
                return bench_algorithms.report([json.loads(line) for line in file], args.json)
            return _report(merge([[json.loads(line) for line in file]]), args.json)


def _report(rows: list[dict[str, Any]], target: str) -> int:
    if target == "-":
        print(json.dumps(rows, indent=1))
    else:
        print(table(rows))
        if target:
            with open(target, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)
    return 0 if all(row["correct"] for row in rows) else 1


def _busy_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=die_with_parent)
