# SPDX-License-Identifier: Apache-2.0
"""Plans of every operation over random topologies: border bytes equal the bound, messages pair, island calls agree."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest

from hetccl.core.algorithms.common import Shared
from hetccl.core.explain import border_bound
from hetccl.core.plan import FlowKind, Plan, Slice, StepKind, slice_range
from hetccl.core.planner import ALGORITHMS, REDUCING, Planner
from hetccl.core.topology import Island, IslandLink, Topology
from hetccl.types import DType, Op, RedOp

F32 = DType.FLOAT32
VENDOR_CALLS = (StepKind.ALL_REDUCE, StepKind.TRANSFER)  # first and last
UNEVEN = (Op.ALL_GATHER, Op.GATHER, Op.SCATTER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL)


def topology(draw: random.Random, most: int = 4, plain: bool = False) -> Topology:
    """Up to `most` islands of up to five ranks, dealt in any order; host or device memory; libraries of any ability.
    Unless `plain`, also few border ranks, unequal speeds and islands that do not reach each other."""
    owners = [c for c in range(draw.randint(1, most)) for _ in range(draw.randint(1, 5))]
    draw.shuffle(owners)
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, owner in enumerate(owners):
        groups[owner].append(rank)
    islands = []
    for index, ranks in enumerate(sorted(groups.values(), key=lambda g: g[0])):
        border = sorted(draw.sample(ranks, draw.randint(1, len(ranks)))) if draw.random() < 0.5 and not plain else ranks
        speeds = tuple(draw.choice((10e9, 25e9, 50e9)) for _ in border) if draw.random() < 0.5 and not plain else ()
        islands.append(
            Island(
                index,
                tuple(ranks),
                "x",
                "",
                draw.random() < 0.5,
                draw.random() < 0.5,
                4 << 20,
                tuple(draw.choice((0, 0x1F)) for _ in DType),
                draw.choice((0, (1 << 19) - 1)),
                draw.randint(0, 3),
                border=tuple(border) if border != ranks else (),
                speeds=speeds,
            )
        )
    links = () if plain else missing_links(draw, len(islands))
    return Topology(len(owners), tuple(islands), 1 << 20, links=links)


def missing_links(draw: random.Random, n: int) -> tuple[IslandLink, ...]:
    """Pairs without a direct way, so that a random tree stays."""
    if draw.random() < 0.4:
        return ()
    tree = {(draw.randrange(c), c) for c in range(1, n)}
    pairs = itertools.combinations(range(n), 2)
    return tuple(IslandLink(a, b, False) for a, b in pairs if (a, b) not in tree and draw.random() < 0.6)


def plans(topo: Topology, op: Op, redop: RedOp, root: int, counts: tuple[int, ...] = ()) -> list[Plan]:
    algorithm = next(iter(ALGORITHMS[op].values()))
    if op == Op.ALL_REDUCE:
        algorithm = Planner(topo, 0, {})._algorithm(Shared(op, F32, redop), "owners")
    return [algorithm(topo, Shared(op, F32, redop, root, counts=counts), r, None) for r in range(topo.size)]


def check(topo: Topology, made: list[Plan], count: int) -> int:
    """Raises if plans do not fit together; returns the elements that cross the border."""
    lengths = made[0].segments(count)
    assert all(plan.segments(count) == lengths for plan in made)
    out: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    inn: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for plan, length in itertools.product(made, lengths):
        me = plan.rank

        def size(s: Slice, length: int = length, plan: Plan = plan) -> int:
            lo, hi = slice_range(s, length, plan.units)
            return hi - lo

        for flow in plan.flows:
            n = size(flow.src if flow.src.buffer >= 0 else flow.dst)
            targets: tuple[int, ...] = ()
            sources: tuple[int, ...] = flow.peers
            if flow.kind == FlowKind.SEND:
                targets, sources = flow.peers, ()
            elif flow.kind == FlowKind.PASS:
                targets, sources = flow.peers[-1:], flow.peers[:-1]
            elif flow.kind == FlowKind.FORWARD:
                targets, sources = flow.peers[1:], flow.peers[:1]
            elif flow.kind == FlowKind.EXCHANGE:
                targets = flow.peers
            for peer in flow.peers:
                assert topo.place(peer)[0] != topo.place(me)[0] and topo.linked(me, peer)
            for peer in targets:
                out[me, peer, flow.channel].append(n)
            for peer in sources:
                inn[peer, me, flow.channel].append(n)
            for peer in flow.peers if flow.kind == FlowKind.OWN and flow.give_back else ():
                out[me, peer, 1].append(n)
    assert out == inn
    for island in topo.islands:
        calls = {
            tuple(
                (s.kind, s.root, s.to, s.as_bytes, s.shift, slice_range(s.len, lengths[0], made[r].units))
                for s in made[r].steps
                if VENDOR_CALLS[0] <= s.kind <= VENDOR_CALLS[1]
            )
            for r in island.ranks
        }
        assert len({tuple((*c[:5], c[5][1] - c[5][0]) for c in steps) for steps in calls}) == 1
    for plan in made:
        for index, step in enumerate(plan.steps):
            assert step.wait < index
            assert step.wait < 0 or plan.steps[step.wait].lane != step.lane
    return sum(sum(ns) for ns in out.values())


@pytest.mark.parametrize("op", ALGORITHMS, ids=lambda op: op.label)
def test_border_bytes_equal_the_bound(op: Op) -> None:
    draw = random.Random(int(op))
    for _ in range(150):
        topo = topology(draw)
        root, count = draw.randrange(topo.size), draw.choice((0, 1, 17, 5000, 3_000_000))
        redop = draw.choice((RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM, RedOp.BXOR)) if op in REDUCING else RedOp.SUM
        made = plans(topo, op, redop, root)
        sent = check(topo, made, count) * F32.itemsize
        assert sent == border_bound(topo, op, made[0].plan_class, count, F32.itemsize, root), (topo, root, count)


@pytest.mark.parametrize("op", UNEVEN, ids=lambda op: op.label)
def test_border_bytes_of_unequal_blocks_equal_the_bound(op: Op) -> None:
    draw = random.Random(int(op) + 100)
    for _ in range(150):
        topo = topology(draw)
        root, n = draw.randrange(topo.size), topo.size
        counts = tuple(draw.choice((0, 1, 5, 1000)) for _ in range(n * n if op == Op.ALL_TO_ALL else n))
        made = plans(topo, op, RedOp.SUM, root, counts)
        sent = check(topo, made, 1) * F32.itemsize
        assert sent == border_bound(topo, op, "bandwidth", 1, F32.itemsize, root, counts), (topo, root, counts)


def test_a_reduction_goes_through_each_island_once() -> None:
    draw = random.Random(5)
    for _ in range(50):
        topo = topology(draw)
        made = plans(topo, Op.REDUCE, RedOp.SUM, draw.randrange(topo.size))
        for island in topo.islands:
            assert sum(sum(made[r].sent_elements(100).values()) for r in island.ranks) <= 100


def test_a_planted_fault_is_found() -> None:
    topo = topology(random.Random(3))
    made = plans(topo, Op.ALL_TO_ALL, RedOp.SUM, 0)
    flows = made[0].flows
    assert flows
    made[0] = Plan(**{**made[0].__dict__, "flows": flows[:-1]})
    with pytest.raises(AssertionError):
        check(topo, made, 100)
