# SPDX-License-Identifier: Apache-2.0
"""The cost model: lines, predictions that follow from them, and choices that all ranks make alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import verify_cases as cases

from hetccl.core.algorithms.common import Shared
from hetccl.core.cost import Costs, CostTable, IslandCost, Line, PathCost, carried
from hetccl.core.plan import StepKind
from hetccl.core.planner import ALGORITHMS, Planner
from hetccl.core.selector import MODEL_OPS, Selector, measured_time, predict, stand_ins
from hetccl.core.topology import LEAST_CHUNK, Record, Topology, compute_topology, fitting_chunk
from hetccl.core.topology_file import parse_topology, with_border
from hetccl.types import DType, Op, RedOp

SUM = Shared(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM)
FREE = Line(0.0, 1e-18)


def table(latency: float = 0.0, rate: float = 1e9, message: float = 0.0, call: Line = FREE) -> CostTable:
    vendor = IslandCost({"any": call}, FREE)
    return CostTable({"net": PathCost(latency, 1 / rate, message)}, {"cpu": vendor, "dev": vendor}, FREE)


def time_of(top: Topology, costs: CostTable, name: str, nbytes: int, op: Op = Op.ALL_REDUCE) -> float:
    return predict(Costs(top, costs), replace(SUM, op=op), ALGORITHMS[op][name], nbytes)[0].total


def test_bytes_of_calls_are_those_of_a_ring() -> None:
    assert carried(StepKind.ALL_REDUCE, 100, 4) == 150
    assert carried(StepKind.ALL_GATHER, 100, 4) == 300
    assert carried(StepKind.BROADCAST, 100, 4) == 100


def test_a_prediction_is_what_the_formula_says() -> None:
    ones = replace(cases.topology([[0], [1], [2], [3]]), chunk_bytes=1 << 10)
    size = 1 << 22
    # latency only: one hop, two hops, 2(C-1) and 2 log2(C) rounds
    for name, hops in (("exchange", 1), ("owners", 2), ("ring", 6), ("tree", 4)):
        assert time_of(ones, table(latency=1.0, rate=1e15), name, 64) == pytest.approx(hops, rel=1e-3)
    # bytes only: C-1 times all of it through each rank's link, else 2(C-1)/C
    assert time_of(ones, table(), "exchange", size) == pytest.approx(3 * size / 1e9, rel=0.02)
    for name in ("owners", "ring", "tree"):
        assert time_of(ones, table(), name, size) == pytest.approx(1.5 * size / 1e9, rel=0.02)
    assert time_of(ones, table(), "chain", size, Op.BROADCAST) == pytest.approx(size / 1e9, rel=0.02)
    assert time_of(ones, table(), "direct", size, Op.BROADCAST) == pytest.approx(3 * size / 1e9, rel=0.02)


def test_stages_overlap_in_segments() -> None:
    """Two islands of two: inside as fast as the border. One after the other would be the sum of the stages."""
    top = replace(cases.topology([[0, 1], [2, 3]], segment_bytes=1 << 20), chunk_bytes=64 << 10)
    costs = Costs(top, table(call=Line(0.0, 1e-9)))
    timeline, _ = predict(costs, SUM, ALGORITHMS[Op.ALL_REDUCE]["owners"], 64 << 20)
    slowest = max(timeline.stages.values())
    assert sum(timeline.stages.values()) > 1.9 * slowest
    assert timeline.total < 1.1 * max(slowest, timeline.stages["island reduce"] + timeline.stages["island spread"])
    assert timeline.bottleneck in timeline.stages and timeline.segments == 64


def test_the_rest_of_many_segments_goes_on_at_their_pace() -> None:
    top = replace(cases.topology([[0, 1], [2, 3]], segment_bytes=1 << 20), chunk_bytes=64 << 10)
    costs = Costs(top, table(call=Line(1e-5, 1e-9)))
    owners = ALGORITHMS[Op.ALL_REDUCE]["owners"]
    few = predict(costs, SUM, owners, 100 << 20, most_segments=8)[0].total
    all_of_them = predict(costs, SUM, owners, 100 << 20, most_segments=1000)[0].total
    assert few == pytest.approx(all_of_them, rel=0.03)


@pytest.mark.parametrize("op", MODEL_OPS, ids=lambda op: op.label)
def test_every_algorithm_wins_somewhere(op: Op) -> None:
    """On some shape of cluster, cost of messages and size."""
    shapes = ([[0], [1]], [[0, 1], [2, 3]], [[i] for i in range(4)], [[i] for i in range(8)],
              [[4 * i + j for j in range(4)] for i in range(4)], [[0, 1, 2], [3, 4, 5, 6], [7]])  # fmt: skip
    tables = (
        table(1e-6, 5e9, 1e-7, Line(1e-6, 1e-10)),
        table(1e-6, 5e9, 2e-6, Line(1e-6, 1e-10)),
        table(1e-6, 5e9, 1e-7, Line(5e-5, 1e-11)),
        table(2e-5, 1e9, 3e-6, Line(1e-5, 1e-11)),
    )
    winners = set()
    for shape in shapes:
        top = replace(cases.topology(shape, segment_bytes=1 << 20), chunk_bytes=64 << 10)
        for costs in tables:
            for nbytes in (64, 2048, 1 << 14, 1 << 17, 1 << 20, 1 << 24):
                times = {name: time_of(top, costs, name, nbytes, op) for name in cases.able(op, top)}
                least = min(times.values())
                near = [name for name, t in times.items() if t <= 1.02 * least]
                winners.update(near if len(near) == 1 else ())
    assert len(winners) >= 3, winners


def test_choices_are_the_least_predicted_times() -> None:
    top = cases.topology([[0, 1], [2, 3]], segment_bytes=1 << 20)
    costs = table(1e-5, 1e9, 1e-6, Line(1e-5, 1e-10))
    planner = Planner(top, 0, {}, verify="off", table=costs)
    limits = planner.limits(Op.ALL_REDUCE)
    assert limits and list(limits) == sorted(limits)
    for nbytes in (4, 1 << 12, 1 << 20, 1 << 26):
        choice = planner.selector.choices(Op.ALL_REDUCE).of(nbytes)
        times = {name: time_of(top, costs, name, nbytes) for name in cases.able(Op.ALL_REDUCE, top)}
        best = min(times.values())
        mine = predict(
            Costs(top, costs), replace(SUM, segment_bytes=choice.segment_bytes),
            ALGORITHMS[Op.ALL_REDUCE][choice.algorithm], nbytes,
        )[0].total  # fmt: skip
        assert mine <= 1.03 * best, (nbytes, choice, times)


def test_measured_times_of_this_job_go_before_the_model() -> None:
    top = cases.topology([[0], [1]])
    times = {"owners": ((64, 1e-6), (1 << 20, 5e-3)), "exchange": ((64, 2e-6), (1 << 20, 1e-3))}
    tuned = CostTable(job=Costs.job(top), measured={"all_reduce": times})
    found = Selector(top, tuned, ALGORITHMS, {}).choices(Op.ALL_REDUCE)
    assert found.of(64).algorithm == "owners" and found.of(1 << 20).algorithm == "exchange"
    elsewhere = replace(tuned, job="another job")
    model = Selector(top, elsewhere, ALGORITHMS, {}).choices(Op.ALL_REDUCE)
    assert model.of(64).algorithm == "exchange" and model.of(1 << 26).algorithm == "owners"


@pytest.mark.parametrize("kernels", [True, False])
def test_a_device_that_can_adds_much_that_a_rank_in_host_memory_sends(kernels: bool) -> None:
    top = cases.topology([[0], [1]], device=[1], plain=[] if kernels else [1])
    costs = CostTable(combine=Line(1e-6, 1e-9))
    planner = Planner(top, 0, {}, verify="off", table=costs)
    planner.use_direct()
    choices = planner.selector.choices(Op.ALL_REDUCE)
    taken = [planner.selector.at(Op.ALL_REDUCE, n).algorithm for n in (4, 2 << 20, (2 << 20) + 1, 1 << 30)]
    assert taken == ["exchange"] * 2 + (["star"] if kernels else ["exchange"]) * 2
    assert taken == [choices.of(n).algorithm for n in (4, 2 << 20, (2 << 20) + 1, 1 << 30)]
    assert planner.selector.candidates(Op.ALL_REDUCE) == (("exchange", "star") if kernels else ("exchange",))
    host, device = (Costs(planner.topology, costs).combines(i, 1 << 20) for i in (0, 1))
    assert device < host if kernels else device == host
    forced = Planner(top, 0, {"all_reduce": "star"}, verify="off", table=costs)
    forced.use_direct()
    assert {c.algorithm for c in forced.selector.choices(Op.ALL_REDUCE).buckets} == {"star"}


def test_times_between_measured_sizes() -> None:
    points = ((100, 1.0), (10_000, 4.0))
    assert measured_time(points, 1) == 1.0
    assert measured_time(points, 1000) == pytest.approx(2.0)
    assert measured_time(points, 20_000) == 8.0


def test_forcing_leaves_one() -> None:
    top = cases.topology([[0, 1], [2, 3]])
    planner = Planner(top, 0, {"broadcast": "tree"}, verify="off")
    assert {c.algorithm for c in planner.selector.choices(Op.BROADCAST).buckets} == {"tree"}


def test_what_a_file_says_goes_before_our_own_figures() -> None:
    text = """
