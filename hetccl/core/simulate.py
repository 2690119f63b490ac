# SPDX-License-Identifier: Apache-2.0
"""Runs plans on the cost model instead of on a machine: when each step of each rank begins and ends.

Lanes, waits, scratch and the meeting of an island's ranks are those of the executor. Messages share their rank's link
each way; a combination overlaps with what arrives, chunk by chunk. Only some ranks need be there: messages of the
others are taken to come as if they had begun with the one that waits for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from hetccl.core.cost import Costs
from hetccl.core.plan import Channel, Flow, FlowKind, Lane, Plan, Slice, Step, StepKind, slice_range
from hetccl.errors import InternalError

__all__ = ["STAGES", "Span", "Timeline", "simulate"]

STAGES = ("island reduce", "copy", "border", "combine", "island spread")
REDUCES = (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER, StepKind.REDUCE)


class Span(NamedTuple):
    """One step of one segment on one rank, or ("combine") its host's sums. Seconds from the start of the operation."""

    rank: int
    lane: str
    name: str
    stage: str
    segment: int
    start: float
    end: float
    nbytes: int


@dataclass
class Timeline:
    """`stages`: seconds that the busiest rank is busy with each; `total` is the end of the last rank."""

    total: float
    stages: dict[str, float]
    busiest: dict[str, int]  # stage: the rank
    segments: int
    spans: list[Span] = field(default_factory=list)

    @property
    def bottleneck(self) -> str:
        """The stage that is busy longest."""
        return max(self.stages, key=lambda s: self.stages[s])


def simulate(
    costs: Costs, plans: Mapping[int, Plan], count: int, most_segments: int = 8, spans: bool = False
) -> Timeline:
    """The time of one operation on `count` elements. `plans` are of all ranks, or of some that stand for all.

    Beyond `most_segments` segments (four at least) the rest is taken to go on at the pace of the last of them.
    """
    return _Run(costs, plans, count, max(4, most_segments), spans).run()


class _Rank:
    def __init__(self, run: _Run, plan: Plan, segments: int) -> None:
        self.plan, self.rank = plan, plan.rank
        self.island, _ = run.costs.topology.place(plan.rank)
        self.shift = max((s.shift for s in plan.steps), default=0)
        order = {lane: plan.lane(lane) for lane in Lane}
        self.todo = {
            lane: deque(
                (index, iteration + plan.steps[index].shift)
                for iteration in range(-self.shift, segments)
                for index in order[lane]
                if 0 <= iteration + plan.steps[index].shift < segments
            )
            for lane in Lane
        }
        self.last = {lane: order[lane][-1] if order[lane] else -1 for lane in Lane}
        self.done: list[list[float]] = [[] for _ in plan.steps]
        self.free = {lane: 0.0 for lane in Lane}
        self.out = self.into = self.sums = 0.0  # when the link's two ways and the host's loop are free
        self.begun: dict[int, tuple[float, list[Flow], float]] = {}  # step: start, flows to come, end so far
        self.calls = 0
        self.called = False
        self.busy: dict[str, float] = defaultdict(float)


