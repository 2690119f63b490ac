# SPDX-License-Identifier: Apache-2.0
"""Runs a function as the ranks of a job, each in a process of its own, and brings back what it returned or raised.

    def body(rank, size):
        with hetccl.init() as comm:
            ...
        return rank

    values = run(body, "host@a:1,host@b:1", timeout=30)

A rank's failure fails the caller with every rank's traceback; nothing is left running, whatever happens.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetccl.core.launch import run_ranks
from hetccl.core.ranks import parse_ranks
from hetccl.errors import UsageError

__all__ = ["RankFailed", "RankResult", "run", "run_results"]


class RankFailed(AssertionError):
    """Some ranks failed or did not end in time. The text has each rank's traceback or last lines; `results` has all."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


@dataclass
class RankResult:
    """How one rank ended. `error` is what it raised; `returncode`: None if it was stopped, -N if signal N ended it."""

    rank: int
    value: Any
    error: BaseException | None
    traceback: str
    returncode: int | None
    stdout: str
    stderr: str


def run(
    body: Callable[..., Any] | str,
    ranks: str | int,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    args: tuple[Any, ...] = (),
) -> list[Any]:
    """What each rank returned, in rank order. Raises `RankFailed` if any rank failed or was still running at `timeout`.

    `body` is a function at the top level of its module (or of a class), called as body(rank, size, *args), or Python
    source that finds `rank` and `size` and leaves `result`. `ranks` is a number, or a spec as in HETCCL_RANKS, which is
    then set. Arguments and results are pickled.
    """
    results = run_results(body, ranks, timeout, env, args, stop_on_failure=True)
    if any(r.error is not None or r.returncode != 0 for r in results):
        raise RankFailed(_report(results, timeout), results)
    return [r.value for r in results]


def run_results(
    body: Callable[..., Any] | str,
    ranks: str | int,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    args: tuple[Any, ...] = (),
    stop_on_failure: bool = False,
) -> list[RankResult]:
    """Like `run`, for tests in which ranks are meant to fail: never raises for a rank, lets the others go on."""
    n = ranks if isinstance(ranks, int) else len(parse_ranks(ranks))
    extra = dict(env or {})
    if isinstance(ranks, str):
        extra["HETCCL_RANKS"] = ranks
    extra["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_package_root(), extra.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")])
    )
    with tempfile.TemporaryDirectory(prefix="hetccl-test-") as folder:
        with open(os.path.join(folder, "call"), "wb") as file:
            pickle.dump((_reference(body), args), file)
        job = run_ranks(["-m", "hetccl.testing.launch", folder], n, extra, timeout, stop_on_failure=stop_on_failure)
        return [_result(folder, r) for r in job.ranks]


def main(folder: str) -> int:
    """In the rank's process: calls the function and leaves its result. Part of `run`."""
    import faulthandler
    import signal

    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)  # a rank that is stopped says where it was
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    value, error, text = None, None, ""
    try:
        with open(os.path.join(folder, "call"), "rb") as file:
            reference, args = pickle.load(file)
        value = _call(reference, rank, size, args)
    except BaseException as raised:
        error, text = raised, traceback.format_exc()
    with open(os.path.join(folder, f"result{rank}.new"), "wb") as result:
        result.write(_pickled(value, error, text))
    os.replace(result.name, os.path.join(folder, f"result{rank}"))
    return 1 if error is not None else 0


def _reference(body: Callable[..., Any] | str) -> tuple[str, ...]:
    if isinstance(body, str):
        return ("source", body)
    name = getattr(body, "__qualname__", "<?>")
    if "<" in name:
        raise UsageError(
            f"{name} lies inside another function, so that a new process cannot find it; move it to the top "
            "level of its module and pass what it needs as args"
        )
    module = sys.modules[body.__module__]
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name == module.__name__ and _importable(module.__name__):
        return ("module", module.__name__, name)
    return ("file", os.path.abspath(str(module.__file__)), name)


def _importable(name: str) -> bool:
    """True if a new process would find the same module by name; a test module loaded by its path it would not."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.loader is not None and not name.startswith("tests") and name.startswith("hetccl")


def _call(reference: tuple[str, ...], rank: int, size: int, args: tuple[Any, ...]) -> Any:
    if reference[0] == "source":
        names: dict[str, Any] = {"rank": rank, "size": size, "args": args, "__name__": "__hetccl_rank__"}
        exec(compile(reference[1], "<rank>", "exec"), names)
        return names.get("result")
    if reference[0] == "module":
        found: Any = importlib.import_module(reference[1])
    else:
        spec = importlib.util.spec_from_file_location("hetccl_rank_module", reference[1])
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules["hetccl_rank_module"] = found
        spec.loader.exec_module(found)
    for part in reference[2].split("."):
        found = getattr(found, part)
    return found(rank, size, *args)


def _pickled(value: Any, error: BaseException | None, text: str) -> bytes:
    try:
        data = pickle.dumps((value, error, text))
        pickle.loads(data)  # some exceptions pickle but cannot be read back
        return data
    except Exception as problem:
        shown = RuntimeError(
            f"{type(error).__name__}: {error}" if error else f"the result cannot be pickled: {problem}"
        )
        return pickle.dumps((None, shown, text or str(shown)))


def _result(folder: str, output: Any) -> RankResult:
    value, error, text = None, None, ""
    path = os.path.join(folder, f"result{output.rank}")
    if os.path.exists(path):
        with open(path, "rb") as file:
            value, error, text = pickle.load(file)
    return RankResult(output.rank, value, error, text, output.returncode, output.stdout, output.stderr)


def _report(results: list[RankResult], timeout: float) -> str:
    parts = []
    for r in results:
        if r.error is not None:
            parts.append(f"--- rank {r.rank} raised\n{r.traceback}")
        elif r.returncode is None:
            parts.append(f"--- rank {r.rank} was still running after {timeout:g} s or when another failed")
        elif r.returncode != 0:
            parts.append(f"--- rank {r.rank} ended with {r.returncode}")
        tail = (r.stdout + r.stderr).splitlines()[-40:]
        if tail:
            parts.append(f"--- rank {r.rank} wrote\n" + "\n".join(tail))
    return "ranks failed\n" + "\n".join(parts)


def _package_root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
