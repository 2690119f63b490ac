# SPDX-License-Identifier: Apache-2.0
"""A reference interpreter: runs the plans of all ranks on real numbers in one process, under a seeded schedule.

It shares nothing with the prover but the plan: lanes, scratch and flows are written down once more, polled as the
executor polls them, in an order drawn from the seed. Streams run late, vendor calls end at different times on
different ranks and fold in any order, and memory that nobody has written is NaN.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from hetccl.core.groups import groups_of
from hetccl.core.plan import Buffer, Lane, Plan, Slice, Step, StepKind, slice_range
from hetccl.core.topology import Topology
from hetccl.core.verify.reference_flows import Flows, FlowState, Stuck
from hetccl.types import RedOp

__all__ = ["Outcome", "Stuck", "run_plans"]

NAN = float("nan")
NEUTRAL = {RedOp.SUM: -0.0, RedOp.PROD: 1.0, RedOp.MAX: -math.inf, RedOp.MIN: math.inf}
CALLS = frozenset(StepKind(kind) for kind in range(StepKind.TRANSFER + 1))  # of the vendor's library
FOLD: dict[RedOp, Callable[[float, float], float]] = {
    RedOp.SUM: lambda a, b: a + b,
    RedOp.PROD: lambda a, b: a * b,
    RedOp.MAX: lambda a, b: a if a != a or a > b else b,
    RedOp.MIN: lambda a, b: a if a != a or a < b else b,
}
NEUTRAL = {RedOp.PROD: 1.0, RedOp.MAX: float("-inf"), RedOp.MIN: float("inf")}  # of sum: nothing


@dataclass
class Outcome:
    """Memory after a run, by rank, and elements sent by (sender, receiver)."""

    outputs: list[list[float]]
    sent: dict[tuple[int, int], int]


def run_plans(
    topology: Topology,
    plans: Sequence[Plan],
    inputs: Sequence[Sequence[float]],
    count: int,
    *,
    seed: int = 0,
    chunk: int = 4,
    slots: int = 2,
    in_place: Sequence[tuple[int, int] | None] = (),
    factors: Sequence[float] = (),
) -> Outcome:
    """`inputs` are lists by rank; `in_place[r]` is (first element of the input, of the output) in one buffer, or None.
    broadcast reads and writes OUT. `factors` are the ranks' own, of premul_sum. Raises `Stuck`."""
    world = _World(topology, plans, inputs, count, seed, chunk, slots, in_place)
    for rank, factor in zip(world.ranks, factors, strict=False):
        rank.factor = factor
    world.run()
    return Outcome([r.output() for r in world.ranks], world.sent)


@dataclass
class _Call:
    """A vendor call that a rank has begun."""

    step: Step
    n: int
    src: tuple[list[float], int]
    dst: tuple[list[float], int]
    result: list[float] | None = None
    ready: bool = False


class _World:
    def __init__(
        self,
        topology: Topology,
        plans: Sequence[Plan],
        inputs: Sequence[Sequence[float]],
        count: int,
        seed: int,
        chunk: int,
        slots: int,
        in_place: Sequence[tuple[int, int] | None],
    ) -> None:
        self.topology, self.chunk, self.slots = topology, chunk, slots
        self.draw = random.Random(seed)
        self.eager = False  # no flow may pause
        self.rings: dict[tuple[int, int, int], deque[list[float]]] = {}
        self.sent: dict[tuple[int, int], int] = {}
        self.calls: dict[tuple[int, int], dict[int, _Call]] = {}
        self.ranks = [
            _Rank(self, p, list(inputs[p.rank]), count, in_place[p.rank] if in_place else None) for p in plans
        ]

    def run(self) -> None:
        actors = [actor for rank in self.ranks for actor in rank.actors()]
        weights = [self.draw.choice((1, 1, 4, 16)) for _ in actors]
        idle = 0
        while not all(rank.finished() for rank in self.ranks):
            for actor in self.draw.choices(actors, weights, k=len(actors)):
                idle = 0 if actor() else idle + 1
            if idle > 2 * len(actors):
                self.eager = True
                if not any([actor() for actor in self.draw.sample(actors, len(actors))]):
                    raise Stuck("nothing moves any more")
                self.eager = False
                idle = 0
        if any(self.rings.values()):
            raise Stuck("messages are left over")

    def ring(self, source: int, target: int, channel: int) -> deque[list[float]]:
        return self.rings.setdefault((source, target, int(channel)), deque())


