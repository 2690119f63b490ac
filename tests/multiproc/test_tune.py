# SPDX-License-Identifier: Apache-2.0
"""The tuner on real ranks, the table that all ranks share, and every algorithm timed beside the chosen one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hetccl
from hetccl.core.cost import CostTable
from hetccl.core.tuning import load_tuning, render_tuning
from hetccl.errors import ConfigError, HetcclError
from hetccl.testing.launch import run, run_results

MIX = "host@a:2,sim-a:1,sim-b:1"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetccl.cli.main", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


def chosen_body(rank: int, size: int) -> dict[str, Any]:
    with hetccl.init() as comm:
        box = bytearray(64)
        comm.all_reduce(box)
        return {name: comm.explain("all_reduce", n).algorithm for name, n in (("small", 64), ("large", 1 << 24))}


def test_a_job_is_measured_and_the_file_decides(tmp_path: Path) -> None:
    path = tmp_path / "tuning.yaml"
    done = command("tune", "--ranks", MIX, "--largest", "1K", "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert "tune: path shm" in done.stderr and "tune: all_reduce of 64 bytes" in done.stderr
    table = load_tuning(str(path))
    assert set(table.paths) == {"shm"} and all(p.latency > 0 and p.beta > 0 for p in table.paths.values())
    assert set(table.vendors) == {"host@a", "sim-a", "sim-b"} and "reduce_scatter" in table.vendors["host@a"].calls
    assert {op: len(by) for op, by in table.measured.items()} == {
        "all_reduce": 4, "broadcast": 4, "all_gather": 4, "reduce_scatter": 4
    }  # fmt: skip
    forged = {"all_reduce": {"ring": ((64, 1e-6), (1 << 24, 1.0)), "tree": ((64, 1e-3), (1 << 24, 1e-3))}}
    path.write_text(render_tuning(CostTable(table.paths, table.vendors, table.combine, table.job, forged)))
    found = run(chosen_body, MIX, timeout=60, env={"HETCCL_TUNING": str(path)})
    assert all(f == {"small": "ring", "large": "tree"} for f in found)


def own_file_body(rank: int, size: int, folder: str, who: int) -> str:
    if rank == who:
        os.environ["HETCCL_TUNING"] = os.path.join(folder, f"rank{rank}.yaml")
    with hetccl.init() as comm:
        comm.all_reduce(bytearray(8))
        return comm.explain("broadcast", 64).algorithm


@pytest.mark.parametrize("who", [0, 1])
def test_rank_0s_table_is_adopted_and_another_refused(tmp_path: Path, who: int) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.yaml").write_text("paths: {shm: {latency: 1us, rate: 1GB/s}}\n")
    results = run_results(own_file_body, "host@a:1,host@b:1", timeout=60, args=(str(tmp_path), who))
    if who == 0:
        assert [r.error for r in results] == [None, None] and len({r.value for r in results}) == 1
        return
    assert isinstance(results[0].error, ConfigError) and "HETCCL_TUNING of rank 1" in str(results[0].error)
    assert isinstance(results[1].error, HetcclError)


def test_all_algorithms_are_timed(tmp_path: Path) -> None:
    rows_at = tmp_path / "rows.json"
    done = command("bench", "all_gather", "--all-algorithms", "--ranks", MIX, "-b", "64", "-e", "4K", "-f", "8",
                   "--json", str(rows_at))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "within 10 % of the best" in done.stdout
    rows = json.loads(rows_at.read_text())
    assert len(rows) == 3
    for row in rows:
        assert set(row["times_us"]) == {"chosen", "chosen again", "direct", "heads", "ring", "tree"}
        assert row["algorithm"] in row["times_us"] and row["noise"] >= 0 and row["best_time"] > 0
    refused = command("bench", "all_gather", "--all-algorithms", "--compare", "gloo")
    assert refused.returncode == 2 and "--all-algorithms goes without" in refused.stderr