class _Run:
    def __init__(self, costs: Costs, plans: Mapping[int, Plan], count: int, most: int, spans: bool) -> None:
        self.costs, self.count = costs, count
        first = next(iter(plans.values()))
        self.lengths = first.segments(count)
        self.itemsize = first.dtype.itemsize
        n = len(self.lengths)
        self.simulated = n if n <= most + 1 else most
        self.record: list[Span] | None = [] if spans else None
        self.chunk = max(self.itemsize, costs.topology.chunk_bytes)
        self.ranks = {r: _Rank(self, p, self.simulated) for r, p in plans.items()}
        self.mates = {
            i.index: [self.ranks[r] for r in i.ranks if r in self.ranks] for i in costs.topology.islands
        }  # fmt: skip
        self.met: dict[tuple[int, int], dict[int, tuple[float, int, int]]] = {}
        self.messages: dict[tuple[int, int, int], deque[tuple[float, float]]] = defaultdict(deque)

    def run(self) -> Timeline:
        todo = [(rank, lane) for rank in self.ranks.values() for lane in Lane if rank.todo[lane]]
        while todo:
            moved = False
            for rank, lane in todo:
                while rank.todo[lane] and self.step(rank, lane):
                    moved = True
            todo = [(rank, lane) for rank, lane in todo if rank.todo[lane]]
            if todo and not moved:
                raise InternalError(f"the plan of rank {todo[0][0].rank} locks up in the cost model")
        return self.result()

    def result(self) -> Timeline:
        ends = [
            max((d[k] for r in self.ranks.values() for d in r.done if len(d) > k), default=0.0)
            for k in range(self.simulated)
        ]
        total, n = ends[-1] if ends else 0.0, len(self.lengths)
        scale = 1.0
        if n > self.simulated:
            left = (sum(self.lengths) - sum(self.lengths[: self.simulated])) / self.lengths[0]
            total += left * (ends[-2] - ends[0]) / (self.simulated - 2)  # the last one has nobody behind it
            scale = sum(self.lengths) / sum(self.lengths[: self.simulated])
        stages, busiest = {}, {}
        for stage in STAGES:
            best = max(self.ranks.values(), key=lambda r: r.busy[stage])
            if best.busy[stage]:
                stages[stage], busiest[stage] = best.busy[stage] * scale, best.rank
        return Timeline(total, stages or {"border": 0.0}, busiest, n, self.record or [])

    def bytes_of(self, plan: Plan, s: Slice, segment: int) -> int:
        lo, hi = slice_range(s, self.lengths[segment], plan.units)
        return (hi - lo) * self.itemsize

    def step(self, rank: _Rank, lane: Lane) -> bool:
        """Moves a lane by one step, if what it waits for is known."""
        index, segment = rank.todo[lane][0]
        step = rank.plan.steps[index]
        start = rank.free[lane]
        if step.kind == StepKind.FLOWS and index in rank.begun:
            return self.flows(rank, lane, step, index, segment)
        if rank.called and lane == Lane.ISLAND:
            return False
        if step.wait >= 0:
            if len(rank.done[step.wait]) <= segment:
                return False
            start = max(start, rank.done[step.wait][segment])
        before = segment - rank.shift - 1
        other = rank.last[Lane.BORDER if lane == Lane.ISLAND else Lane.ISLAND]
        if before >= 0 and other >= 0 and rank.last[lane] >= 0:
            if len(rank.done[other]) <= before:
                return False
            start = max(start, rank.done[other][before])
        if step.kind == StepKind.FLOWS:
            flows = [
                f for f in rank.plan.flows[step.first_flow : step.first_flow + step.n_flows]
                if self.bytes_of(rank.plan, f.src if f.src.buffer >= 0 else f.dst, segment)
            ]  # fmt: skip
            end = self.sends(rank, flows, segment, start)
            rank.begun[index] = (start, [f for f in flows if f.kind != FlowKind.SEND], end)
            self.flows(rank, lane, step, index, segment)
            return True  # what it sends may be what another waits for
        if step.kind.is_call:
            return self.call(rank, step, index, segment, start)
        n = self.bytes_of(rank.plan, step.dst, segment)
        if not n:
            lasts = 0.0
        elif step.kind == StepKind.COPY:
            lasts = self.costs.copy(rank.island, n)
        else:
            lasts = self.costs.combine(n * max(1, step.n_src))
        stage = "copy" if step.kind == StepKind.COPY else "combine"
        self.end(rank, lane, index, segment, start, start + lasts, stage, n)
        return True

    def end(
        self, rank: _Rank, lane: Lane, index: int, segment: int, start: float, end: float, stage: str, n: int
    ) -> None:
        rank.done[index].append(end)
        rank.free[lane] = end
        rank.todo[lane].popleft()
        if stage != "border":
            rank.busy[stage] += end - start
        if self.record is not None and end > start:
            name = rank.plan.steps[index].kind.name.lower()
            self.record.append(
                Span(rank.rank, lane.name.lower(), "border" if name == "flows" else name, stage, segment, start, end, n)
            )

    # ---- vendor calls

    def call(self, rank: _Rank, step: Step, index: int, segment: int, start: float) -> bool:
        n = self.bytes_of(rank.plan, step.len, segment)
        stage = "island reduce" if step.kind in REDUCES else "island spread"
        if not n:
            self.end(rank, Lane.ISLAND, index, segment, start, start, stage, 0)
            return True
        key = (rank.island, rank.calls)
        met = self.met.setdefault(key, {})
        met[rank.rank] = (start, index, segment)
        rank.calls += 1
        rank.called = True
        mates = self.mates[rank.island]
        if len(met) < len(mates):
            return False
        together = max(at for at, _, _ in met.values())
        lasts = self.costs.call(rank.island, step.kind, n)
        for mate in mates:
            _, which, of = met[mate.rank]
            mate.called = False
            self.end(mate, Lane.ISLAND, which, of, together, together + lasts, stage, n)
        del self.met[key]
        return True

    # ---- messages

    def pass_on(
        self, rank: _Rank, peers: tuple[int, ...], channel: int, n: int, ready: float, whole: float
    ) -> float:
        """One message to several peers, chunk by chunk to all, whose first chunk can go at `ready` and whose last is
        there at `whole`. Returns when all has left."""
        if not peers:
            return whole
        paths = [self.costs.path(rank.rank, peer) for peer in peers]
        ones = [min(n, self.chunk) * path.beta + path.message for path in paths]
        lasts = sum(n * path.beta + -(-n // self.chunk) * path.message for path in paths)
        begin = max(ready, rank.out)
        rank.out = end = max(begin + lasts, whole + sum(ones))
        rank.busy["_out"] += lasts
        for peer, path, one in zip(peers, paths, accumulate(ones), strict=True):
            if peer in self.ranks:
                times = (begin + one + path.latency, end + path.latency)
                self.messages[rank.rank, peer, channel].append(times)
        return end

    def sends(self, rank: _Rank, flows: list[Flow], segment: int, start: float) -> float:
        """What a step sends from the first: chunks of all messages by turns. Returns when all have left."""
        todo: list[tuple[float, float, int, Flow]] = []  # all of a message, its first chunk, to whom
        for flow in flows:
            if flow.kind not in (FlowKind.SEND, FlowKind.EXCHANGE):
                continue
            n = self.bytes_of(rank.plan, flow.src, segment)
            for peer in flow.peers:
                path = self.costs.path(rank.rank, peer)
                one = min(n, self.chunk) * path.beta + path.message
                todo.append((n * path.beta + -(-n // self.chunk) * path.message, one, peer, flow))
        if not todo:
            return start
        begin = max(start, rank.out)
        lengths = sorted(lasts for lasts, _, _, _ in todo)
        before = [0.0, *accumulate(lengths)]
        first = 0.0
        for lasts, one, peer, flow in todo:
            first += one
            at = bisect_left(lengths, lasts)  # shorter ones are done; of each other as much has gone as of this one
            end = begin + before[at] + lasts * (len(lengths) - at)
            if peer in self.ranks:
                latency = self.costs.path(rank.rank, peer).latency
                self.messages[rank.rank, peer, flow.channel].append((begin + first + latency, end + latency))
        rank.out = begin + before[-1]
        rank.busy["_out"] += before[-1]
        return rank.out

    def receive(self, rank: _Rank, peer: int, channel: int, n: int, start: float, hops: int) -> tuple[float, float]:
        """(first chunk, all) of the next message from a peer."""
        path = self.costs.path(rank.rank, peer)
        lasts = n * path.beta + -(-n // self.chunk) * path.message
        one = min(n, self.chunk) * path.beta + path.message
        if peer in self.ranks:
            first, whole = self.messages[peer, rank.rank, channel].popleft()
        else:
            first = start + hops * (path.latency + one)
            whole = first + lasts - one
        first = max(first, start)
        rank.into = max(rank.into, first - one) + lasts  # messages come in side by side, none faster than the link
        rank.busy["_into"] += lasts
        return first, max(rank.into, whole)

    def flows(self, rank: _Rank, lane: Lane, step: Step, index: int, segment: int) -> bool:
        start, waiting, end = rank.begun[index]
        left: list[Flow] = []
        blocked: set[tuple[int, int]] = set()
        sends_to = {
            f.peers[0] for f in rank.plan.flows[step.first_flow : step.first_flow + step.n_flows]
            if f.kind == FlowKind.SEND and f.channel == Channel.CONTRIBUTE
        } if waiting else set()  # fmt: skip
        for flow in waiting:
            sources, channel = _sources(flow)
            there = all(
                p not in self.ranks or (self.messages[p, rank.rank, channel] and (p, channel) not in blocked)
                for p in sources
            )
            if not there:
                blocked.update((p, channel) for p in sources)
                left.append(flow)
                continue
            end = max(end, self.flow(rank, flow, sources, channel, segment, start, sends_to))
        if left:
            moved = len(left) < len(waiting)
            rank.begun[index] = (start, left, end)
            return moved
        del rank.begun[index]
        rank.busy["border"] = max(rank.busy["_out"], rank.busy["_into"])
        n = sum(
            self.bytes_of(rank.plan, f.src if f.src.buffer >= 0 else f.dst, segment)
            for f in rank.plan.flows[step.first_flow : step.first_flow + step.n_flows]
        )
        self.end(rank, lane, index, segment, start, end, "border", n)
        return True

    def flow(
        self, rank: _Rank, flow: Flow, sources: tuple[int, ...], channel: int, segment: int, start: float,
        sends_to: set[int],
    ) -> float:  # fmt: skip
        n = self.bytes_of(rank.plan, flow.src if flow.src.buffer >= 0 else flow.dst, segment)
        first = whole = start
        for peer in sources:
            hops = 2 if channel == Channel.RESULT and peer in sends_to else 1
            f, w = self.receive(rank, peer, channel, n, start, hops)
            first, whole = max(first, f), max(whole, w)
        if flow.kind == FlowKind.RECV:
            return whole
        if flow.kind == FlowKind.FORWARD:
            return self.pass_on(rank, flow.peers[1:], flow.channel, n, first, whole)
        lasts = self.costs.combines(rank.island, n * (1 + len(sources)))
        part = lasts * min(1.0, self.chunk / n)
        summed = max(rank.sums + lasts, whole + part, first + lasts)
        rank.sums = summed
        rank.busy["combine"] += lasts
        targets = flow.peers[-1:] if flow.kind == FlowKind.PASS else flow.peers if flow.give_back else ()
        way = flow.channel if flow.kind == FlowKind.PASS else Channel.RESULT
        return self.pass_on(rank, targets, way, n, first + part, summed)


def _sources(flow: Flow) -> tuple[tuple[int, ...], int]:
    """Whom a flow receives from, and on which channel."""
    if flow.kind in (FlowKind.RECV, FlowKind.FORWARD):
        return flow.peers[:1], flow.channel
    return (flow.peers[:-1] if flow.kind == FlowKind.PASS else flow.peers), Channel.CONTRIBUTE
