# SPDX-License-Identifier: Apache-2.0
"""Replays what the executor did (trace.h) through the checker: it must have kept the order that the proof takes for
granted, and with the addresses, lengths and chunks that it really used the outputs must come out right.

Two looks at a trace. The first follows its events in the order in which they happened and holds them against the rules
of the executor: lanes in their order, no step before the one that it waits for, scratch not taken again too early,
chunks in sequence. The second runs the machine of the proof, but where a slice lies and how long it is comes from the
trace. Ranks without a trace are taken to do as planned.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetccl.core.algorithms.common import Places, Shared
from hetccl.core.plan import Flow, FlowKind, Lane, Plan, Slice, StepKind
from hetccl.core.topology import Topology
from hetccl.core.verify.bounds import check_bounds
from hetccl.core.verify.checker import Proof, check_alike, check_outputs
from hetccl.core.verify.island import VENDOR
from hetccl.core.verify.layout import Layout
from hetccl.core.verify.machine import Machine, PlanFault
from hetccl.core.verify.memory import Fault
from hetccl.core.verify.spec import Sizes
from hetccl.core.verify.values import Values

__all__ = ["Did", "Event", "Run", "check_order", "replay"]

NOWHERE = -(1 << 63)  # HX_NOWHERE
SLOTS = 4  # of a ring: what has run did not lock, so their number does not matter


class Did(enum.IntEnum):
    """As in trace.h."""

    BEGIN = 0
    STEP = 1
    DONE = 2
    FLOW = 3
    SEND = 4
    GET = 5
    END = 6


class Event(NamedTuple):
    what: int
    number: int  # of the step or flow
    peer: int = -1
    segment: int = 0
    a: int = 0
    b: int = 0
    n: int = 0


@dataclass(frozen=True)
class Run:
    """What one rank's executor did in one operation. In elements: `count`, how far the input begins behind the output
    (`apart`), and the `chunk`. `streamed`: the last steps were left to a stream, nobody has seen them end."""

    plan: Plan
    count: int
    apart: int
    chunk: int
    events: tuple[Event, ...]
    streamed: bool = False


def replay(
    topology: Topology, shared: Shared, plans: Sequence[Plan], runs: Sequence[Run | None], places: Sequence[Places] = ()
) -> Proof:
    """Checks the traces of one operation, by rank (None: taken to have done as planned). Raises `PlanFault`."""
    seen = [run for run in runs if run is not None]
    count, chunk = seen[0].count, seen[0].chunk
    sizes = Sizes(shared, topology.size, count, places)
    try:
        if any((run.count, run.chunk) != (count, chunk) for run in seen):
            raise PlanFault(f"ranks ran it with counts {sorted({run.count for run in seen})}")
        plans = [run.plan if run else plan for run, plan in zip(runs, plans, strict=True)]
        check_alike(topology, shared, plans, sizes)
        for run in seen:
            check_order(run, device=not topology.island_of(run.plan.rank).host_memory)

        def layout(plan: Plan, values: Values) -> Layout:
            run = runs[plan.rank]
            return _Traced(run, sizes, values) if run else Layout(plan, sizes, False, values)

        machine = Machine(topology, sizes, plans, chunk=max(chunk, 1), slots=SLOTS, in_place=False, layout=layout)
        machine.run()
        owned = check_outputs(topology, shared, machine, sizes)
        wrong = check_bounds(topology, plans[0], sizes, machine.channels, owned)
        if wrong:
            raise PlanFault(wrong)
    except PlanFault as fault:
        raise PlanFault(f"replayed {shared.op.label} of {count} elements: {fault}", **fault.facts) from None
    return Proof(count, machine.steps_run, machine.channels.total, len(plans[0].segments(count)))


class _Traced(Layout):
    """Slices where the executor found them."""

    def __init__(self, run: Run, sizes: Sizes, values: Values) -> None:
        at = sizes.in_place(run.plan.rank)
        both = sizes.spec.in_place is not None and sizes.extent(run.plan.rank, True) > 0
        super().__init__(run.plan, sizes, both and run.apart == at[0] - at[1], values)
        self._offsets: dict[tuple[Slice, int], int] = {}
        self._lengths: dict[tuple[Slice, int], int] = {}
        for e in run.events:
            if e.what == Did.STEP:
                step = run.plan.steps[e.number]
                self._note(step.src, step.dst, step.len if step.kind in VENDOR else step.dst, e)
            elif e.what == Did.FLOW:
                flow = run.plan.flows[e.number]
                self._note(flow.src, flow.dst, flow.src if flow.src.buffer >= 0 else flow.dst, e)

    def _note(self, src: Slice, dst: Slice, length: Slice, e: Event) -> None:
        found = [(self._lengths, length, e.n)]
        found += [(self._offsets, s, at) for s, at in ((src, e.a), (dst, e.b)) if at != NOWHERE]
        for known, s, value in found:
            if known.setdefault((s, e.segment), value) != value:
                what = f"{Did(e.what).name.lower()} {e.number} of segment {e.segment}"
                raise PlanFault(
                    f"rank {self.plan.rank}: {what} took {value} for {s}, where {known[s, e.segment]} was taken before",
                    rank=self.plan.rank,
                )

    def length(self, s: Slice, segment: int) -> int:
        found = self._lengths.get((s, segment))
        return super().length(s, segment) if found is None else found

    def offset(self, s: Slice, segment: int) -> int:
        found = self._offsets.get((s, segment))
        if found is None:
            raise Fault(f"needs {s}, which the executor never took")
        return found


def check_order(run: Run, device: bool) -> None:
    """Whether the events came in an order that the executor's rules allow. Raises `PlanFault`."""
    order = _Order(run, device)
    for number, event in enumerate(run.events):
        wrong = order.follow(event)
        if wrong:
            name = Did(event.what).name.lower() if event.what in set(Did) else f"kind {event.what}"
            what = f"{name} {event.number}"
            raise PlanFault(
                f"rank {run.plan.rank}: event {number} ({what}, segment {event.segment}) {wrong}", rank=run.plan.rank
            )
    wrong = order.unfinished()
    if wrong:
        raise PlanFault(f"rank {run.plan.rank}: {wrong}", rank=run.plan.rank)


