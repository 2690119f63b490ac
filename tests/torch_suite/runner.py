# SPDX-License-Identifier: Apache-2.0
"""Runs tests of PyTorch's own class for back ends of torch.distributed, on CPU, and notes how each ended.

    runner.py BACKEND --ranks 3 --out FILE [--seen-as gloo] [--only REGEX] [--shard I/N] [--timeout SECONDS]

The class (`DistributedTest._DistTestBase`) decides by the back end's name which tests apply; `--seen-as` is the name
that it sees. Wherever it then makes a process group of that name, it gets one of BACKEND, which also stands beside Gloo
in the class's table of what back ends can do. BACKEND `gloo_renamed` is Gloo, registered as a foreign back end is.

One line of JSON a test: name, outcome (passed, skipped, failed), reason, seconds. The class reads the environment when
it is imported, so this is a program, not a module. Ranks are forked from here, where torch and hetccl are imported.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

RENAMED = "gloo_renamed"


def main() -> int:
    options = _options()
    folder = tempfile.mkdtemp(prefix="hetccl-torch-suite-")
    owner = os.getpid()
    os.environ.update(
        WORLD_SIZE=str(options.ranks),
        BACKEND=options.seen_as,
        TEMP_DIR=folder,
        TMPDIR=folder,
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        INIT_METHOD=f"file://{folder}/again",  # for the tests that leave the default group and join again
    )
    tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return _run_all(options, folder)
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seen-as", default="gloo")
    parser.add_argument("--only", default=".", help="names that contain a match of this regular expression")
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth test, from number I on")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a test may take")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def _run_all(options: argparse.Namespace, folder: str) -> int:
    suite = _suite(options.backend, options.seen_as, options.timeout, os.path.join(folder, "skipped"))
    first, step = (int(number) for number in options.shard.split("/"))
    names = [n for n in unittest.defaultTestLoader.getTestCaseNames(suite) if re.search(options.only, n)]
    with open(options.out, "w") as out:
        for name in names[first::step]:
            print(json.dumps(_run_one(suite, name, folder)), file=out, flush=True)
    return 0


def _suite(backend: str, seen_as: str, timeout: float, skipped: str) -> type[unittest.TestCase]:
    """PyTorch's class, made to test `backend`, with ranks forked from this process."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    _prepare(backend)
    table = common_distributed.DistTestCases.backend_feature
    for known in table.values():
        if "gloo" in known:
            known.add(backend)

    def of_backend(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("backend") == seen_as:
                kwargs["backend"] = backend
            return make(*[backend if arg == seen_as else arg for arg in args], **kwargs)

        return made

    dist.init_process_group = of_backend(dist.init_process_group)
    dist.new_group = of_backend(dist.new_group)
    common_distributed.get_timeout = lambda _: timeout
    common_distributed.logger.addHandler(_SkipReasons(skipped))
    common_distributed.logger.setLevel(logging.INFO)
    common_distributed.logger.propagate = False

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            for process in self.processes:  # one that hangs must not disturb the next test
                if process.exitcode is None:
                    process.kill()
            for process in self.processes:
                process.join()
                # A rank that skips its test leaves at once, without the chance to clear up after oneCCL.
                for left in Path("/dev/shm").glob(f"{process.pid}:*"):
                    left.unlink(missing_ok=True)
            super().tearDown()

    Suite.__module__, Suite.__qualname__ = "__main__", "Suite"
    return Suite


def _prepare(backend: str) -> None:
    """Registers the back end, and imports what every rank would import, so that ranks begin with it."""
    import torch.distributed as dist

    if backend == RENAMED:
        dist.Backend.register_backend(
            RENAMED,
            lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
            devices=["cpu"],
        )
    elif backend == "hetccl":
        import hetccl.torch._group  # noqa: F401
        from hetccl.core import registry

        registry.vendors()


class _SkipReasons(logging.Handler):
    """A rank that skips a test tells its parent by an exit code only; its log line has the reason."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if "skipping test" in str(record.msg) and isinstance(record.args, tuple):
            with open(self._path, "w") as file:
                file.write(str(record.args[2]))


def _run_one(suite: type[unittest.TestCase], name: str, folder: str) -> dict[str, Any]:
    for left in ("skipped", "again"):
        if os.path.exists(os.path.join(folder, left)):
            os.unlink(os.path.join(folder, left))
    result, began = unittest.TestResult(), time.monotonic()
    suite(name).run(result)
    outcome, reason = "passed", ""
    if result.errors or result.failures:
        text = (result.errors + result.failures)[0][1]
        outcome, reason = "failed", _telling_line(text.split("and exception:")[-1])
    elif result.skipped:
        outcome, reason = "skipped", result.skipped[0][1]
        if os.path.exists(os.path.join(folder, "skipped")):
            with open(os.path.join(folder, "skipped")) as file:
                reason = file.read()
    seconds = round(time.monotonic() - began, 2)
    return {"name": name, "outcome": outcome, "reason": " ".join(reason.split())[:220], "seconds": seconds}


def _telling_line(text: str) -> str:
    """The line of a traceback that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Failure)\b", line)]
    said = [line for line in errors if "exited with error code" not in line]
    return (said or errors or lines or ["?"])[0]


if __name__ == "__main__":
    sys.exit(main())