islands:
  a: {vendor: nccl, ranks: 4, hosts: 1, rails: 4, rate: 10GB/s, latency: 7us, inside: {rate: 100GB/s, latency: 9us}}
  b: {vendor: rccl, ranks: 4, hosts: 1, rails: 4, rate: 20GB/s}
"""
    costs = Costs(parse_topology(text).topology())
    path = costs.path(0, 4)
    assert path.latency == pytest.approx(7e-6) and path.beta == pytest.approx(1 / 10e9)
    assert costs.call(0, StepKind.BROADCAST, 1e6) == pytest.approx(9e-6 + 1e6 / 100e9)
    assert costs.call(1, StepKind.BROADCAST, 1e6) != costs.call(0, StepKind.BROADCAST, 1e6)


def record(rank: int, vendor: str, border_rate: float = 0.0, inner_rate: float = 0.0) -> Record:
    return Record(
        rank, "here", "here", rank, vendor, "", (vendor, "1", "", ""), 64, vendor, False, False, False, 32 << 20,
        (0x1FF,) * 19, -1, {}, {}, border_rate=border_rate, inner_rate=inner_rate,
    )  # fmt: skip


def test_pretended_links_count_also_within_a_host() -> None:
    """Islands of 2, 1 and 1 ranks: who has more links owns more, and segments and chunks are cut for slow links."""
    vendors = ("sim-a", "sim-a", "sim-b", "sim-c")
    free = compute_topology([record(r, v) for r, v in enumerate(vendors)], 1 << 20)
    slow = compute_topology([record(r, v, 100e6, 400e6) for r, v in enumerate(vendors)], 1 << 20)
    assert not free.shaped and slow.shaped and Topology.from_json(slow.to_json()) == slow
    assert Costs(free).path(0, 2).beta < 1e-9 and Costs(slow).path(0, 2).beta == pytest.approx(1e-8)
    assert Costs(slow).call(0, StepKind.REDUCE_SCATTER, 1e6) == pytest.approx(2.5e-3, rel=0.1)
    assert len(set(free.border.owners)) == 1 and slow.border.owners[1:] == (0, 0)
    assert (fitting_chunk(free), fitting_chunk(slow)) == (1 << 20, LEAST_CHUNK)
    even = replace(slow, _place={})
    even.border.__dict__["owners"] = (1, 1, 1)
    slow = replace(slow, chunk_bytes=LEAST_CHUNK, _place={})
    assert time_at(slow) < 0.85 * time_at(even)
    one_unknown = compute_topology([record(0, "sim-a", 1e8), record(1, "sim-a"), record(2, "sim-b", 1e8)], 1 << 20)
    assert [i.speeds for i in one_unknown.islands] == [(), (1e8,)]


def time_at(top: Topology) -> float:
    shared = replace(SUM, segment_bytes=4 << 20)
    return predict(Costs(top), shared, ALGORITHMS[Op.ALL_REDUCE]["owners"], 64 << 20)[0].total


def test_a_file_says_more_of_links_than_the_ranks_do() -> None:
    vendors = ("sim-a", "sim-a", "sim-b")
    found = compute_topology([record(r, v, 100e6, 400e6) for r, v in enumerate(vendors)], 1 << 20)
    text = """
