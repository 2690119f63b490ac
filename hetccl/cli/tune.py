# SPDX-License-Identifier: Apache-2.0
"""`hetccl tune`: measures the paths and vendor calls of the job at hand, and each algorithm, into a tuning file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from typing import Any

from hetccl.core.launch import run_ranks
from hetccl.core.ranks import parse_ranks
from hetccl.core.tuning import load_tuning
from hetccl.errors import UsageError

__all__ = ["add_parser", "run"]

EPILOG = """\
The file is YAML. HETCCL_TUNING=tuning.yaml makes jobs use it: rank 0's table is adopted by all ranks, and a rank that
names another file is refused. Times of whole operations (`measured`) hold for the same job only; the others choose by
its paths and calls. Measure on a quiet machine, with the settings that the jobs will have.

examples:
  hetccl tune --ranks oneccl:2,host:2 --output tuning.yaml
  HETCCL_BORDER_RATE=100M HETCCL_SIM_RATE=400M hetccl tune --ranks sim-a:2,sim-b:2
  torchrun --nnodes 2 ... -m hetccl.cli.main tune --output tuning.yaml
"""


def add_parser(commands: Any) -> None:
    p = commands.add_parser(
        "tune",
        help="measure this job's paths and libraries into a tuning file",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--output", default="tuning.yaml", metavar="FILE", help="where to write it (default tuning.yaml)")
    p.add_argument(
        "--ranks", default="", metavar="SPEC", help="vendors in rank order (default: HETCCL_RANKS or host@a:1,host@b:1)"
    )
    p.add_argument("--transports", default="", metavar="NAMES", help="best first, e.g. shm,tcp")
    p.add_argument("--largest", default="64M", metavar="SIZE", help="largest operation that is timed (default 64M)")
    p.add_argument("--quick", action="store_true", help="paths and calls only, no whole operations")
    p.add_argument("--timeout", type=float, default=900.0, help="seconds for all of it (default 900)")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from hetccl.cli.bench import sizes

    under_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    default = "" if under_launcher else "host@a:1,host@b:1"
    options = {
        "ranks": args.ranks or os.environ.get("HETCCL_RANKS", "") or default,
        "transports": args.transports or os.environ.get("HETCCL_TRANSPORTS", ""),
        "sizes": [] if args.quick else sizes("64", args.largest, 4),
        "output": os.path.abspath(args.output),
    }
    folder = os.path.dirname(options["output"])
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} is no folder that can be written to; name another file with --output")
    if under_launcher:
        from hetccl.cli import tune_rank

        code = tune_rank.main(json.dumps({**options, "progress": ""}))
        if code or os.environ["RANK"] != "0":
            return code
    else:
        _start(options, args.timeout)
    table = load_tuning(options["output"])
    calls = sum(len(v.calls) for v in table.vendors.values())
    print(
        f"{args.output}: {len(table.paths)} path(s), {calls} vendor call(s), "
        f"{sum(len(by) for by in table.measured.values())} algorithm(s) of {len(table.measured)} operation(s)\n"
        f"use it: export HETCCL_TUNING={args.output}"
    )
    return 0


def _start(options: dict[str, Any], timeout: float) -> None:
    with tempfile.TemporaryDirectory(prefix="hetccl-tune-") as folder:
        progress = os.path.join(folder, "progress")
        open(progress, "w").close()
        shown = 0

        def show(_: float) -> None:
            nonlocal shown
            with open(progress, encoding="utf-8") as file:
                lines = file.read().splitlines()
            for line in lines[shown:]:
                print(line, file=sys.stderr, flush=True)
            shown = len(lines)

        argv = ["-m", "hetccl.cli.tune_rank", json.dumps({**options, "progress": progress})]
        env = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        job = run_ranks(argv, len(parse_ranks(options["ranks"])), env, timeout, on_idle=show)
        show(0.0)
        job.check()
