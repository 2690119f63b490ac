# SPDX-License-Identifier: Apache-2.0
"""What the verifier accepts, ranks run, and what they did passes the same checker: hypothesis draws topologies,
operations and counts; every plan is proved before it runs, the answers are looked at, each rank replays its own trace
after every operation, and in the end the traces of all ranks are replayed together."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from hetccl.core.plan import StepKind
from hetccl.core.planner import ALGORITHMS
from hetccl.core.tracing import Traced
from hetccl.core.verify import PlanFault
from hetccl.core.verify.replay import Did, Event, replay
from hetccl.testing.launch import run
from hetccl.types import Op

sys.path.insert(0, os.path.dirname(__file__))
from traced import REDUCING, ROOTED, UNEVEN, Job, body, replay_all

HERE = os.path.dirname(__file__)
ENV = {
    "HETCCL_TRACE_STEPS": "200000", "HETCCL_CHUNK_BYTES": "4096", "HETCCL_SIM_SEGMENT_BYTES": "8K",
    "PYTHONPATH": os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")])),
}  # fmt: skip
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "gather", "scatter", "all_to_all")


@st.composite
def rank_specs(draw: st.DrawFn) -> tuple[str, ...]:
    """Up to six ranks in up to four islands of host and sim, side by side or not."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda s: 2 <= sum(s) <= 6))
    ranks = [f"{draw(st.sampled_from(('host', 'sim')))}@{'abcd'[i]}" for i, n in enumerate(sizes) for _ in range(n)]
    return tuple(draw(st.permutations(ranks)) if draw(st.booleans()) else ranks)


@st.composite
def algorithms(draw: st.DrawFn) -> str:
    """HETCCL_ALGORITHM: what is chosen, or for every operation any one of its algorithms."""
    if draw(st.booleans()):
        return ""
    return ",".join(f"{op.label}={draw(st.sampled_from(sorted(names)))}" for op, names in ALGORITHMS.items())


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[str, ...], list[Job]]:
    ranks = draw(rank_specs())
    n = len(ranks)
    jobs = []
    for op in draw(st.lists(st.sampled_from(OPERATIONS), min_size=6, max_size=14)):
        redop = draw(st.sampled_from(("sum", "avg", "premul_sum", "max", "prod"))) if op in REDUCING else "sum"
        counts: tuple[int, ...] = ()
        if op in UNEVEN and draw(st.booleans()):
            many = n * n if op == "all_to_all" else n
            counts = tuple(draw(st.lists(st.sampled_from((0, 1, 7, 1500)), min_size=many, max_size=many)))
        jobs.append(
            Job(
                op, draw(st.sampled_from(("float32", "float16", "int32"))), redop,
                draw(st.integers(0, n - 1)) if op in ROOTED else 0,
                draw(st.sampled_from((0, 1, 5, 1000, 9001))), counts, draw(st.integers(0, 2)), draw(st.booleans()),
                draw(st.booleans()),
            )
        )  # fmt: skip
    return ranks, jobs


@pytest.mark.timeout(900)
def test_traces_are_accepted(full: bool) -> None:
    @settings(
        max_examples=40 if full else 4, deadline=None, derandomize=not full, phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases(), algorithms())
    @example((("host@a", "host@b"), [Job(op, count=3000) for op in OPERATIONS]), "")
    def accepted(case: tuple[tuple[str, ...], list[Job]], algorithm: str) -> None:
        ranks, jobs = case
        env = ENV | ({"HETCCL_ALGORITHM": algorithm} if algorithm else {})
        proofs = replay_all(run(body, ",".join(ranks), timeout=200, env=env, args=(jobs,)))
        assert len(proofs) == len(jobs)

    accepted()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("combine", ["device", "border"])
def test_traces_of_other_ways_to_combine(combine: str) -> None:
    jobs = [Job(op, count=3000, redop=redop) for op in REDUCING for redop in ("sum", "max", "avg")]
    ranks = run(body, "sim@a,host@b,sim@a,host@b", timeout=200, env=ENV | {"HETCCL_COMBINE": combine}, args=(jobs,))
    assert len(replay_all(ranks)) == len(jobs)


# ---- a corrupted trace is refused


@pytest.fixture(scope="module")
def ranks() -> list[tuple[object, list[Traced]]]:
    """One segmented, chunked all_reduce on two islands of two, one of them a device's; and a gather_v."""
    jobs = [Job("all_reduce", count=9001), Job("gather", counts=(5, 0, 2000, 7), root=1)]
    env = ENV | {"HETCCL_ALGORITHM": "all_reduce=owners"}
    return run(body, "host@a,host@a,sim@b,sim@b", timeout=100, env=env, args=(jobs,))


def corrupt(
    ranks: list[tuple[object, list[Traced]]], rank: int, job: int, change: object
) -> list[tuple[object, list[Traced]]]:
    """The same traces, but for the events of one rank in one operation."""
    found = []
    for r, (topology, kept) in enumerate(ranks):
        if r == rank:
            events = tuple(change(list(kept[job].run.events)))  # type: ignore[operator]
            assert events != kept[job].run.events
            traced = replace(kept[job], run=replace(kept[job].run, events=events))
            kept = [*kept[:job], traced, *kept[job + 1 :]]
        found.append((topology, kept))
    return found


