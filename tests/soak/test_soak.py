# SPDX-License-Identifier: Apache-2.0
"""Half a minute of the soak (`tox -e soak` runs ten). HETCCL_TEST_SEED repeats a run."""

from __future__ import annotations

import os
import random
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import draws
import soak

from hetccl.core.planner import ALGORITHMS
from hetccl.types import Op

SEED = int(os.environ.get("HETCCL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_jobs_give_exact_answers(capsys: pytest.CaptureFixture[str]) -> None:
    found = soak.soak(SEED, 30, soak.usable_vendors())
    said = capsys.readouterr().out
    with capsys.disabled():
        print(f"\nsoak: seed {SEED}", end=" ")
    assert found == 0, said


def test_a_draw_follows_from_its_numbers() -> None:
    assert draws.draw(7, 3, 11, 4) == draws.draw(7, 3, 11, 4)
    assert draws.topology(7, 3, ("host", "sim-a")) == draws.topology(7, 3, ("host", "sim-a"))
    assert len({draws.draw(7, 3, n, 4).describe() for n in range(50)}) == 50


def test_draws_reach_every_operation_and_type() -> None:
    jobs = [job for n in range(2000) for job in draws.draw(1, 1, n, 4).jobs]
    collectives = [job for job in jobs if isinstance(job, draws.Collective)]
    assert {job.op for job in collectives} == set(draws.COLLECTIVES)
    for op in draws.REDUCING:
        assert {(job.dtype, job.redop) for job in collectives if job.op == op} == set(draws.PAIRS)
    assert {job.op for job in collectives if job.counts} == set(draws.UNEVEN)
    assert {job.op for job in collectives if job.parts} == {Op.ALL_REDUCE}
    forced = [draws.topology(1, n, ("host", "sim-a")).env for n in range(300)]
    assert {env.get("HETCCL_COMBINE") for env in forced} == {None, "host", "device", "border"}
    named = {pair for env in forced for pair in env.get("HETCCL_ALGORITHM", "").split(",")}
    assert named >= {f"{op.label}={name}" for op, found in ALGORITHMS.items() if len(found) > 1 for name in found}


def test_a_wrong_answer_is_a_fault_with_its_draw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOAK_SPOIL", "3")
    assert soak.soak(5, 20, ("host",)) == 1
    said = capsys.readouterr().out
    assert "FAULT: seed 5, topology 0, draw 3;" in said
    assert "--seed 5 --vendors host --topology 0 --draw 3" in said
    monkeypatch.delenv("SOAK_SPOIL")
    assert soak.main(["--seed", "5", "--vendors", "host", "--topology", "0", "--draw", "3", "--times", "1"]) == 0