class _Open:
    """A flow under way."""

    def __init__(self, flow: Flow, n: int) -> None:
        self.flow, self.n, self.got, self.sent = flow, n, 0, [0] * len(flow.peers)

    def senders(self) -> list[int]:
        """Numbers of the peers that something is sent to."""
        kind, many = self.flow.kind, len(self.flow.peers)
        if kind == FlowKind.SEND:
            return [0]
        if kind == FlowKind.FORWARD:
            return list(range(1, many))
        if kind == FlowKind.PASS:
            return [many - 1]
        return list(range(many)) if kind == FlowKind.EXCHANGE or self.flow.give_back else []

    @property
    def done(self) -> bool:
        got = self.got == self.n or self.flow.kind == FlowKind.SEND
        return got and all(self.sent[k] == self.n for k in self.senders())


class _Order:
    """The rules of executor.c and flows.c, as seen from outside."""

    def __init__(self, run: Run, device: bool) -> None:
        plan = self.plan = run.plan
        self.run, self.device = run, device
        self.segments = len(plan.segments(run.count))
        self.shift = max((s.shift for s in plan.steps), default=0)
        self.lanes = {lane: self._program(plan.lane(lane)) for lane in Lane}
        self.at = {lane: 0 for lane in Lane}
        self.begun, self.done = [0] * len(plan.steps), [0] * len(plan.steps)
        self.open: dict[int, _Open] = {}
        self.flows_step, self.flows_segment = -1, -1
        self.signals = plan.signals() | set(plan.lane(Lane.ISLAND)[-1:])
        self.owner = {f: i for i, s in enumerate(plan.steps) if s.kind == StepKind.FLOWS
                      for f in range(s.first_flow, s.first_flow + s.n_flows)}  # fmt: skip

    def _program(self, steps: list[int]) -> list[tuple[int, int, int]]:
        """(iteration, step, segment) in order."""
        found = []
        for iteration in range(-self.shift, self.segments):
            for index in steps:
                segment = iteration + self.plan.steps[index].shift
                if 0 <= segment < self.segments:
                    found.append((iteration, index, segment))
        return found

    def follow(self, e: Event) -> str:
        """What is wrong with the next event, or nothing."""
        rules: dict[int, Callable[[Event], str]] = {
            Did.STEP: self._step, Did.DONE: self._done, Did.FLOW: self._flow, Did.SEND: self._send, Did.GET: self._get,
        }  # fmt: skip
        limit = len(self.plan.steps if e.what in (Did.STEP, Did.DONE) else self.plan.flows)
        if e.what not in rules or not 0 <= e.number < limit:
            return "is none of this plan's"
        return rules[e.what](e)

    def unfinished(self) -> str:
        for lane, program in self.lanes.items():
            if self.at[lane] < len(program):
                return f"lane {lane.name.lower()} ended before step {program[self.at[lane]][1]}"
        for index, (begun, done) in enumerate(zip(self.begun, self.done, strict=True)):
            if begun != done and not (self.run.streamed and index in self.signals):
                return f"step {index} was begun {begun} times, but done {done} times"
        return "a flow has not ended" if self.open else ""

    def _start(self, index: int, segment: int) -> str:
        """A step begins: its turn, what it waits for, its scratch."""
        step, lane = self.plan.steps[index], Lane(self.plan.steps[index].lane)
        program, at = self.lanes[lane], self.at[lane]
        if at >= len(program) or program[at][1:] != (index, segment):
            expected = f"step {program[at][1]} of segment {program[at][2]}" if at < len(program) else "nothing"
            return f"is out of order: {expected} comes next"
        before = program[at - 1][1] if at else -1
        in_stream = self.device and lane == Lane.ISLAND
        if before >= 0 and not in_stream and self.done[before] < self.begun[before]:
            return f"begins before step {before} of its lane is done"
        if step.wait >= 0 and self.done[step.wait] <= segment:
            return f"begins before step {step.wait}, which it waits for, is done"
        last = segment - self.shift - 1
        if last >= 0 and self.lanes[Lane.ISLAND] and self.lanes[Lane.BORDER]:
            border, iteration = self.lanes[Lane.BORDER], self.segments
            if self.at[Lane.BORDER] < len(border):
                iteration = border[self.at[Lane.BORDER]][0]
            busy = iteration <= last if lane == Lane.ISLAND else self.done[self.plan.lane(Lane.ISLAND)[-1]] <= last
            if busy:
                return "takes scratch that an earlier segment still uses"
        self.begun[index] += 1
        return ""

    def _step(self, e: Event) -> str:
        wrong = self._start(e.number, e.segment)
        self.at[Lane(self.plan.steps[e.number].lane)] += not wrong
        return wrong

    def _done(self, e: Event) -> str:
        step = self.plan.steps[e.number]
        if step.kind == StepKind.FLOWS:
            if step.n_flows == 0 and self.flows_step < 0:  # nothing tells that it began
                wrong = self._start(e.number, self.done[e.number])
                if wrong:
                    return wrong
            elif e.number != self.flows_step or not all(flow.done for flow in self.open.values()):
                return "ends before its flows"
            elif len(self.open) < step.n_flows:
                return "ends before all of its flows have begun"
            self.open, self.flows_step = {}, -1
            self.at[Lane(step.lane)] += 1
        self.done[e.number] += 1
        return "ends more often than it began" if self.done[e.number] > self.begun[e.number] else ""

    def _flow(self, e: Event) -> str:
        step = self.owner.get(e.number, -1)
        if self.flows_step < 0 and step >= 0 and e.number == self.plan.steps[step].first_flow:
            wrong = self._start(step, e.segment)
            if wrong:
                return wrong
            self.flows_step, self.flows_segment = step, e.segment
        if step < 0 or step != self.flows_step or e.segment != self.flows_segment or e.number in self.open:
            return "is no flow of the step that runs"
        self.open[e.number] = _Open(self.plan.flows[e.number], e.n)
        return ""

    def _chunk(self, e: Event, at: int, state: _Open) -> str:
        if e.a != at or e.n != min(self.run.chunk, state.n - at) or e.n <= 0:
            return f"moves elements {e.a} to {e.a + e.n}; {min(self.run.chunk, state.n - at)} from {at} on come next"
        mine = state.flow
        for number, other in self.open.items():
            if number < e.number and not other.done and other.flow.uses & mine.uses:
                return f"overtakes flow {number}, which uses the same channel"
        return ""

    def _send(self, e: Event) -> str:
        state = self.open.get(e.number)
        if state is None or e.peer not in state.senders():
            return "sends what no flow under way has to send"
        wrong = self._chunk(e, state.sent[e.peer], state)
        if not wrong and state.flow.kind not in (FlowKind.SEND, FlowKind.EXCHANGE) and e.a + e.n > state.got:
            wrong = "sends on what has not come yet"
        if not wrong and state.flow.kind == FlowKind.EXCHANGE and e.a > state.got:
            wrong = "sends a chunk before the one before it is combined"
        state.sent[e.peer] += e.n
        return wrong

    def _get(self, e: Event) -> str:
        state = self.open.get(e.number)
        if state is None or state.flow.kind == FlowKind.SEND:
            return "receives for no flow under way"
        wrong = self._chunk(e, state.got, state)
        if not wrong and state.flow.kind == FlowKind.EXCHANGE and min(state.sent) < e.a + e.n:
            wrong = "combines a chunk that has not left for every peer"
        state.got += e.n
        return wrong
