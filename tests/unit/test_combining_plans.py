# SPDX-License-Identifier: Apache-2.0
"""Plans whose combinations are done by a border communicator are proved like all others; broken ones are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verify_cases import able, topology

from hetccl.core.algorithms import border_communicator
from hetccl.core.algorithms.common import Places, Shared
from hetccl.core.groups import group_for, groups_of
from hetccl.core.plan import Channel, Flow, FlowKind, Plan, StepKind
from hetccl.core.planner import ALGORITHMS
from hetccl.core.topology import Topology
from hetccl.core.verify.checker import verify_class
from hetccl.core.verify.gate import Gate
from hetccl.core.verify.machine import PlanFault
from hetccl.core.verify.reference import run_plans
from hetccl.core.ways import Rates, Way, Ways, decide, obstacle
from hetccl.errors import UnsupportedError
from hetccl.types import DType, Op, RedOp

REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
ALL, NO_TRANSFER, NO_GROUPS, NEITHER = 15, 13, 11, 9
SHAPES = (
    ([[0, 1], [2, 3]], [0]),  # a pair is the whole island
    ([[0, 1, 2], [3, 4, 5, 6]], [1]),  # groups of two, one moved back
    ([[0, 1, 2, 3], [4, 5], [6, 7, 8]], [0, 1]),  # groups of three, pairs in rounds, a whole island of three
    ([[0, 3], [1, 4], [2, 5], [6, 7, 8, 9, 10]], [0, 2]),
)


def made(shape: int, calls: int) -> Topology:
    islands, device = SHAPES[shape]
    found = topology(islands, device)
    return replace(found, islands=tuple(replace(i, calls=calls) for i in found.islands), _place={})


def cases(top: Topology) -> list[tuple[Shared, str]]:
    return [
        (Shared(op, DType.FLOAT32, redop, root), name)
        for op in REDUCING
        for redop in (RedOp.SUM, RedOp.AVG)
        for root in ((0, top.size - 1) if op == Op.REDUCE else (0,))
        for name in able(op, top)
    ]


@pytest.mark.parametrize(
    ("shape", "calls"), [(0, ALL), (1, ALL), (1, NEITHER), (2, ALL), (2, NO_TRANSFER), (2, NO_GROUPS), (3, ALL)]
)
def test_border_plans_are_proved(shape: int, calls: int) -> None:
    top = made(shape, calls)
    ways, proved = Ways(top, "border"), 0
    for shared, name in cases(top):
        algorithm = ALGORITHMS[shared.op][name]
        if ways.fits(algorithm, shared):
            assert name == "exchange"
            continue
        Gate(top, "first").check(shared, ways.apply(algorithm, shared))
        proved += 1
    assert proved >= 6


@pytest.mark.parametrize("shape", [1, 2])
def test_v_forms_are_proved(shape: int) -> None:
    top = made(shape, ALL)
    counts = tuple(5 * (r % 3) for r in range(top.size))
    shared = Shared(Op.REDUCE_SCATTER, DType.FLOAT32, RedOp.SUM, counts=counts)
    Gate(top, "first").check(shared, Ways(top, "border").apply(ALGORITHMS[Op.REDUCE_SCATTER]["direct"], shared))


@pytest.mark.parametrize("calls", [ALL, NO_GROUPS])
def test_the_interpreter_agrees(calls: int) -> None:
    """A second reading of the rules, on numbers: -0.0 is no sum's beginning, nor 0 a product's."""
    for shape, redop in ((1, RedOp.PROD), (2, RedOp.MIN), (2, RedOp.SUM)):
        top = made(shape, calls)
        shared = Shared(Op.ALL_REDUCE, DType.FLOAT64, redop)
        algorithm = Ways(top, "border").apply(ALGORITHMS[Op.ALL_REDUCE]["owners"], shared)
        plans = [algorithm(top, shared, r, None) for r in range(top.size)]
        inputs = [[float(r % 3 + 2 + i % 5) for i in range(70)] for r in range(top.size)]
        want = []
        for column in zip(*inputs, strict=True):
            total = column[0]
            for x in column[1:]:
                total = total * x if redop == RedOp.PROD else min(total, x) if redop == RedOp.MIN else total + x
            want.append(total)
        for seed in range(5):
            assert all(out == want for out in run_plans(top, plans, inputs, 70, seed=seed).outputs)


def test_broken_plans_are_refused() -> None:
    top = made(2, ALL)
    shared = Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM)
    algorithm = Ways(top, "border").apply(ALGORITHMS[Op.ALL_REDUCE]["owners"], shared)
    good = [algorithm(top, shared, r, None) for r in range(top.size)]
    verify_class(top, shared, good)
    refused = 0
    for rank, p in enumerate(good):
        for at, step in enumerate(p.steps):
            if step.kind == StepKind.TRANSFER and step.src.buffer >= 0:
                broken = [replace(step, src=step.dst if step.dst.buffer >= 0 else replace(step.src, block=0))]
            elif step.group:
                broken = [replace(step, group=0), replace(step, group=step.group + 1)]
            elif step.wait >= 0 and step.kind == StepKind.FLOWS:
                broken = [replace(step, wait=-1)]
            else:
                continue
            for other in broken:
                if other == step:
                    continue
                steps = (*p.steps[:at], other, *p.steps[at + 1 :])
                plans: list[Plan] = [*good[:rank], replace(p, steps=steps), *good[rank + 1 :]]
                with pytest.raises(PlanFault):
                    verify_class(top, shared, plans)
                refused += 1
    assert refused > 20


def test_groups_have_one_rank_a_contribution() -> None:
    assert groups_of(2, 2) == ((0, 1),)
    assert groups_of(5, 2) == ((0, 1, 2, 3, 4), (0, 1), (2, 3), (3, 4))
    assert groups_of(4, 3) == ((0, 1, 2, 3), (0, 1), (2, 3), (0, 1, 2), (1, 2, 3))
    island = made(2, ALL).islands[0]  # four ranks
    assert group_for(island, 3, 3, 3) == (4, (1, 2, 3))
    assert group_for(island, 3, 2, 1) == (1, (0, 1))
    assert group_for(replace(island, calls=NO_GROUPS), 3, 3, 3) == (0, (1, 2, 3))
    pair = made(2, ALL).islands[1]
    assert group_for(pair, 3, 3, 1) == (0, (0, 1))  # fewer ranks than contributions: a pair, in rounds


def test_rings_lock_and_chains_do_not() -> None:
    top = made(2, ALL)
    for op, name in ((Op.REDUCE, "chain"), (Op.ALL_REDUCE, "owners"), (Op.ALL_REDUCE, "ring")):
        plans = [ALGORITHMS[op][name](top, Shared(op, DType.FLOAT32, RedOp.SUM), r, None) for r in range(top.size)]
        assert not border_communicator.locks(plans), name
    # three ranks, each adding to what comes from one and passing it on to the other, all in one step
    ring = [
        replace(plans[0], rank=r, flows=(Flow(FlowKind.PASS, Channel.CONTRIBUTE, ((r - 1) % 3, (r + 1) % 3)),))
        for r in range(3)
    ]
    assert border_communicator.locks(ring)
    assert not border_communicator.locks(ring[:2])


def test_one_function_decides() -> None:
    top = made(2, ALL)
    shared = Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM)
    device, host = top.islands[0], top.islands[2]
    assert decide(device, shared, 3, "auto") == decide(host, shared, 3, "auto") == Way.HOST
    assert decide(device, shared, 3, "auto", Rates(host=1e9, copy=20e9)) == Way.DEVICE
    assert decide(replace(device, kernels=False), shared, 3, "auto", Rates(host=1e9, copy=20e9)) == Way.HOST
    assert [decide(host, shared, 3, way) for way in ("host", "device", "border")] == list(Way)
    for way in Way:
        assert obstacle(way, device, shared, 3) == ""
    assert "no kernels" in obstacle(Way.DEVICE, replace(device, kernels=False), shared, 3)
    assert "one rank" in obstacle(Way.BORDER, replace(device, ranks=(0,)), shared, 3)
    assert "cannot reduce" in obstacle(Way.BORDER, replace(device, reduce_mask=(0,) * 32), shared, 3)
    extreme, bare = replace(shared, redop=RedOp.MAX), replace(device, calls=3)
    assert "NaN" in obstacle(Way.BORDER, bare, extreme, 3)
    assert obstacle(Way.BORDER, replace(bare, calls=11), extreme, 3) == ""
    assert obstacle(Way.BORDER, bare, replace(extreme, dtype=DType.INT32), 3) == ""


def test_the_device_way_only_marks_plans_that_combine() -> None:
    top = made(2, ALL)
    shared = Shared(Op.REDUCE, DType.FLOAT32, RedOp.SUM)
    algorithm = Ways(top, "device").apply(ALGORITHMS[Op.REDUCE]["chain"], shared)
    for rank in range(top.size):
        found = algorithm(top, shared, rank, None)
        combines = any(f.kind in (FlowKind.OWN, FlowKind.PASS) for f in found.flows)
        assert found.device_sums == (combines and not top.island_of(rank).host_memory)
    lonely = topology([[0, 1], [2]])
    with pytest.raises(UnsupportedError, match="one rank"):
        Ways(lonely, "border").apply(ALGORITHMS[Op.ALL_REDUCE]["owners"], Shared(Op.ALL_REDUCE, DType.INT8, RedOp.SUM))
    Ways(lonely, "border").apply(  # the root's island alone combines: it has two ranks
        ALGORITHMS[Op.REDUCE]["chain"], Shared(Op.REDUCE, DType.INT8, RedOp.SUM)
    )(lonely, Shared(Op.REDUCE, DType.INT8, RedOp.SUM), 0, Places((0,), (0,)))