def at(events: list[Event], what: Did, nth: int = 0) -> int:
    return [i for i, e in enumerate(events) if e.what == what][nth]


def where(events: list[Event]) -> int:
    """The first flow that writes."""
    return next(i for i, e in enumerate(events) if e.what == Did.FLOW and e.b >= 0)


def edited(events: list[Event], i: int, **change: int) -> list[Event]:
    return [*events[:i], events[i]._replace(**change), *events[i + 1 :]]


def test_what_the_fixture_holds(ranks: list[tuple[object, list[Traced]]]) -> None:
    proofs = replay_all(ranks)  # type: ignore[arg-type]
    assert proofs[0].segments > 2 and proofs[0].border_elements == 2 * 9001
    assert [t.shared.op for t in ranks[0][1]] == [Op.ALL_REDUCE, Op.GATHER]
    assert {Did(e.what) for e in ranks[3][1][0].run.events} == set(Did) - {Did.BEGIN, Did.END}


@pytest.mark.parametrize(
    ("rank", "change", "text"),
    [
        (0, lambda e: e[1:], "out of order|more often"),
        (0, lambda e: e[:-1], "ended before|has not ended|but done"),
        (0, lambda e: [*e[:6], e[7], e[6], *e[8:]], "out of order|before|comes next|more often"),
        (0, lambda e: edited(e, at(e, Did.STEP), a=e[at(e, Did.STEP)].a + 1), "reaches|expected|taken before|reads"),
        (0, lambda e: edited(e, at(e, Did.STEP), n=e[at(e, Did.STEP)].n - 1), "reads|calls|expected|was taken before"),
        (1, lambda e: edited(e, where(e), b=e[where(e)].b + 16), "reaches|race|output|reads|taken"),
        (2, lambda e: edited(e, at(e, Did.SEND), n=e[at(e, Did.SEND)].n - 1), "come next"),
        (2, lambda e: edited(e, at(e, Did.SEND), peer=5), "no flow under way"),
        (3, lambda e: edited(e, at(e, Did.GET), number=0), "no flow under way|come next"),
        (3, lambda e: [x for i, x in enumerate(e) if i != at(e, Did.GET, 1)], "come next|before its flows"),
        (3, lambda e: edited(e, at(e, Did.STEP, 2), segment=2), "out of order"),
        (3, lambda e: edited(e, 0, what=77), "none of this plan's"),
    ],
)  # fmt: skip
def test_a_corrupted_trace_is_refused(
    ranks: list[tuple[object, list[Traced]]], rank: int, change: object, text: str
) -> None:
    with pytest.raises(PlanFault, match=f"replayed all_reduce.*({text})"):
        replay_all(corrupt(ranks, rank, 0, change))  # type: ignore[arg-type]


def test_a_done_that_came_too_early_is_refused(ranks: list[tuple[object, list[Traced]]]) -> None:
    """A border step that did not wait for the reduction inside: the events are all there, in another order."""

    def early(events: list[Event]) -> list[Event]:
        first = at(events, Did.FLOW)
        waits = ranks[3][1][0].run.plan.steps
        wait = next(s.wait for s in waits if s.kind == StepKind.FLOWS)
        early = [e for e in events[:first] if e.what == Did.DONE and e.number == wait]
        assert early
        rest = [e for e in events[:first] if e not in early]
        return [*rest, events[first], *early, *events[first + 1 :]]

    with pytest.raises(PlanFault, match=r"begins before step \d+, which it waits for, is done"):
        replay_all(corrupt(ranks, 3, 0, early))  # type: ignore[arg-type]


def test_one_rank_alone_is_replayed_against_plans(ranks: list[tuple[object, list[Traced]]]) -> None:
    topology, kept = ranks[2]
    plans = [r[1][0].run.plan for r in ranks]
    replay(topology, kept[0].shared, plans, [None, None, kept[0].run, None])  # type: ignore[arg-type]
    wrong = corrupt(ranks, 2, 0, lambda e: edited(e, at(e, Did.FLOW), n=e[at(e, Did.FLOW)].n - 8))[2][1][0].run
    with pytest.raises(PlanFault):
        replay(topology, kept[0].shared, plans, [None, None, wrong, None])  # type: ignore[arg-type]


def test_blocks_of_their_own_lengths(ranks: list[tuple[object, list[Traced]]]) -> None:
    """The gather: an offset that the executor took one element too far."""

    def farther(events: list[Event]) -> list[Event]:
        i = next(i for i, e in enumerate(events) if e.what == Did.STEP and e.n > 1 and e.b >= 0)
        return edited(events, i, b=events[i].b + 1)

    with pytest.raises(PlanFault, match="replayed gather"):
        replay_all(corrupt(ranks, 1, 1, farther))  # type: ignore[arg-type]
