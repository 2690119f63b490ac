# SPDX-License-Identifier: Apache-2.0
"""The demo: one training over ranks of two vendors, the same on Gloo, and each vendor's half as a job of its own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hetccl.core import registry
from hetccl.core.ranks import RankSpec, format_ranks, parse_ranks
from hetccl.demo import report
from hetccl.errors import HetcclError

LIMIT = 150.0  # seconds that one run may take


def main(arguments: list[str] | None = None) -> int:
    args = _parse(arguments)
    try:
        spec, remark = (args.ranks, "") if args.ranks else _default_ranks()
        whole = parse_ranks(spec)
        for name in dict.fromkeys(one.vendor for one in whole):
            registry.vendor(name)  # says why a vendor cannot run here, before anything is started
    except HetcclError as error:
        print(f"hetccl.demo: {error}", file=sys.stderr)
        return 2
    halves = _halves(whole)
    print(f"hetccl: training one model over {spec}" + (f"\n({remark})" if remark else ""), flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hetccl-demo-") as folder:
        jobs = Jobs(args, Path(folder))
        try:
            mixed = jobs.run(Job("mixed", "hetccl", whole))[0]
            gloo = jobs.run(Job("gloo", "gloo", whole))[0]
            parts = jobs.run(*(Job(format_ranks(half), "hetccl", half) for half in halves)) if len(halves) > 1 else []
        except JobFailed as error:
            print(f"hetccl.demo: {error}", file=sys.stderr)
            return 1
    seconds = time.monotonic() - began
    report.show(report.comparison(mixed, gloo, parts, remark, args.setup_seconds, seconds))
    return 0 if all(run["identical"] for run in (mixed, gloo, *parts)) else 1


class JobFailed(Exception):
    """A training run ended badly or took too long."""


class Job:
    """One training run: a label for its lines, a back end, and a vendor for every rank."""

    def __init__(self, label: str, backend: str, ranks: list[RankSpec]) -> None:
        self.label, self.backend, self.ranks = label, backend, ranks


class Jobs:
    """Starts training runs under torchrun, watches them, and reads what they found."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder

    def run(self, *jobs: Job) -> list[dict[str, Any]]:
        """Runs all `jobs` at the same time. Returns their figures, or raises JobFailed and leaves no process behind."""
        meeting = Path(tempfile.mkdtemp(dir=self._folder))
        started: list[tuple[Job, Path, subprocess.Popen[bytes]]] = []
        try:
            for number, job in enumerate(jobs):
                result = meeting.with_suffix(f".{number}.json")
                together = f"{meeting}:{len(jobs)}" if len(jobs) > 1 else ""
                started.append((job, result, self._start(job, result, together)))
            self._watch(started)
            return [json.loads(result.read_text()) for _, result, _ in started]
        finally:
            for _, _, process in started:
                _end(process)

    def _start(self, job: Job, result: Path, meet: str) -> subprocess.Popen[bytes]:
        env = dict(os.environ, OMP_NUM_THREADS="1", HETCCL_RANKS=format_ranks(job.ranks))
        if self._args.transports:
            env["HETCCL_TRANSPORTS"] = self._args.transports
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={len(job.ranks)}",
            "-m",
            "hetccl.demo.train",
            "--backend",
            job.backend,
            "--steps",
            str(self._args.steps),
            "--label",
            job.label,
            "--result",
            str(result),
            "--meet",
            meet,
        ]
        return subprocess.Popen(command, env=env, start_new_session=True)

    def _watch(self, started: list[tuple[Job, Path, subprocess.Popen[bytes]]]) -> None:
        deadline = time.monotonic() + LIMIT
        waiting = list(started)
        while waiting:
            for entry in list(waiting):
                job, result, process = entry
                code = process.poll()
                if code is None:
                    continue
                waiting.remove(entry)
                if not result.exists():
                    raise JobFailed(f"the run {job.label!r} failed (exit code {code}); its own message stands above")
            if time.monotonic() > deadline:
                raise JobFailed(f"the run {waiting[0][0].label!r} took longer than {LIMIT:.0f} s and was ended")
            time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a job that still runs: torchrun passes the signal on to its ranks; what then remains is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _default_ranks() -> tuple[str, str]:
    """(ranks, remark): a real vendor beside the host reference, or two pretend vendors where it cannot run here."""
    try:
        registry.vendor("oneccl")
    except HetcclError as error:
        return "sim-a:2,sim-b:2", f"oneCCL cannot run here, so two pretend vendors are used: {error}"
    return "oneccl:2,host:2", ""


def _halves(whole: list[RankSpec]) -> list[list[RankSpec]]:
    """The ranks of each island."""
    return [[one for one in whole if one == kind] for kind in dict.fromkeys(whole)]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hetccl.demo", description=__doc__)
    parser.add_argument("--ranks", default="", help="vendors in rank order; oneccl:2,host:2 where oneCCL runs")
    parser.add_argument("--steps", type=int, default=80, help="training steps of each run")
    parser.add_argument("--transports", default="", help='transports between islands, as in "shm,tcp"')
    parser.add_argument("--setup-seconds", type=float, help="time that building and installing took, for the report")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
