# SPDX-License-Identifier: Apache-2.0
"""Many checks of torch.distributed in one job, so that its start is paid once.

A check is a function `check(dist, rank, size)` at the top level of a test file; `dist` is torch.distributed with a
hetccl default group. All ranks run the same checks in one order. A rank leaves after the first that fails on it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from hetccl.testing.launch import run_results
from hetccl.testing.usable import require_vendor

__all__ = ["MIXED", "TWO", "assert_passed", "same"]

TWO = "host@a:1,host@b:1"
MIXED = "host:1,oneccl:2,sim-a:1"  # three islands of three vendors


def assert_passed(check: Callable[..., None], checks: tuple[Callable[..., None], ...], ranks: str, **env: str) -> None:
    """Fails with each rank's traceback unless `check` passed on all ranks. The job of `checks` runs on first use."""
    if "oneccl" in ranks:
        require_vendor("oneccl")
    names = tuple(each.__name__ for each in checks)
    results = _job(os.path.abspath(check.__code__.co_filename), names, ranks, tuple(sorted(env.items())))
    name = check.__name__
    wrong = [f"--- rank {rank}\n{said[name]}" for rank, said in enumerate(results) if said[name] != "passed"]
    assert not wrong, "\n".join(wrong)


def same(found: Any, expected: Any) -> None:
    """Raises AssertionError unless both are equal, exactly."""
    import torch

    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), f"{found} != {expected}"


@functools.cache
def _job(path: str, names: tuple[str, ...], ranks: str, env: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    """What each rank says of each check: "passed", a traceback, or why it did not come to it."""
    results = run_results(perform, ranks, timeout=300, env=dict(env), args=(path, names))
    said = []
    for result in results:
        told: Mapping[str, str] = result.value or {}
        ended = result.traceback or f"the rank ended with {result.returncode}"
        rest = f"not reached; {ended}\n{result.stdout[-1000:]}{result.stderr[-2000:]}"
        said.append({name: told.get(name, rest) for name in names})
        if result.value is not None and result.returncode != 0:  # e.g. it crashed when it left
            said[-1][names[-1]] += f"\nthen {rest}"
    return said


def perform(rank: int, size: int, path: str, names: tuple[str, ...]) -> dict[str, str]:
    """In each rank."""
    import datetime

    import torch
    import torch.distributed as dist

    import hetccl.torch  # noqa: F401

    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("hetccl_torch_checks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    dist.init_process_group("hetccl", timeout=datetime.timedelta(seconds=40))
    said: dict[str, str] = {}
    for name in names:
        try:
            getattr(module, name)(dist, rank, size)
        except BaseException:
            said[name] = traceback.format_exc()
            said.update({other: f"not run, because {name} failed" for other in names if other not in said})
            return said
        said[name] = "passed"
    dist.destroy_process_group()
    return said
