# SPDX-License-Identifier: Apache-2.0
"""The verifier accepts what the planner makes, refuses planted faults with a text that helps, and stands before
traffic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from hetccl.core import planner
from hetccl.core.algorithms.common import Places, Shared
from hetccl.core.plan import Buffer, Channel, FlowKind, Plan, StepKind, measure
from hetccl.core.planner import ALGORITHMS, Planner
from hetccl.core.topology import Topology
from hetccl.core.verify import PlanFault, representative_counts, verify_class, verify_plans
from hetccl.core.verify.checker import shrink
from hetccl.core.verify.clocks import joiner, known, tick
from hetccl.core.verify.gate import Gate
from hetccl.core.verify.reference import Stuck
from hetccl.core.verify.spec import SPECS
from hetccl.errors import InternalError
from hetccl.types import DType, Op, RedOp

sys.path.insert(0, os.path.dirname(__file__))
from verify_cases import classes, places_of, plans, topology
from verify_oracle import judge

SUM = Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM)
TWO_TWO = topology([[0, 1], [2, 3]])
DEVICES = topology([[0, 1], [2, 3]], device=[0, 1])


def test_every_operation_has_a_specification() -> None:
    assert {op.label for op in ALGORITHMS} <= set(SPECS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("top", "slots"),
    [
        (TWO_TWO, 1), (TWO_TWO, 2), (DEVICES, 8), (topology([[0, 3], [1], [2]]), 1),
        (topology([[0, 1, 2], [3, 4]], poor=[0]), 1), (topology([[0, 1, 2], [3, 4]], device=[1], lacking=[1]), 1),
    ],
    ids=["2+2", "2+2, two slots", "devices, eight slots", "2+1+1", "3+2 poor", "3+2 lacking"],
)  # fmt: skip
def test_present_algorithms_are_accepted(top: Topology, slots: int) -> None:
    for shared, algorithm in classes(top, (RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM)):
        found = plans(top, shared, algorithm)
        proofs = verify_class(top, shared, found, slots=slots, few=3, places=places_of(top, shared))
        assert all(p.border_elements for p in proofs if p.count)


def test_border_elements_of_a_proof() -> None:
    proof = verify_plans(TWO_TWO, SUM, plans(TWO_TWO, SUM, "owners"), 1000)
    assert proof.border_elements == 2 * 1000 and proof.segments == 1
    proof = verify_plans(TWO_TWO, SUM, plans(TWO_TWO, SUM, "exchange"), 1000)
    assert proof.border_elements == 2 * 1000
    gather = Shared(Op.ALL_GATHER, DType.FLOAT32, RedOp.SUM)
    assert verify_plans(TWO_TWO, gather, plans(TWO_TWO, gather, "direct"), 10).border_elements == 4 * 10


def test_representative_counts_have_tails_and_reuse_scratch() -> None:
    plan = shrink(plans(DEVICES, SUM, "owners"))[0]
    counts = representative_counts(plan)
    assert counts[:2] == [0, 1]
    last = plan.segments(counts[-1])
    assert len(last) > max(s.shift for s in plan.steps) + 1
    unit, tail = measure(last[-1], plan.units)
    assert unit >= 16 and tail > 0


# ---- planted faults: (topology, class, algorithm, what is done to rank 1, a part of the text)


def edit(
    found: list[Plan], rank: int, step: int | None = None, flow: int | None = None, /, **change: object
) -> list[Plan]:
    plan = found[rank]
    if step is not None:
        plan = replace(plan, steps=_with(plan.steps, step, change))
    elif flow is not None:
        plan = replace(plan, flows=_with(plan.flows, flow, change))
    else:
        plan = replace(plan, **change)  # type: ignore[arg-type]
    return [plan if p.rank == rank else p for p in found]


def _with(items: tuple, at: int, change: dict) -> tuple:  # type: ignore[type-arg]
    return tuple(replace(x, **change) if i == at else x for i, x in enumerate(items))


def first(plan: Plan, kind: StepKind) -> int:
    return next(i for i, s in enumerate(plan.steps) if s.kind == kind)


def first_flow(plan: Plan, kind: FlowKind) -> int:
    return next(i for i, f in enumerate(plan.flows) if f.kind == kind)


def refuse(top: Topology, shared: Shared, broken: list[Plan], *parts: str) -> PlanFault:
    with pytest.raises(PlanFault) as caught:
        verify_class(top, shared, broken, places=places_of(top, shared))
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return caught.value


def test_the_rule_that_scratch_is_busy_is_needed() -> None:
    """An island lane that runs ahead overwrites scratch that the border lane still sends from."""
    shared = Shared(Op.BROADCAST, DType.FLOAT32, RedOp.SUM, 0)
    found = shrink(plans(DEVICES, shared, "chain"))
    count = representative_counts(found[0])[-1]
    verify_plans(DEVICES, shared, found, count)
    text = r"rank 0, step 1 \(flows, send\), segment 0: race: reads host_scratch\[.*\] while rank 0, step 0 \(copy\)"
    with pytest.raises(PlanFault, match=text):
        verify_plans(DEVICES, shared, found, count, scratch_rule=False)


def test_a_dropped_wait_is_a_race() -> None:
    found = plans(TWO_TWO, SUM, "owners")
    at = first(found[1], StepKind.FLOWS)
    fault = refuse(TWO_TWO, SUM, edit(found, 1, at, wait=-1), "race:", "rank 1, step", "output[")
    assert fault.facts["rank"] == 1


def test_a_flow_left_out_locks() -> None:
    found = plans(TWO_TWO, SUM, "owners")
    at = first(found[1], StepKind.FLOWS)
    broken = edit(found, 1, at, n_flows=found[1].steps[at].n_flows - 1)
    refuse(TWO_TWO, SUM, broken, "nobody receives")
    at_send = first_flow(found[1], FlowKind.SEND)
    broken = edit(found, 1, None, at_send, src=replace(found[1].flows[at_send].src, b=0, a=0, bt=0, at=0))
    refuse(TWO_TWO, SUM, broken, "deadlock", "waits for the ring from rank 1")


def test_messages_of_other_sizes() -> None:
    found = plans(TWO_TWO, SUM, "owners")
    at = first_flow(found[1], FlowKind.SEND)
    src = found[1].flows[at].src
    broken = edit(found, 1, None, at, src=replace(src, bt=0))
    text = r"rank 3, .*expects 80 elements from rank 1 on channel 0, but rank 1, .* sends 40"
    with pytest.raises(PlanFault, match=text):
        verify_plans(TWO_TWO, SUM, broken, 1000, chunk=100)


def test_vendor_calls_must_agree() -> None:
    found = plans(TWO_TWO, SUM, "owners")
    at = first(found[1], StepKind.BROADCAST)
    refuse(TWO_TWO, SUM, edit(found, 1, at, root=0), "call", "with root 0", "with root 1")


def test_a_vendor_all_reduce_need_not_give_equal_bits() -> None:
    """Every rank exchanges what its island's all_reduce gave it: right in value, but ranks 0 and 1 may differ in
    bits."""
    broken = []
    for p in plans(TWO_TWO, SUM, "exchange"):
        head = plans(TWO_TWO, SUM, "exchange")[p.rank - p.rank % 2]
        reduce_step, flows_step = head.steps[0], head.steps[first(head, StepKind.FLOWS)]
        steps = (replace(reduce_step, kind=StepKind.ALL_REDUCE), replace(flows_step, wait=0))
        flow = replace(head.flows[0], peers=((p.rank + 2) % 4,))
        broken.append(replace(p, steps=steps, flows=(flow,)))
    text = "rank 1: output[0:1] holds sum(sum(in0[0], in1[0]), sum(in2[0], in3[0]))"
    refuse(TWO_TWO, SUM, broken, text, "bits may differ")


def test_combining_in_another_order_is_other_bits() -> None:
    top = topology([[0], [1], [2]])
    found = plans(top, SUM, "exchange")
    at = first_flow(found[1], FlowKind.EXCHANGE)
    refuse(top, SUM, edit(found, 1, None, at, position=0), "rank 1", "bits may differ")


def test_an_average_is_scaled_once() -> None:
    shared = Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.AVG)
    found = plans(TWO_TWO, shared, "owners")
    at = first_flow(found[1], FlowKind.OWN)
    broken = edit(found, 1, None, at, finish=False)
    refuse(TWO_TWO, shared, broken, "expected every input divided by 1 before and 4 after")
    half = replace(shared, dtype=DType.FLOAT16)
    as_if_float = [replace(p, dtype=DType.FLOAT16) for p in found]
    refuse(TWO_TWO, half, as_if_float, "divided by 4 before and 1 after")


def test_inputs_are_not_written() -> None:
    shared = Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM)
    found = plans(TWO_TWO, shared, "exchange")
    at = first(found[1], StepKind.BROADCAST)
    step = found[1].steps[at]
    broken = edit(found, 1, at, src=step.src.on(Buffer.IN), dst=step.dst.on(Buffer.IN))
    refuse(TWO_TWO, shared, broken, "writes input[", "which is not output")


def test_nothing_is_written_outside() -> None:
    found = plans(TWO_TWO, SUM, "exchange")
    at = first(found[1], StepKind.BROADCAST)
    dst = found[1].steps[at].dst
    refuse(TWO_TWO, SUM, edit(found, 1, at, dst=replace(dst, a=1)), "rank 1, step", "reaches output[")


def test_unwritten_memory_is_not_read() -> None:
    found = plans(DEVICES, SUM, "exchange")
    at = first(found[0], StepKind.COPY)
    broken = edit(found, 0, at, src=found[0].steps[at].dst, dst=found[0].steps[at].dst)
    refuse(DEVICES, SUM, broken, "reads host_scratch[", "which nothing has written")


def test_what_a_reduce_leaves_on_other_ranks_is_undefined() -> None:
    found = plans(TWO_TWO, SUM, "exchange")
    broken = [replace(p, steps=p.steps[:-1]) if p.rank in (0, 1) else p for p in found]
    refuse(TWO_TWO, SUM, broken, "rank 1", "scribbled on")


def test_memory_of_the_device_does_not_cross() -> None:
    found = plans(DEVICES, SUM, "exchange")
    at = first_flow(found[0], FlowKind.EXCHANGE)
    broken = edit(found, 0, None, at, src=found[0].flows[at].src.on(Buffer.OUT))
    refuse(DEVICES, SUM, broken, "the border needs host memory")


def test_too_many_border_elements() -> None:
    """All is right but the class: an exchange is no bandwidth plan once there are three islands."""
    top = topology([[0], [1], [2]])
    broken = [replace(p, plan_class="bandwidth") for p in plans(top, SUM, "exchange")]
    refuse(top, SUM, broken, "elements cross the border; the bandwidth class allows")


def test_one_island_that_owns_too_much() -> None:
    """Every owner is island 0: the sum is right and so are the border elements of two islands, but not the shares."""
    top = topology([[0], [1]])
    found = plans(top, SUM, "owners")
    own, send, recv = (first_flow(found[0], k) for k in (FlowKind.OWN, FlowKind.SEND, FlowKind.RECV))
    whole = replace(found[0].flows[own].src, a=0, b=found[0].units, at=0, bt=1)
    out = whole.on(Buffer.OUT)
    flows = found[0].flows
    zero = edit(found, 0, flows=(replace(flows[own], src=whole, dst=out),))
    step = first(found[0], StepKind.FLOWS)
    zero = edit(zero, 0, step, n_flows=1, first_flow=0)
    flows = found[1].flows
    one = edit(zero, 1, flows=(replace(flows[first_flow(found[1], FlowKind.SEND)], src=whole),
                               replace(flows[first_flow(found[1], FlowKind.RECV)], dst=out)))  # fmt: skip
    one = edit(one, 1, first(found[1], StepKind.FLOWS), n_flows=2, first_flow=0)
    assert {send, recv} <= {0, 1, 2}
    refuse(top, SUM, one, "island 0 combines", "its share is at most")


def test_ranks_without_a_link() -> None:
    top = topology([[0, 1, 2], [3, 4, 5]])
    assert (1, 5) not in top.border_pairs()
    found = plans(top, SUM, "owners")
    at = first_flow(found[1], FlowKind.SEND)
    refuse(top, SUM, edit(found, 1, None, at, peers=(5,)), "ranks 1 and 5 have no link")


def test_two_flows_of_different_kinds_on_one_channel_take_turns() -> None:
    found = plans(TWO_TWO, SUM, "owners")
    at = first_flow(found[0], FlowKind.SEND)
    broken = edit(found, 0, None, at, channel=Channel.RESULT)
    refuse(TWO_TWO, SUM, broken, "")


@pytest.mark.parametrize(
    ("top", "kind", "text"),
    [
        (TWO_TWO, StepKind.BROADCAST, "vendor calls belong on the island lane"),
        (TWO_TWO, StepKind.FLOWS, "messages belong on the border lane"),
        (DEVICES, StepKind.COPY, "what goes onto the stream belongs on the island lane"),
    ],
)
def test_what_both_lanes_would_do_in_any_order(top: Topology, kind: StepKind, text: str) -> None:
    found = plans(top, SUM, "exchange")
    at = first(found[0], kind)
    refuse(top, SUM, edit(found, 0, at, lane=1 - found[0].steps[at].lane), "rank 0, step", text)


@pytest.mark.parametrize(
    ("change", "text"),
    [({"units": 8}, "units is 8"), ({"in_blocks": 2}, "in_blocks is 2"), ({"dtype": DType.INT8}, "dtype")],
)
def test_heads_must_agree(change: dict[str, object], text: str) -> None:
    refuse(TWO_TWO, SUM, edit(plans(TWO_TWO, SUM, "owners"), 1, **change), "rank 1", text)


def test_a_library_is_not_asked_for_what_it_lacks() -> None:
    poor = topology([[0, 1], [2, 3]], poor=[1])
    refuse(poor, SUM, plans(TWO_TWO, SUM, "owners"), "rank 2, step", "cannot reduce float32 with sum")
    kernels = replace(DEVICES, islands=tuple(replace(i, kernels=False) for i in DEVICES.islands))
    shared = Shared(Op.ALL_REDUCE, DType.FLOAT16, RedOp.AVG)
    refuse(kernels, shared, plans(DEVICES, shared, "owners"), "has no kernels")


# ---- clocks, reference interpreter


def test_clocks_join_like_vectors() -> None:
    import random

    draw = random.Random(1)
    for _ in range(200):
        n = draw.randint(1, 40)
        times = [[draw.choice((0, 1, 2, 1 << 20, (1 << 23) - 1)) for _ in range(n)] for _ in range(2)]
        a, b = (sum(t << (24 * i) for i, t in enumerate(one)) for one in times)
        both = joiner(n)(a, b)
        assert [known(both, i) for i in range(n)] == [max(pair) for pair in zip(*times, strict=True)]
    assert known(tick(tick(0, 3), 3), 3) == 2 and known(tick(0, 3), 2) == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_reference_interpreter_agrees(seed: int) -> None:
    tops = (TWO_TWO, topology([[0, 2], [1]], device=[0]), topology([[0], [1, 2], [3]], device=[1], poor=[1]))
    for top in tops[seed % 3 :][:1]:
        for shared, algorithm in classes(top, (RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM, RedOp.MAX)):
            found = shrink(plans(top, shared, algorithm))
            for count in (1,) if shared.counts else (1, representative_counts(found[0])[-1]):
                ran = judge(top, shared, found, count, seed, in_place=seed % 2 == 1, chunk=max(1, count // 9))
                expected: dict[tuple[int, int], int] = {}
                for p in found:
                    for peer, n in p.sent_elements(count).items():
                        expected[p.rank, peer] = expected.get((p.rank, peer), 0) + n
                assert ran.sent == {k: n for k, n in expected.items() if n}


def test_the_reference_interpreter_finds_a_lock() -> None:
    found = plans(TWO_TWO, SUM, "owners")
    at = first(found[1], StepKind.FLOWS)
    with pytest.raises(Stuck):
        judge(TWO_TWO, SUM, edit(found, 1, at, n_flows=1), 100, 0)


# ---- the gate


def test_a_wrong_plan_raises_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ALGORITHMS[Op.ALL_REDUCE]["owners"]

    def wrong(top: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
        found = [right(top, shared, r) for r in range(top.size)]
        return edit(found, 1, first(found[1], StepKind.FLOWS), wait=-1)[rank]

    monkeypatch.setitem(planner.ALGORITHMS[Op.ALL_REDUCE], "owners", wrong)
    for rank in range(4):  # all ranks say the same
        with pytest.raises(InternalError, match=r"so nothing was sent.*race.*please report"):
            planner_of(rank, "first").plan(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM, 0, 0)
    assert planner_of(1, "off").plan(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM, 0, 0).rank == 1


def planner_of(rank: int, verify: str) -> Planner:
    return Planner(TWO_TWO, rank, {"all_reduce": "owners"}, verify=verify)


def test_a_class_is_proved_once() -> None:
    p = Planner(TWO_TWO, 0, {})
    ask: Callable[..., Plan] = p.plan
    ask(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM, 0, 0)
    assert p.gate.proofs == 1
    ask(Op.ALL_REDUCE, DType.INT32, RedOp.MAX, 0, 0)  # the same plan
    assert p.gate.proofs == 1
    ask(Op.ALL_REDUCE, DType.FLOAT32, RedOp.AVG, 0, 0)
    ask(Op.ALL_REDUCE, DType.FLOAT16, RedOp.AVG, 0, 0)
    largest = len(p.limits(Op.ALL_REDUCE))
    assert largest, "small and large messages take different algorithms"
    ask(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM, 0, largest)
    assert p.gate.proofs == 4
    always = Planner(TWO_TWO, 0, {}, verify="always")
    for _ in range(2):
        always.plan(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM, 0, 0)
    assert always.gate.proofs == 2


@pytest.mark.parametrize(
    ("mode", "size", "proofs"), [("first", 64, 1), ("first", 65, 0), ("always", 65, 1), ("off", 2, 0)]
)
def test_which_communicators_are_proved(mode: str, size: int, proofs: int) -> None:
    top = topology([list(range(size - 1)), [size - 1]])
    gate = Gate(top, mode)
    gate.check(Shared(Op.BROADCAST, DType.FLOAT32, RedOp.SUM), ALGORITHMS[Op.BROADCAST]["chain"])
    assert gate.proofs == proofs


def test_the_first_shapes_of_a_v_form_are_proved() -> None:
    gate = Gate(TWO_TWO, "first", 1)
    make = ALGORITHMS[Op.ALL_GATHER]["direct"]
    for i in range(9):
        shared = Shared(Op.ALL_GATHER, DType.FLOAT32, RedOp.SUM, counts=(7 + i, 0, 3, 4))
        gate.check(shared, make, places_of(TWO_TWO, shared)[1])
    assert gate.proofs == 2 + 5  # the made-up ones, and those that came first

    def wrong(top: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
        plan = make(top, shared, rank, places)
        return replace(plan, out_blocks=plan.out_blocks + (rank == 1))

    with pytest.raises(PlanFault, match="rank 1: out_blocks is"):
        Gate(TWO_TWO, "first").check(Shared(Op.ALL_GATHER, DType.FLOAT32, RedOp.SUM, counts=(1, 0, 3, 4)), wrong)


def test_explain_says_how_a_plan_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(p: Planner, op: Op = Op.ALL_REDUCE, counts: tuple[int, ...] = ()) -> str:
        found = p.explain(op, 64, DType.FLOAT32, RedOp.SUM, 0, {}, counts)
        assert f"  proved: {found.proof}\n" in str(found)
        return found.proof

    p = Planner(TWO_TWO, 0, {})
    assert told(p).startswith("at the first call, for 5 counts that stand for all, in place and not; ")
    p.plan(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM, 0, 0)
    assert told(p).startswith("yes, for 5 counts")
    assert told(Planner(TWO_TWO, 0, {}, verify="always")).startswith("each time it is planned, for 5 counts")
    assert told(Planner(TWO_TWO, 0, {}, verify="off")) == "no: HETCCL_VERIFY=off"
    large = topology([list(range(64)), [64]])
    assert "there are 65 ranks" in told(Planner(large, 0, {}), Op.BROADCAST)
    for i in range(6):
        shared = Shared(Op.ALL_GATHER, DType.FLOAT32, RedOp.SUM, counts=(7 + i, 0, 3, 4))
        wanted = "at the first call, for this shape" if i < 5 else "not for this shape, but for 2 made-up ones"
        assert told(p, Op.ALL_GATHER, shared.counts).startswith(wanted)
        p.plan(Op.ALL_GATHER, DType.FLOAT32, RedOp.SUM, 0, 0, (shared.counts, places_of(TWO_TWO, shared)[0]))
    assert told(p, Op.ALL_GATHER, (7, 0, 3, 4)).startswith("yes, for this shape, in place and not")
    monkeypatch.setattr("hetccl.core.verify.gate.MOST_STEPS", 10)
    assert "steps and flows on all ranks, HETCCL_VERIFY=first proves up to 10" in told(p)


def test_plans_too_large_to_prove_are_not_even_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetccl.core.verify.gate.MOST_STEPS", 10)
    made = []

    def counted(top: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
        made.append(rank)
        return ALGORITHMS[Op.ALL_TO_ALL]["direct"](top, shared, rank, places)

    gate = Gate(TWO_TWO, "first", 2)
    gate.check(Shared(Op.ALL_TO_ALL, DType.FLOAT32, RedOp.SUM), counted)
    assert (gate.proofs, made) == (0, [2])
    always = Gate(TWO_TWO, "always", 2)
    always.check(Shared(Op.ALL_TO_ALL, DType.FLOAT32, RedOp.SUM), counted)
    assert always.proofs == 1
