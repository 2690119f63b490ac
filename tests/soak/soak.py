# SPDX-License-Identifier: Apache-2.0
"""Runs random jobs for a while and checks every answer: python tests/soak/soak.py --seconds 600

    --seed N                      what is drawn (HETCCL_TEST_SEED; without: drawn, and printed)
    --topology T                  only the make-up number T
    --draw D | --draws D-E        only these draws of it, `--times` times
    --vendors host,sim-a,sim-b    of which the make-ups consist

A fault ends the run with the seed, the draw and the commands that repeat it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import draws
import ranks

from hetccl.testing.launch import RankFailed, run

STAY = 8.0  # seconds on one make-up
TIMEOUT = 40  # seconds that any operation may take


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("HETCCL_TEST_SEED", "0")))
    parser.add_argument("--topology", type=int)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--draws")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--vendors", default="")
    args = parser.parse_args(argv)
    seed = args.seed or random.SystemRandom().randrange(1, 1 << 30)
    vendors = tuple(args.vendors.split(",")) if args.vendors else usable_vendors()
    only = None
    if args.draws:
        first, _, last = args.draws.partition("-")
        only = (int(first), int(last))
    elif args.draw is not None:
        only = (args.draw, args.draw)
    if args.topology is None:
        return soak(seed, args.seconds, vendors)
    for _ in range(args.times if only else 1):
        if one(seed, args.topology, vendors, args.seconds, only) is None:
            return 1
    return 0


def soak(seed: int, seconds: float, vendors: tuple[str, ...]) -> int:
    """0 if no fault was found in `seconds`."""
    print(f"soak: seed {seed}, {seconds:g} s, vendors {', '.join(vendors)}", flush=True)
    end = time.monotonic() + seconds
    number, total = 0, {"draws": 0, "jobs": 0, "refused": 0}
    while (left := end - time.monotonic()) > 0:
        found = one(seed, number, vendors, min(STAY, max(left, 1.0)), None)
        if found is None:
            return 1
        total = {key: total[key] + found[key] for key in total}
        number += 1
    print(f"soak: no fault in {number} make-ups, {total['draws']} draws, {total['jobs']} jobs of ranks, ")
    print(f"      {total['refused']} of them refused for HETCCL_COMBINE (seed {seed})")
    return 0


def one(
    seed: int, number: int, vendors: tuple[str, ...], seconds: float, only: tuple[int, int] | None
) -> dict[str, int] | None:
    """Make-up `number` for a while. Counts of all ranks together, or None after a fault, which has been printed."""
    made = draws.topology(seed, number, vendors)
    settings = " ".join(f"{k.removeprefix('HETCCL_')}={v}" for k, v in made.env.items())
    print(f"topology {number}: {made.spec}  {settings}", flush=True)
    env = {"HETCCL_TIMEOUT": str(TIMEOUT), **made.env}
    try:
        results = run(ranks.body, made.spec, seconds + 2 * TIMEOUT + 30, env, (seed, number, seconds, only))
    except RankFailed as failed:
        report(failed, seed, number, vendors)
        return None
    return {"draws": results[0]["draws"], **{key: sum(r[key] for r in results) for key in ("jobs", "refused")}}


def report(failed: RankFailed, seed: int, number: int, vendors: tuple[str, ...]) -> None:
    print(failed)
    began = {r.rank: int(found[-1]) for r in failed.results if (found := re.findall(r"^draw (\d+)$", r.stdout, re.M))}
    wrong = [began[r.rank] for r in failed.results if isinstance(r.error, AssertionError) and r.rank in began]
    again = f"python {os.path.relpath(__file__)} --seed {seed} --vendors {','.join(vendors)} --topology {number}"
    print(f"FAULT: seed {seed}, topology {number}, draw {min(wrong or began.values(), default=0)}", end="; ")
    print(f"the ranks began last: {began}")
    if began:  # who found a wrong answer was in that draw; else whoever is furthest behind
        first = min(wrong or began.values())
        print(f"  the draw alone:            {again} --draw {first}")
        print(f"  with those around it:      {again} --draws {max(0, first - 10)}-{max(began.values())}")
    print(f"  the whole make-up:         {again} --seconds {STAY:g}", flush=True)


def usable_vendors() -> tuple[str, ...]:
    """host and the pretend accelerators, and oneCCL where it is installed."""
    from hetccl.core import registry
    from hetccl.errors import HetcclError

    found = ["host", "sim-a", "sim-b", "sim-c", "sim-x"]
    try:
        registry.vendor("oneccl")
        found.append("oneccl")
    except HetcclError as error:
        print(f"soak: without oneCCL: {error}")
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
