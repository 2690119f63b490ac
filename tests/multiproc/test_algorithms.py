# SPDX-License-Identifier: Apache-2.0
"""Every algorithm, forced, gives the right bits on real mixes of islands, and says its name."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import matrix
import uneven

import hetccl
from hetccl.core.planner import ALGORITHMS
from hetccl.testing.launch import run
from hetccl.types import Op

OPS = (Op.ALL_REDUCE, Op.BROADCAST, Op.ALL_GATHER, Op.REDUCE_SCATTER)
MIXES = (
    "host@a:1,host@b:1,host@c:1",
    "host:2,sim-a:2",
    "sim-a:1,host:2,sim-a:1,sim-b:1",
    "host@a:2,host@b:1,host@c:1,sim-a:1",
)
SEED = int(os.environ.get("HETCCL_TEST_SEED", "11"))
TURNS = max(len(set(names) - {"star"}) for op, names in ALGORITHMS.items() if op in OPS)


def forced(turn: int) -> dict[str, str]:
    """One algorithm for each operation: between them, the turns force all."""
    names = {op: sorted(set(ALGORITHMS[op]) - {"star"}) for op in OPS}  # that one is in test_direct.py
    return {op.label: names[op][turn % len(names[op])] for op in OPS}


def body(rank: int, size: int, turn: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    todo = [c for c in matrix.cells() if c.op in OPS]
    small = [c for c in todo if c.count <= matrix.LARGE]
    large = [c for c in todo if c.count > matrix.LARGE and not c.uneven]
    faults: list[str] = []
    with hetccl.init() as comm:
        names = {op: comm.explain(op, 1000).algorithm for op in forced(turn)}
        chosen = draw.sample(small, 60) + [c for op in OPS for c in draw.sample([x for x in large if x.op == op], 1)]
        for number, cell in enumerate(chosen):
            if cell.uneven:
                fault = uneven.run_cell(comm, *cell[:4], rank, size, gaps=number % 3 == 0)
            else:
                fault = matrix.run_cell(comm, cell, rank, size, number % 2 == 1, number % 3 == 0)
            if fault:
                faults.append(fault)
        for op in forced(turn):
            e = comm.explain(op, 8 * 1000 * size)
            assert e.border_bytes == e.border_bound, (op, str(e))
        return {"faults": faults[:20], "names": names}


@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("mix", MIXES)
def test_a_forced_algorithm_gives_the_right_bits(mix: str, turn: int) -> None:
    wanted = forced(turn)
    words = ",".join(f"{op}={name}" for op, name in wanted.items())
    env = {"HETCCL_ALGORITHM": words, "HETCCL_SIM_SEGMENT_BYTES": "65536"}
    for result in run(body, mix, timeout=120, env=env, args=(turn, SEED + turn)):
        assert not result["faults"], result["faults"]
        assert result["names"] == wanted
