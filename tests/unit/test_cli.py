# SPDX-License-Identifier: Apache-2.0
"""The console script: help, errors, doctor and bench."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetccl.cli import bench, doctor
from hetccl.cli.bench_ops import SHAPES, addresses, bus_factor, exact
from hetccl.cli.bench_rank import core_of
from hetccl.cli.main import main
from hetccl.errors import UsageError
from hetccl.types import DType, RedOp
from hetccl.vendors.base import Availability

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("HETCCL_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)


def test_without_a_command_it_shows_help(capsys: Capture) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert "doctor" in out and "bench" in out


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_each_command_has_help(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 8


def test_version(capsys: Capture) -> None:
    import hetccl

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"hetccl {hetccl.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["all_reduce", "-b", "x"], "x is no size"),
        (["all_reduce", "-b", "8", "-e", "4"], "begin must be"),
        (["all_reduce", "-f", "1"], "factor 2 or more"),
        (["all_reduce", "--iters", "many"], "'many'"),
        (["all_reduce", "--compare", "mpi"], "not 'mpi'"),
        (["all_reduce", "--ranks", "host:0"], "no count of ranks"),
    ],
)
def test_an_error_is_one_line_and_code_2(arguments: list[str], says: str, capsys: Capture) -> None:
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("hetccl: ") and says in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""


def test_doctor_shows_every_part(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for section in ("host", "vendors", "transports", "interfaces", "memory", "limits", "torch", "settings", "security"):
        assert section in lines
    assert any(line.split()[:2] == ["host", "ok"] for line in lines)
    assert any("as trustworthy as the store" in line for line in lines)


def test_doctor_as_json(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    checks = {(c["section"], c["name"]): c for c in found["checks"]}
    assert checks["vendors", "host"]["state"] == "ok" and checks["transports", "shm"]["state"] == "ok"
    assert found["lacking"] == {}
    assert "never run on real hardware" in checks["vendors", "sim"]["text"]


def test_doctor_requires(capsys: Capture) -> None:
    assert main(["doctor", "--require", "host", "--require", "sim-a", "--require", "shm"]) == 0
    assert main(["doctor", "--require", "host", "--require", "nccl9"]) == 1
    assert "pip install hetccl-vendor-nccl9" in capsys.readouterr().err


def test_doctor_shows_reason_and_remedy_of_what_is_unusable(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    driver = doctor.registry.vendor("host").driver
    monkeypatch.setattr(type(driver), "probe", lambda self: Availability(False, "no wheels", "buy wheels"))
    assert main(["doctor", "--require", "host"]) == 1
    shown = capsys.readouterr()
    assert "unavailable  no wheels" in shown.out and "-> buy wheels" in shown.out
    assert "no wheels" in shown.err and "buy wheels" in shown.err


def test_doctor_survives_a_part_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail() -> Any:
        raise RuntimeError("boo")

    monkeypatch.setattr(doctor, "_memory", fail)
    assert main(["doctor"]) == 0
    assert "could not be looked at: RuntimeError: boo" in capsys.readouterr().out


def test_doctor_shows_a_bad_setting_and_hides_the_secret(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("HETCCL_SECRET", "hush" * 8)
    monkeypatch.setenv("HETCCL_LOG", "loud")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "HETCCL_LOG=loud cannot be used" in out and "hush" not in out


@pytest.mark.parametrize("style", ["markdown", "rst", "json"])
def test_doctor_lists_variables(style: str, capsys: Capture) -> None:
    assert main(["doctor", "--variables", style]) == 0
    out = capsys.readouterr().out
    assert "HETCCL_RANKS" in out and "HETCCL_TIMEOUT" in out
    if style == "json":
        assert {"name", "accepts", "default", "text", "owner"} == set(json.loads(out)[0])


def test_sizes() -> None:
    assert bench.sizes("4", "64", 4) == [4, 16, 64]
    assert bench.sizes("1K", "5K", 2) == [1024, 2048, 4096]
    with pytest.raises(UsageError):
        bench.sizes("0", "4", 2)


def row(time_us: float, other: float, **more: Any) -> dict[str, Any]:
    return {"op": "all_reduce", "nbytes": 1000, "count": 250, "dtype": "float32", "redop": "sum", "world": 4,
            "time_us": time_us, "raw_time_us": time_us / 2, "compare_time_us": other, "compare_name": "gloo",
            "wrong": 0, "correct": True, "border_bytes": 8, "border_bound": 8, **more}  # fmt: skip


def test_rows_of_several_starts_become_medians() -> None:
    merged = bench.merge([[row(10, 20)], [row(30, 30)], [row(20, 80, wrong=2, correct=False)]])[0]
    assert merged["time_us"] == 20 and merged["compare_time_us"] == 30
    assert merged["ratios"] == [0.5, 1.0, 0.25] and merged["ratio"] == 0.5  # of the starts' own ratios, not 20/30
    assert merged["raw_ratio"] == 0.25
    assert merged["wrong"] == 2 and merged["correct"] is False and merged["starts"] == 3
    assert merged["algbw_gbps"] == pytest.approx(0.05) and merged["busbw_gbps"] == pytest.approx(0.075)
    assert bench.merge([[row(10, 20, op="all_gather")]])[0]["busbw_gbps"] == pytest.approx(0.075)
    assert bench.merge([[row(10, 20, op="broadcast")]])[0]["busbw_gbps"] == pytest.approx(0.1)


def test_the_table_is_aligned() -> None:
    lines = bench.table(bench.merge([[row(10, 20), row(123456.789, 1)]])).splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert "gloo us" in lines[0] and "123456.8" in lines[2]


@pytest.mark.parametrize("op", bench.OPS)
def test_bench_runs_and_checks(op: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = command("bench", op, "-b", "4", "-e", "64K", "-f", "128", "--iters", "5", "--ranks", "host@a:1,host@b:1",
                   "--transports", "shm", "--json", str(out), "--timeout", "60")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("# 2 ranks: host@a:1,host@b:1, transports shm; memcpy of one thread:")
    rows = json.loads(out.read_text())
    assert [r["nbytes"] for r in rows] == [8 if SHAPES[op].blocks else 4, 512, 65536]
    for r in rows:
        assert r["correct"] and r["wrong"] == 0 and r["time_us"] > 0 and r["op"] == op and r["ratio"] is None
        assert r["border_bytes"] == r["border_bound"] > 0
        assert r["ranks"] == "host@a:1,host@b:1" and r["transports"] == "shm" and r["dtype"] == "float32"


def test_bench_of_another_type_and_operator_in_two_starts_beside_busy_processes() -> None:
    done = command("bench", "all_reduce", "-b", "1K", "-e", "1K", "--dtype", "bfloat16", "--op", "max", "--iters", "5",
                   "--starts", "2", "--busy", "1", "--pin", "--json", "-", "--timeout", "60")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (only,) = json.loads(done.stdout)
    assert only["starts"] == 2 and only["correct"] and (only["dtype"], only["redop"]) == ("bfloat16", "max")


@pytest.mark.parametrize("op", bench.OPS)
def test_exact_data_say_what_each_rank_must_find(op: str) -> None:
    """By the definition of each operation, from the inputs of all ranks; integers in float32 add exactly."""
    n, count = 3, 5
    pairs = [exact(op, DType.FLOAT32, RedOp.SUM, rank, n, count) for rank in range(n)]
    inputs = [given.view(np.uint32) for given, _ in pairs]
    total = sum(given.astype(np.float64) for given, _ in pairs) if SHAPES[op].reduces else None
    for rank, (_, want) in enumerate(pairs):
        block = slice(rank * count, (rank + 1) * count)
        if SHAPES[op].root_out and rank:
            assert want is None and addresses(op, rank, pairs[0][0], pairs[0][0])[1] == 0
        elif total is not None:
            assert want is not None and (want == (total[block] if SHAPES[op].many_in else total)).all()
        else:
            expected = {
                "broadcast": inputs[0],
                "all_gather": np.concatenate(inputs),
                "gather": np.concatenate(inputs),
                "scatter": inputs[0][block],
                "all_to_all": np.concatenate([given[block] for given in inputs]) if op == "all_to_all" else None,
            }[op]
            assert want is not None and (want.view(np.uint32) == expected).all()
    assert len({given.tobytes() for given, _ in pairs}) > 1


def test_ranks_are_pinned_apart_and_neighbours_together() -> None:
    assert [core_of(r, 2, [4, 6, 7]) for r in range(2)] == [4, 6]
    assert [core_of(r, 4, [0, 1]) for r in range(4)] == [0, 0, 1, 1]
    assert [core_of(r, 5, [0, 1]) for r in range(5)] == [0, 0, 0, 1, 1]


def test_bus_factors_are_those_of_nccl_tests() -> None:
    found = {op: bus_factor(op, 4) for op in bench.OPS}
    assert found == {"all_reduce": 1.5, "broadcast": 1, "reduce": 1, "all_gather": 0.75, "reduce_scatter": 0.75,
                     "all_to_all": 0.75, "gather": 0.75, "scatter": 0.75}  # fmt: skip


@pytest.mark.parametrize("op", ["all_reduce", "all_to_all", "reduce", "gather", "scatter"])
def test_bench_compares_with_gloo(op: str, require: Any) -> None:
    try:
        import torch.distributed
    except ImportError:
        torch = None
    require(torch and torch.distributed.is_gloo_available(), "torch with Gloo", "pip install torch")
    done = command("bench", op, "-b", "4K", "-e", "4K", "--iters", "10", "--compare", "gloo", "--json", "-",
                   "--timeout", "80")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (only,) = json.loads(done.stdout)
    assert only["compare_name"] == "gloo" and only["compare_time_us"] > 0 and only["raw_time_us"] > 0
    assert only["ratio"] == pytest.approx(only["time_us"] / only["compare_time_us"])


def test_bench_says_why_a_rank_failed() -> None:
    done = command("bench", "all_reduce", "-e", "4", "--ranks", "host:1,nccl9:1", "--timeout", "60")
    assert done.returncode == 2
    assert "vendor 'nccl9' is not installed" in done.stderr and "Traceback" not in done.stderr


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetccl.cli.main", *arguments], capture_output=True, text=True, timeout=110
    )
