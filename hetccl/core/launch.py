# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job on this host and leaves nothing behind: first failure, deadline or Ctrl-C ends all of them.

Each rank is a process group of its own with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and HETCCL_STORE.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetccl.errors import HetcclError

__all__ = ["Job", "LaunchError", "RankOutput", "die_with_parent", "run_ranks"]

TERM_GRACE_S = 3.0  # between SIGTERM and SIGKILL, so that ranks can say where they are
FAILURE_GRACE_S = 3.0  # after the first failure, so that the others can report what they saw of it


class LaunchError(HetcclError):
    """Ranks failed or did not end in time. Attribute: job."""


@dataclass
class RankOutput:
    """What one rank left. `returncode` is None if it had to be killed, -N if signal N ended it by itself."""

    rank: int
    returncode: int | None
    stdout: str
    stderr: str


@dataclass
class Job:
    """All ranks of a job that has ended. `reason` says why it was stopped early; "" if every rank ended well."""

    ranks: list[RankOutput] = field(default_factory=list)
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason and all(r.returncode == 0 for r in self.ranks)

    def check(self) -> Job:
        """Raises `LaunchError` with the ranks' last lines unless all went well."""
        if not self.ok:
            raise LaunchError(f"{self.reason or 'a rank failed'}\n{self.report()}", job=self)
        return self

    def report(self, lines: int = 30) -> str:
        """The last lines that each rank wrote."""
        parts = []
        for r in self.ranks:
            state = "was stopped" if r.returncode is None else f"ended with {r.returncode}"
            parts.append(f"--- rank {r.rank} {state}")
            parts += r.stdout.splitlines()[-lines:] + r.stderr.splitlines()[-lines:]
        return "\n".join(parts)


def run_ranks(
    argv: Sequence[str],
    n: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
    *,
    stop_on_failure: bool = True,
    rank_env: Callable[[int], Mapping[str, str]] | None = None,
    on_idle: Callable[[float], None] | None = None,
    inherit_stderr: bool = False,
) -> Job:
    """Runs `python *argv` as `n` ranks and waits for them, `timeout` seconds at most.

    `argv` is what follows the interpreter's name: a script, or "-m" and a module, or "-c" and source. `env` adds to
    this process's environment, `rank_env(rank)` to one rank's. With `stop_on_failure` the first failing rank ends the
    others. `on_idle(seconds)` is called about ten times a second. Never raises for a rank's failure: see `Job.check`.
    """
    with _ended_by_sigterm():
        return _run(argv, n, env or {}, timeout, stop_on_failure, rank_env, on_idle, inherit_stderr)


def _run(
    argv: Sequence[str],
    n: int,
    env: Mapping[str, str],
    timeout: float,
    stop_on_failure: bool,
    rank_env: Callable[[int], Mapping[str, str]] | None,
    on_idle: Callable[[float], None] | None,
    inherit_stderr: bool,
) -> Job:
    folder = tempfile.mkdtemp(prefix="hetccl-job-")
    processes: list[subprocess.Popen[bytes]] = []
    files: list[tuple[Any, Any]] = []
    try:
        os.mkdir(os.path.join(folder, "store"))
        common = {
            **os.environ,
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "HETCCL_STORE": f"file://{folder}/store",
            "PYTHONUNBUFFERED": "1",
            **env,
        }
        for rank in range(n):
            out = open(os.path.join(folder, f"{rank}.out"), "w+b")  # noqa: SIM115 - closed below
            err = open(os.path.join(folder, f"{rank}.err"), "w+b")  # noqa: SIM115
            files.append((out, err))
            one = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(rank_env(rank) if rank_env else {})}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *argv],
                    env=one,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=None if inherit_stderr else err,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            )
        reason, stopped = _wait(processes, timeout, stop_on_failure, on_idle)
        ranks = []
        for rank, (process, (out, err)) in enumerate(zip(processes, files, strict=True)):
            code = None if rank in stopped else process.returncode
            ranks.append(RankOutput(rank, code, _read(out), _read(err)))
        return Job(ranks, reason)
    finally:
        _kill(processes)
        for pair in files:
            for file in pair:
                file.close()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(
    processes: list[subprocess.Popen[bytes]],
    timeout: float,
    stop_on_failure: bool,
    on_idle: Callable[[float], None] | None,
) -> tuple[str, set[int]]:
    """Waits without polling the processor: (why the job was stopped, ranks that had to be)."""
    start = time.monotonic()
    deadline, reason = start + timeout, ""
    poller = select.poll()
    running: dict[int, int] = {}
    try:
        for rank, process in enumerate(processes):
            fd = os.pidfd_open(process.pid)
            running[fd] = rank
            poller.register(fd, select.POLLIN)
        while running:
            left = deadline - time.monotonic()
            if left <= 0:
                ranks = ", ".join(map(str, sorted(running.values())))
                reason = reason or f"after {timeout:g} s, ranks still running: {ranks}"
                break
            for fd, _ in poller.poll(min(left * 1000 + 1, 100.0 if on_idle else 60000.0)):
                rank = running.pop(fd)
                poller.unregister(fd)
                os.close(fd)
                if processes[rank].wait() != 0 and stop_on_failure and not reason:
                    reason = f"rank {rank} failed with {_say(processes[rank].returncode)}"
                    deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
            if on_idle:
                on_idle(time.monotonic() - start)
        stopped = set(running.values())
    finally:
        for fd in running:
            os.close(fd)
    _kill(processes)
    return reason, stopped


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends the ranks' whole process groups: their own children too, even where a rank itself has ended."""
    alive = [p for p in processes if p.poll() is None]
    for process in alive:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + TERM_GRACE_S
    for process in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        _signal_group(process, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that ranks and files go; not where the program has a handler."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


_libc = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In the child, before exec: if the launcher itself is killed, the kernel ends the rank."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _read(file: Any) -> str:
    file.flush()
    file.seek(0)
    text: str = file.read().decode("utf-8", "replace")
    return text


def _say(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
