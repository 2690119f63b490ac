# SPDX-License-Identifier: Apache-2.0
"""Every algorithm over many topologies: proved by the verifier, and border bytes equal to the bound of its class."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import verify_cases as cases

from hetccl.core.algorithms.all_reduce_star import hub_of, star
from hetccl.core.algorithms.common import Shared
from hetccl.core.explain import border_bound
from hetccl.core.planner import ALGORITHMS
from hetccl.core.topology import Island, Topology
from hetccl.core.verify.checker import verify_class
from hetccl.errors import UnsupportedError
from hetccl.types import DType, Op, RedOp

OPS = (Op.ALL_REDUCE, Op.BROADCAST, Op.ALL_GATHER, Op.REDUCE_SCATTER)
PAIRS = [(op, name) for op in OPS for name in ALGORITHMS[op]]


def drawn(draw: random.Random, islands: int, limits: bool = False) -> Topology:
    """Islands of one to three ranks, contiguous or dealt, host or device memory, libraries of any ability."""
    ranks = [i for i in range(islands) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.5:
        draw.shuffle(ranks)
    groups = [[r for r, i in enumerate(ranks) if i == island] for island in range(islands)]
    which = range(islands)
    device = [i for i in which if draw.random() < 0.4]
    poor = [i for i in which if draw.random() < 0.2]
    top = cases.topology(groups, device, poor)
    return replace(top, islands=tuple(limited(draw, i) for i in top.islands)) if limits else top


def with_hub(draw: random.Random, islands: int) -> Topology:
    """Devices that a star can have in its middle, anywhere among the ranks."""
    hub, others = draw.randint(1, 4), [draw.randint(1, 2) for _ in range(islands - 1)]
    ranks = list(range(hub + sum(others)))
    draw.shuffle(ranks)
    cut = [0, *accumulate([hub, *others])]
    first, *rest = (ranks[a:b] for a, b in pairwise(cut))
    return cases.starry(first, rest, poor=[i for i in range(islands) if draw.random() < 0.3])


def limited(draw: random.Random, island: Island) -> Island:
    """The same island with some ranks at the border only, or rails of different speeds."""
    if draw.random() < 0.4:
        return island
    border = tuple(sorted(draw.sample(island.ranks, draw.randint(1, island.size))))
    speeds = tuple(draw.choice((1e9, 2e9, 5e9)) for _ in border)
    return replace(island, border=() if border == island.ranks else border, speeds=speeds)


@pytest.mark.parametrize(("op", "name"), PAIRS, ids=[f"{op.label}-{name}" for op, name in PAIRS])
def test_every_algorithm_is_proved_and_meets_its_bound(op: Op, name: str) -> None:
    draw = random.Random(hash((int(op), len(name))))
    proved = 0
    for number, islands in enumerate((2, 3, 4, 5, 2, 3, 3, 4, 2)):
        top = with_hub(draw, min(islands, 4)) if name == "star" else drawn(draw, islands, number > 4)
        root = draw.randrange(top.size) if op == Op.BROADCAST else 0
        redop = draw.choice((RedOp.SUM, RedOp.AVG, RedOp.MAX)) if op in cases.REDUCING else RedOp.SUM
        dtype = draw.choice((DType.FLOAT32, DType.FLOAT16))
        shared = Shared(op, dtype, redop, root)
        try:
            made = [ALGORITHMS[op][name](top, shared, r, None) for r in range(top.size)]
        except UnsupportedError:  # refused alike by all ranks; only where the border is limited
            assert any(i.border for i in top.islands)
            for r in range(top.size):
                with pytest.raises(UnsupportedError):
                    ALGORITHMS[op][name](top, shared, r, None)
            continue
        proved += 1
        assert {p.algorithm for p in made} == {name}
        verify_class(top, shared, made, few=True)
        for count in (1, 1000):
            sent = sum(sum(p.sent_elements(count).values()) for p in made)
            assert sent == border_bound(top, op, made[0].plan_class, count, 1, root), (top, count)
    assert proved >= 5


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.label)
def test_there_are_three_algorithms_and_their_plans_differ(op: Op) -> None:
    top = cases.topology([[0, 1], [2, 3], [4, 5], [6, 7]])
    plans = {
        tuple((f.kind, f.peers) for f in make(top, Shared(op, DType.FLOAT32, RedOp.SUM), 2, None).flows)
        for make in (ALGORITHMS[op][name] for name in cases.able(op, top))
    }
    assert len(plans) >= 3


REFUSED = (
    ([[0, 1], [2, 3]], [], True),  # no devices
    ([[0, 1], [2, 3], [4]], [0, 1], True),  # two islands of them
    ([[0, 1], [2, 3]], [0], False),  # staged
    ([[0, 1], list(range(2, 10))], [0], True),  # too many others
)


@pytest.mark.parametrize(("islands", "devices", "direct"), REFUSED)
def test_a_star_needs_one_hub_on_the_direct_path_and_few_others(
    islands: list[list[int]], devices: list[int], direct: bool
) -> None:
    top = cases.topology(islands, devices)
    top = replace(top, islands=tuple(replace(i, direct=direct and not i.host_memory) for i in top.islands), _place={})
    assert hub_of(top) is None
    with pytest.raises(UnsupportedError, match="one island of devices on the direct path"):
        star(top, Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM), 0)


def test_a_star_asks_nothing_of_the_others_libraries() -> None:
    top = cases.starry([1, 2], [[0, 3]])
    made = [star(top, Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM), r) for r in range(4)]
    calls = [sum(s.kind.is_call for s in plan.steps) for plan in made]
    assert calls[0] == calls[3] == 0 and calls[1] == calls[2] > 0
    firsts = {next(f.peers for f in made[r].flows) for r in (0, 3)}
    assert len(firsts) == 2  # they do not all begin with the same device
