# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests for back ends of torch.distributed, run with hetccl over mixed islands and held to a list.

    suite.py three            3 ranks (host, sim and oneCCL, an island each)
    suite.py eight            8 ranks (3 of host, 2 of sim, 3 of oneCCL)
    suite.py three --gloo     Gloo under another name as well: hetccl must pass at least as many
    suite.py three --update   writes the list anew; reasons of failures that it has are kept

A list (lists/RANKS-torch-VERSION.txt) names each test as passed, or as skipped or failed with the reason. A test that
ends otherwise, or that the list lacks, makes the run fail, also if it newly passes. One that ends otherwise is repeated
alone first, because the class's own barrier gives up after 10 s, which a busy machine may need; the run says so.

The tests see the name "gloo", since most of them ask for a known name. Those that torch keeps for MPI on a CPU
(all_to_all) run a second time under that name.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANKS = {"three": "host:1,sim-a:1,oneccl:1", "eight": "host:3,sim-a:2,oneccl:3"}
COUNTS = {"three": 3, "eight": 8}
VIEWS = {"gloo": ".", "mpi": "all_to_all(?!.*cuda)"}  # name that the tests see: which tests
RENAMED = "gloo_renamed"


@dataclass(frozen=True)
class Ended:
    """How one test ended. `view` is the back end's name that it saw."""

    view: str
    name: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        return (self.view, self.name)

    def line(self) -> str:
        return f"{self.outcome:8}{self.name}" + (f"  | {self.reason}" if self.reason else "")


def run(make_up: str, backend: str, jobs: int = 2, only: dict[str, str] | None = None) -> list[Ended]:
    """Runs the class's tests, `jobs` at a time. `only`: view to a regular expression over names."""
    found = []
    for view, names in (VIEWS if only is None else only).items():
        found += _run_view(make_up, backend, view, names, jobs)
    return found


def _run_view(make_up: str, backend: str, view: str, names: str, jobs: int) -> list[Ended]:
    env = {**os.environ, "HETCCL_RANKS": RANKS[make_up]}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="hetccl-torch-suite-") as folder:
        runners = []
        for job in range(jobs):
            out = Path(folder) / f"{job}.json"
            command = [sys.executable, str(HERE / "runner.py"), backend, "--ranks", str(COUNTS[make_up])]
            command += ["--seen-as", view, "--only", names, "--shard", f"{job}/{jobs}", "--out", str(out)]
            log = out.with_suffix(".log").open("w")
            runners.append((subprocess.Popen(command, env=env, stdout=log, stderr=log), out, log))
        found = []
        try:
            for process, out, log in runners:
                code = process.wait(timeout=3600)
                log.close()
                if code != 0:
                    tail = out.with_suffix(".log").read_text()[-3000:]
                    raise RuntimeError(f"the runner of {backend} ended with {code}\n{tail}")
                found += [Ended(view=view, **json.loads(line)) for line in out.read_text().splitlines()]
        finally:
            for process, _, _ in runners:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
    return sorted(found, key=lambda ended: ended.name)


def list_path(make_up: str) -> Path:
    from importlib.metadata import version

    minor = ".".join(version("torch").split(".")[:2])
    return HERE / "lists" / f"{make_up}-torch-{minor}.txt"


def read_list(path: Path) -> list[Ended]:
    """The tests of a list. A missing file is an empty list."""
    listed, view = [], ""
    for line in path.read_text().splitlines() if path.exists() else ():
        if heading := re.fullmatch(r"\[seen as (\w+)\]", line):
            view = heading[1]
        elif line and not line.startswith("#"):
            ended, _, reason = line.partition("  | ")
            outcome, name = ended.split()
            listed.append(Ended(view, name, outcome, reason))
    return listed