class _Rank(Flows):
    def __init__(
        self, world: _World, plan: Plan, data: list[float], count: int, together: tuple[int, int] | None
    ) -> None:
        self.world, self.calls, self.plan, self.count = world, world.calls, plan, count
        self.island, self.islands = world.topology.island_of(plan.rank), len(world.topology.islands)
        self.me = world.topology.place(plan.rank)[1]
        self.device = not self.island.host_memory
        self.lengths = plan.segments(count)
        self.segment = plan.segment if plan.segment and plan.segment < count else max(count, 1)
        self.shift = max((s.shift for s in plan.steps), default=0)
        self.out_size = plan.out_blocks * count
        self.at_in = self.at_out = 0
        if together is not None:
            self.at_in, self.at_out = together
            size = max(self.at_in + len(data), self.at_out + self.out_size)
            self.out = self.inp = [NAN] * size
            self.inp[self.at_in : self.at_in + len(data)] = data
        else:
            self.inp, self.out = data, [NAN] * self.out_size
        depth = self.shift + 1
        self.scratch = {
            Buffer.DEVICE_SCRATCH: [NAN] * (depth * plan.device_blocks * self.segment),
            Buffer.HOST_SCRATCH: [NAN] * (depth * plan.host_blocks * self.segment),
        }
        self.order = {lane: plan.lane(lane) for lane in Lane}
        self.signals = plan.signals() | set(self.order[Lane.ISLAND][-1:])
        self.done = [0] * len(plan.steps)
        self.iteration = {lane: -self.shift for lane in Lane}
        self.index = {lane: 0 for lane in Lane}
        self.running: dict[Lane, bool] = {lane: False for lane in Lane}
        self.flows: dict[int, FlowState] = {}
        self.stream: deque[tuple[Step, int, int]] = deque()  # step, its number (or -1: no event), segment
        self.open: _Call | None = None
        self.calling = False  # the stream's first step is the open call
        self.made = 0
        self.factor = NAN

    def actors(self) -> list[Callable[[], bool]]:
        found: list[Callable[[], bool]] = [lambda lane=lane: self.lane_step(lane) for lane in Lane]  # type: ignore[misc]
        return [*found, self.stream_step, self.call_ends]

    def output(self) -> list[float]:
        return self.out[self.at_out : self.at_out + self.out_size]

    def finished(self) -> bool:
        return not self.stream and self.open is None and all(self.next(lane) is None for lane in Lane)

    # ---- lanes, as in executor.c

    def next(self, lane: Lane) -> tuple[int, int] | None:
        while self.iteration[lane] < len(self.lengths):
            while self.index[lane] < len(self.order[lane]):
                number = self.order[lane][self.index[lane]]
                segment = self.iteration[lane] + self.plan.steps[number].shift
                if 0 <= segment < len(self.lengths):
                    return number, segment
                self.index[lane] += 1
            self.iteration[lane] += 1
            self.index[lane] = 0
        return None

    def scratch_busy(self, lane: Lane, segment: int) -> bool:
        before = segment - self.shift - 1
        if before < 0 or not self.order[Lane.ISLAND] or not self.order[Lane.BORDER]:
            return False
        if lane == Lane.ISLAND:
            self.next(Lane.BORDER)
            return self.iteration[Lane.BORDER] <= before
        return self.done[self.order[Lane.ISLAND][-1]] <= before

    def lane_step(self, lane: Lane) -> bool:
        place = self.next(lane)
        if place is None:
            return False
        number, segment = place
        step = self.plan.steps[number]
        moved = False
        if not self.running[lane]:
            if (step.wait >= 0 and self.done[step.wait] <= segment) or self.scratch_busy(lane, segment):
                return False
            if step.kind == StepKind.FLOWS:
                self.begin_flows(step, segment)
                self.running[lane] = True
            elif self.device and not self.at_once(step):
                signals = lane == Lane.ISLAND and number in self.signals
                self.stream.append((step, number if signals else -1, segment))
                self.done[number] += not signals
                self.index[lane] += 1
                return True
            elif step.kind in CALLS:
                if self.open is not None:
                    return False
                self.begin_call(step, segment)
                self.running[lane] = True
                moved = True
        if step.kind == StepKind.FLOWS:
            moved = self.move_flows(step)
            if not all(self.flows[f].done for f in range(step.first_flow, step.first_flow + step.n_flows)):
                return moved
        elif step.kind in CALLS:
            if self.open is not None:
                return moved
        else:
            self.local(step, segment)
        self.running[lane] = False
        if self.device and lane == Lane.ISLAND and number in self.signals:
            self.stream.append((step, number, segment))
        else:
            self.done[number] += 1
        self.index[lane] += 1
        return True

    def stream_step(self) -> bool:
        if not self.stream:
            return False
        step, number, segment = self.stream[0]
        if step.kind in CALLS:
            if not self.calling:
                self.begin_call(step, segment)
                self.calling = True
                return True
            if self.open is not None:
                return False
            self.calling = False
        elif not self.at_once(step):
            self.local(step, segment)
        self.stream.popleft()
        if number >= 0:
            self.done[number] += 1
        return True

    def at_once(self, step: Step) -> bool:
        """Done by the host when its turn comes, not by the device's stream."""
        if step.kind == StepKind.FILL:
            return True
        if step.kind == StepKind.SCALE:
            return self.plan.scale_divisor == 0.0 or step.dst.buffer == Buffer.HOST_SCRATCH
        return step.kind in (StepKind.COMBINE, StepKind.FLOWS, StepKind.FILL)

    # ---- memory

    def at(self, s: Slice, segment: int) -> tuple[list[float], int, int]:
        """(memory, first, number of elements)"""
        if s.buffer < 0:
            return [], 0, 0
        lo, hi = slice_range(s, self.lengths[segment], self.plan.units)
        if s.buffer == Buffer.IN:
            return self.inp, self.at_in + s.block * self.count + segment * self.segment + lo, hi - lo
        if s.buffer == Buffer.OUT:
            return self.out, self.at_out + s.block * self.count + segment * self.segment + lo, hi - lo
        blocks = self.plan.device_blocks if s.buffer == Buffer.DEVICE_SCRATCH else self.plan.host_blocks
        slot = segment % (self.shift + 1) * blocks + s.block
        return self.scratch[Buffer(s.buffer)], slot * self.segment + lo, hi - lo

    def load(self, memory: list[float], lo: int, n: int) -> list[float]:
        if lo < 0 or lo + n > len(memory):
            raise Stuck(f"rank {self.plan.rank} reads out of bounds")
        return memory[lo : lo + n]

    def save(self, memory: list[float], lo: int, values: list[float]) -> None:
        if lo < 0 or lo + len(values) > len(memory):
            raise Stuck(f"rank {self.plan.rank} writes out of bounds")
        memory[lo : lo + len(values)] = values

    def local(self, step: Step, segment: int) -> None:
        dst, to, n = self.at(step.dst, segment)
        src, lo, _ = self.at(step.src, segment)
        if n == 0:
            return
        if step.kind == StepKind.FILL:
            self.save(dst, to, [NEUTRAL[self.operator()]] * n)
            return
        if step.kind == StepKind.COPY:
            self.save(dst, to, self.load(src, lo, n))
        elif step.kind == StepKind.SCALE:
            by = self.plan.scale_divisor
            self.save(dst, to, [x / by if by else x * self.factor for x in self.load(src, lo, n)])
        else:
            stride = step.stride * (self.count if step.src.buffer in (Buffer.IN, Buffer.OUT) else self.segment)
            self.save(dst, to, self.fold([self.load(src, lo + i * stride, n) for i in range(step.n_src)]))

    def operator(self) -> RedOp:
        return RedOp.SUM if self.plan.redop in (RedOp.AVG, RedOp.PREMUL_SUM) else self.plan.redop

    def fold(self, parts: list[list[float]], divisor: float = 1.0) -> list[float]:
        result = [reduce(FOLD[self.operator()], column) for column in zip(*parts, strict=True)]
        return [x / divisor for x in result] if divisor != 1.0 else result

    # ---- vendor calls

    def begin_call(self, step: Step, segment: int) -> None:
        n = self.at(step.len, segment)[2]
        if n == 0:
            return
        call = self.open = _Call(step, n, self.end(step.src, segment), self.end(step.dst, segment))
        met = self.calls.setdefault((self.island.index, self.made), {})
        self.made += 1
        met[self.me] = call
        if len(met) == self.island.size:
            self.meet([met[i] for i in range(self.island.size)])

    def end(self, s: Slice, segment: int) -> tuple[list[float], int]:
        return self.at(s, segment)[:2] if s.buffer >= 0 else ([], 0)

    def meet(self, calls: list[_Call]) -> None:
        first = calls[0]
        if any(
            (c.step.kind, c.n, c.step.root, c.step.to, c.step.group)
            != (first.step.kind, first.n, first.step.root, first.step.to, first.step.group)
            for c in calls
        ):
            raise Stuck(f"island {self.island.index}: its ranks make different vendor calls")
        kind, n, root, target = first.step.kind, first.n, first.step.root, first.step.to
        members = groups_of(self.island.size, self.islands)[first.step.group]
        for i, c in enumerate(calls):
            if i not in members:
                c.result, c.ready = [], True
        if len(members) < len(calls):
            calls, root = [calls[m] for m in members], members.index(root) if root in members else 0
            target = members.index(target) if target in members else -1
        size = len(calls)
        reads = n * size if kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_TO_ALL) else n
        one = kind in (StepKind.BROADCAST, StepKind.TRANSFER)
        members = groups_of(size, self.islands)[first.step.group]
        data = [
            self.load(*c.src, reads) if i in members and (not one or i == root) else [] for i, c in enumerate(calls)
        ]
        average = self.plan.redop == RedOp.AVG and self.plan.divisor == 0.0
        for i, c in enumerate(calls):
            if kind == StepKind.BROADCAST:
                c.result = data[root]
            elif kind == StepKind.TRANSFER:
                c.result = data[root] if i == target else []
            elif kind == StepKind.ALL_TO_ALL:
                c.result = [x for part in data for x in part[i * n : (i + 1) * n]]
            elif kind == StepKind.ALL_GATHER:
                c.result = [x for part in data for x in part]
            elif kind == StepKind.REDUCE and i != root:
                c.result = [NAN] * n if i in members else []
            else:
                data = [d for j, d in enumerate(data) if j in members]
                parts = [d[i * n : (i + 1) * n] if kind == StepKind.REDUCE_SCATTER else d for d in data]
                self.world.draw.shuffle(parts)
                c.result = self.fold(parts, float(size) if average else 1.0)
            c.ready = True

    def call_ends(self) -> bool:
        call = self.open
        if call is None or not call.ready:
            return False
        assert call.result is not None
        self.save(*call.dst, call.result)
        self.open = None
        return True