islands:
  a: {vendor: sim-a, ranks: 2, border: 1}
  b: {vendor: sim-b, ranks: 1, rails: 1, rate: 10GB/s, inside: {rate: 1GB/s}}
"""
    file = parse_topology(text)
    a, b = (with_border(i, e, dict.fromkeys(e.ranks, "here")) for i, e in zip(found.islands, file.order, strict=True))
    assert (a.border, a.speeds, a.inner_rate) == ((0,), (100e6,), 400e6)
    assert (b.speeds, b.inner_rate) == ((10e9,), 1e9)


def test_ranks_that_stand_for_all_give_their_time() -> None:
    text = "islands:\n" + "".join(
        f"  i{k}: {{vendor: nccl, ranks: 8, hosts: 1, rails: 8, rate: 10GB/s, "
        "inside: {rate: 100GB/s, latency: 9us}}\n"
        for k in range(4)
    )
    top = parse_topology(text).topology()
    costs = Costs(top)
    for op in MODEL_OPS:
        for name in cases.able(op, top):
            make = ALGORITHMS[op][name]
            shared = replace(SUM, op=op)
            some, plans = predict(costs, shared, make, 16 << 20)
            assert sorted(plans) == stand_ins(top, shared) and len(plans) < top.size
            everyone, _ = predict(costs, shared, make, 16 << 20, ranks=range(top.size))
            assert some.total == pytest.approx(everyone.total, rel=0.15), (op, name)