def write_list(path: Path, make_up: str, found: Iterable[Ended]) -> None:
    kept = {old.key: old.reason for old in read_list(path) if old.outcome == "failed"}
    text = [
        "# SPDX-License-Identifier: Apache-2.0",
        f"# PyTorch's DistributedTest._DistTestBase with hetccl, {COUNTS[make_up]} ranks: {RANKS[make_up]}",
        "# Written by tests/torch_suite/suite.py --update; the reasons of failures are written by hand.",
    ]
    view = ""
    for ended in found:
        if ended.view != view:
            view = ended.view
            text += ["", f"[seen as {view}]"]
        reason = kept.get(ended.key, ended.reason) if ended.outcome == "failed" else ended.reason
        text.append(Ended(view, ended.name, ended.outcome, reason).line())
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(text) + "\n")


def differences(found: Iterable[Ended], listed: Iterable[Ended], whole: bool = True) -> list[tuple[Ended | None, str]]:
    """(what was found, what is wrong) for each test that is not as listed; `whole`: all of the list must be there."""
    expected = {old.key: old for old in listed}
    wrong: list[tuple[Ended | None, str]] = []
    for ended in found:
        old = expected.pop(ended.key, None)
        if old is None:
            wrong.append((ended, f"{ended.line()}: not in the list"))
        elif old.outcome != ended.outcome:
            wrong.append((ended, f"{ended.line()}: listed as {old.outcome}"))
    if whole:
        wrong += [(None, f"{old.line()}: listed, but there is no such test") for old in expected.values()]
    return wrong


def settled(make_up: str, found: list[Ended], listed: list[Ended], whole: bool = True) -> tuple[list[str], list[Ended]]:
    """(differences that stay, tests that were as listed only when repeated alone)."""
    stay, repeated = [], []
    for ended, text in differences(found, listed, whole):
        if ended is None:
            stay.append(text)
            continue
        again = run(make_up, "hetccl", 1, {ended.view: f"^{ended.name}$"})
        if differences(again, listed, whole=False):
            stay.append(text)
        else:
            repeated.append(ended)
    return stay, repeated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", choices=list(RANKS))
    parser.add_argument("--gloo", action="store_true", help="run Gloo under another name too")
    parser.add_argument("--update", action="store_true", help="write the list")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the runners end too
    began = time.monotonic()
    found = run(options.ranks, "hetccl", options.jobs)
    for ended in found:
        print(ended.line())
    _say("hetccl", found, time.monotonic() - began)
    stay: list[str] = []
    repeated: list[Ended] = []
    path = list_path(options.ranks)
    if options.update:
        write_list(path, options.ranks, found)
        print(f"wrote {path}")
    else:
        stay, repeated = settled(options.ranks, found, read_list(path))
    for ended in repeated:
        print(f"AS LISTED WHEN REPEATED {ended.line()}")
    for text in stay:
        print(f"NOT AS LISTED {text}")
    enough = not options.gloo or _enough(options, found, repeated)
    return 0 if enough and not stay else 1


def _enough(options: argparse.Namespace, found: list[Ended], repeated: list[Ended]) -> bool:
    """Whether hetccl passed at least as many tests as Gloo does under a name that torch does not know."""
    began = time.monotonic()
    gloo = run(options.ranks, RENAMED, options.jobs, {"gloo": VIEWS["gloo"]})
    _say("Gloo under another name", gloo, time.monotonic() - began)
    listed = {old.key for old in read_list(list_path(options.ranks)) if old.outcome == "passed"}
    passed = {ended.key for ended in found if ended.outcome == "passed"}
    passed |= {ended.key for ended in repeated if ended.key in listed}
    ours = {name for view, name in passed if view == "gloo"}
    theirs = {ended.name for ended in gloo if ended.outcome == "passed"}
    print(f"passed by Gloo under another name only: {', '.join(sorted(theirs - ours)) or '-'}")
    print(f"passed by hetccl only: {', '.join(sorted(ours - theirs)) or '-'}")
    return len(ours) >= len(theirs)


def _say(who: str, found: list[Ended], seconds: float) -> None:
    for view in VIEWS:
        tally = collections.Counter(ended.outcome for ended in found if ended.view == view)
        if tally:
            parts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.items()))
            print(f"{who}, seen as {view}: {parts} of {sum(tally.values())}; {seconds:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
