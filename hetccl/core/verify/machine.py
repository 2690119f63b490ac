# SPDX-License-Identifier: Apache-2.0
"""Runs the plans of all ranks on symbolic values, as the executor would, and proves order by vector clocks.

Each lane, each stream and each flow is a process that stops only where the executor waits: for a step, for scratch,
for the island's other ranks, for a message or for a free slot. None of them ever chooses by what came first, so one
schedule stands for all: if no two accesses race here, every schedule gives these values, and if nothing locks here,
nothing can lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from hetccl.core.algorithms.common import OWN_FACTOR
from hetccl.core.plan import Buffer, FlowKind, Lane, Plan, Step, StepKind
from hetccl.core.topology import Topology
from hetccl.core.verify.clocks import joiner, known, tick
from hetccl.core.verify.flows import Channels, flow_clash, parts_of, start_flow
from hetccl.core.verify.island import VENDOR, Rendezvous, combining
from hetccl.core.verify.layout import Layout, Place
from hetccl.core.verify.memory import Access, Fault
from hetccl.core.verify.spec import Sizes
from hetccl.core.verify.values import Content, Values, merge
from hetccl.errors import InternalError

__all__ = ["Machine", "PlanFault", "Proc", "Rank", "Where", "check_apart", "on_host"]

Waits = Generator[tuple[Any, ...], None, None]


class PlanFault(InternalError):
    """A plan failed its proof. Attributes: rank, step, segment where one step is to blame."""


class Where(NamedTuple):
    rank: int
    step: int
    kind: str
    segment: int
    flow: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step} ({self.kind}{self.flow}), segment {self.segment}"


class Proc:
    """One thread of control: its place in the vector clocks and what it knows."""

    __slots__ = ("clock", "code", "done", "thread", "turn", "waits", "where")

    def __init__(self, thread: int, clock: int) -> None:
        self.thread, self.clock = thread, clock
        self.where: Where | None = None
        self.code: Waits
        self.waits: tuple[Any, ...] = ()
        self.turn = 0
        self.done = False

    def forked(self, thread: int) -> Proc:
        """A thread of its own that knows what this one knows."""
        return Proc(thread, self.clock)

    def access(self) -> Access:
        """The next access of this thread; ends before anything that the thread does later."""
        before = self.clock
        self.clock = tick(before, self.thread)
        return Access(self.thread, known(self.clock, self.thread), before, self.where)


class Rank:
    """State of one rank."""

    def __init__(self, plan: Plan, layout: Layout, topology: Topology, first_thread: int) -> None:
        self.plan, self.layout = plan, layout
        self.device = not topology.island_of(plan.rank).host_memory
        self.staged = topology.island_of(plan.rank).staged
        self.island_rank = topology.place(plan.rank)[1]
        self.order = {lane: plan.lane(lane) for lane in Lane}
        self.shift = layout.depth - 1
        self.signals = plan.signals() | set(self.order[Lane.ISLAND][-1:])
        self.done: list[list[int]] = [[] for _ in plan.steps]  # per step: the clock after each segment
        self.ended: dict[Lane, list[int]] = {lane: [] for lane in Lane}  # per iteration
        self.queue: deque[tuple[Step, int, int, int, bool]] = deque()  # of the stream
        self.first_thread = first_thread
        self.flow_threads: list[int] = []
        thread = first_thread + 3
        for flow in plan.flows:
            self.flow_threads.append(thread)
            thread += parts_of(flow)
        self.last_thread = thread
        self.issuing = 2
        self._clashes: dict[int, list[int]] = {}

    def clashes(self, step: Step, number: int) -> list[int]:
        """Earlier flows of the step that flow `number` waits for."""
        found = self._clashes.get(number)
        if found is None:
            found = self._clashes[number] = [
                earlier for earlier in range(step.first_flow, number) if flow_clash(self.plan.flows, earlier, number)
            ]
        return found


class Machine:
    """`chunk` is in elements. `slots` is the number of messages that a ring holds. `scratch_rule` False leaves the
    executor's scratch_busy out, to show that it is needed. `layout` says where a rank's slices lie, if not as
    planned."""

    def __init__(
        self, topology: Topology, sizes: Sizes, plans: Sequence[Plan], *, chunk: int, slots: int, in_place: bool,
        scratch_rule: bool = True, layout: Callable[[Plan, Values], Layout] | None = None,
    ) -> None:  # fmt: skip
        self.topology, self.chunk, self.scratch_rule = topology, chunk, scratch_rule
        self.values = Values()
        self.channels = Channels(topology, slots)
        self.rendezvous = Rendezvous(topology)
        self.ranks: list[Rank] = []
        thread = 0
        for plan in plans:
            own = layout(plan, self.values) if layout else Layout(plan, sizes, in_place, self.values)
            rank = Rank(plan, own, topology, thread)
            self.ranks.append(rank)
            thread = rank.last_thread
        self.join = joiner(thread)
        self.steps_run = 0
        self._ready: deque[Proc] = deque()
        self._parked: dict[Any, list[tuple[Proc, int]]] = {}
        self._procs: list[Proc] = []

    def run(self) -> None:
        """Raises `PlanFault`."""
        for rank in self.ranks:
            for lane in Lane:
                proc = Proc(rank.first_thread + lane, 0)
                self.spawn(proc, self._lane(rank, lane, proc))
            if rank.device:
                proc = Proc(rank.first_thread + 2, 0)
                self.spawn(proc, self._stream(rank, proc))
        ready = self._ready
        while ready:
            proc = ready.popleft()
            try:
                waits = next(proc.code)
            except StopIteration:
                proc.done = True
                self.notify(("proc", id(proc)))
                continue
            except Fault as fault:
                raise self._blame(proc, str(fault)) from None
            proc.waits = waits
            proc.turn += 1
            for key in waits:
                self._parked.setdefault(key, []).append((proc, proc.turn))
        stuck = [p for p in self._procs if not p.done]
        if stuck:
            lines = [f"{p.where or 'a lane'} waits for {' or '.join(_tell(k) for k in p.waits)}" for p in stuck]
            first = stuck[0].where
            more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
            raise PlanFault("deadlock: " + "; ".join(lines[:8]) + more, rank=first.rank if first else -1)
        left = self.channels.left_over()
        if left:
            raise PlanFault(left)

    def spawn(self, proc: Proc, code: Waits) -> None:
        proc.code = code
        self._procs.append(proc)
        self._ready.append(proc)

    def notify(self, key: Any) -> None:
        for proc, turn in self._parked.pop(key, ()):
            if proc.turn == turn and not proc.done:
                proc.turn += 1
                self._ready.append(proc)

    # ---- lanes

    def _lane(self, rank: Rank, lane: Lane, me: Proc) -> Waits:
        plan = rank.plan
        segments = len(rank.layout.lengths)
        for iteration in range(-rank.shift, segments):
            for index in rank.order[lane]:
                step = plan.steps[index]
                segment = iteration + step.shift
                if not 0 <= segment < segments:
                    continue
                me.where = Where(plan.rank, index, step.kind.name.lower(), segment)
                if step.wait >= 0:
                    yield from self._await(me, rank.done[step.wait], segment, ("step", plan.rank, step.wait))
                if self.scratch_rule:
                    yield from self._await_scratch(rank, lane, me, segment)
                self.steps_run += 1
                yield from self._step(rank, lane, me, step, index, segment)
            rank.ended[lane].append(me.clock)
            self.notify(("end", plan.rank, lane))
        rank.issuing -= 1
        self.notify(("stream", plan.rank))

    def _await(self, me: Proc, clocks: list[int], number: int, key: tuple[Any, ...]) -> Waits:
        while len(clocks) <= number:
            yield (key,)
        me.clock = self.join(me.clock, clocks[number])

    def _await_scratch(self, rank: Rank, lane: Lane, me: Proc, segment: int) -> Waits:
        """scratch_busy: scratch holds shift + 1 segments."""
        before = segment - rank.shift - 1
        if before < 0 or not rank.order[Lane.ISLAND] or not rank.order[Lane.BORDER]:
            return
        if lane == Lane.ISLAND:
            key = ("end", rank.plan.rank, Lane.BORDER)
            yield from self._await(me, rank.ended[Lane.BORDER], before + rank.shift, key)
        else:
            last = rank.order[Lane.ISLAND][-1]
            yield from self._await(me, rank.done[last], before, ("step", rank.plan.rank, last))

    def _step(self, rank: Rank, lane: Lane, me: Proc, step: Step, index: int, segment: int) -> Waits:
        signals = lane == Lane.ISLAND and index in rank.signals
        if step.kind == StepKind.FLOWS:
            yield from self._flows(rank, me, step, segment)
        elif rank.device and not on_host(rank.plan, step):
            rank.queue.append((step, index, segment, me.clock, signals))
            self.notify(("stream", rank.plan.rank))
            if not signals:
                self.finished(rank, index, me.clock)
            return
        else:
            yield from self._now(rank, me, step, segment)
        if rank.device and signals:  # its event stands behind what the stream already has
            rank.queue.append((step, index, segment, me.clock, True))
            self.notify(("stream", rank.plan.rank))
        else:
            self.finished(rank, index, me.clock)

    def _stream(self, rank: Rank, me: Proc) -> Waits:
        while rank.queue or rank.issuing:
            if not rank.queue:
                yield (("stream", rank.plan.rank),)
                continue
            step, index, segment, issued, signals = rank.queue.popleft()
            me.where = Where(rank.plan.rank, index, step.kind.name.lower(), segment)
            me.clock = self.join(me.clock, issued)
            if not on_host(rank.plan, step):
                yield from self._now(rank, me, step, segment)
            if signals:
                self.finished(rank, index, me.clock)

    def finished(self, rank: Rank, index: int, clock: int) -> None:
        rank.done[index].append(clock)
        self.notify(("step", rank.plan.rank, index))

    def _now(self, rank: Rank, me: Proc, step: Step, segment: int) -> Waits:
        if step.kind in VENDOR:
            yield from self.rendezvous.call(self, rank, me, step, segment)
        else:
            self._local(rank, me, step, segment)

    def _local(self, rank: Rank, me: Proc, step: Step, segment: int) -> None:
        layout, plan = rank.layout, rank.plan
        n = layout.length(step.dst, segment)
        if n == 0:
            return
        dst = layout.place(step.dst, segment)
        if step.kind == StepKind.FILL:
            if rank.device and step.dst.buffer != Buffer.HOST_SCRATCH:
                raise Fault("fills on the host what does not lie in host memory")
            self.store(rank, dst, [(n, self.values.neutral(combining(plan.redop)), 0)], me.access())
            return
        src = layout.place(step.src, segment, n)
        if step.kind == StepKind.COPY:
            if layout.length(step.src, segment) != n:
                raise Fault(f"copies {layout.length(step.src, segment)} elements to where {n} lie")
            if src == dst:
                return
            check_apart(src, dst)
            access = me.access()
            self.store(rank, dst, src.region.read(src.lo, src.hi, access), access)
            return
        if rank.device and on_host(plan, step) and {step.src.buffer, step.dst.buffer} != {Buffer.HOST_SCRATCH}:
            raise Fault("combines or scales on the host what does not lie in host memory")
        if (
            rank.device
            and step.kind == StepKind.SCALE
            and not on_host(plan, step)
            and step.src.buffer == Buffer.HOST_SCRATCH
        ):
            raise Fault("scales on the device what lies in host memory")
        sources = [src]
        if step.kind == StepKind.COMBINE:
            stride = layout.stride(step.src) * step.stride
            if step.n_src < 1 or stride < 0:
                raise Fault(f"combines {step.n_src} sources, {stride} elements from one to the next")
            for i in range(step.n_src):
                layout.place(step.src, segment, i * stride + n)  # every block is in bounds
            sources = [Place(src.region, src.lo + i * stride, src.lo + i * stride + n) for i in range(step.n_src)]
        elif step.kind != StepKind.SCALE:
            raise Fault(f"the verifier does not know steps of kind {step.kind!r}")
        access = me.access()
        contents = []
        for place in sources:
            if place != dst:
                check_apart(place, dst)
            contents.append(place.region.read(place.lo, place.hi, access))
        if step.kind == StepKind.SCALE and plan.scale_divisor == OWN_FACTOR:
            found = [(length, *self.values.scaled(plan.rank, (node, index))) for length, node, index in contents[0]]
        else:
            found = self.combine(plan, contents, plan.scale_divisor if step.kind == StepKind.SCALE else 1.0)
        self.store(rank, dst, found, access)

    def combine(self, plan: Plan, contents: list[Content], divisor: float) -> Content:
        redop = combining(plan.redop)
        result: Content = []
        for length, parts in merge(contents):
            value = self.values.combined(redop, parts) if len(parts) > 1 else parts[0]
            node, index = self.values.divided(divisor, value)
            result.append((length, node, index))
        return result

    def store(self, rank: Rank, dst: Place, content: Content, access: Access) -> None:
        rank.layout.check_writable(dst)
        dst.region.write(dst.lo, content, access)

    # ---- flows

    def _flows(self, rank: Rank, me: Proc, step: Step, segment: int) -> Waits:
        plan = rank.plan
        begun: list[tuple[int, list[Proc]]] = []
        for number in range(step.first_flow, step.first_flow + step.n_flows):
            flow = plan.flows[number]
            if rank.staged and any(s.buffer not in (-1, Buffer.HOST_SCRATCH) for s in (flow.src, flow.dst)):
                raise Fault("sends or receives memory of the device; the border needs host memory")
            empty = rank.layout.length(flow.src if flow.src.buffer >= 0 else flow.dst, segment) == 0
            orders = rank.clashes(step, number)
            if empty and not orders:
                continue
            after = [proc for earlier, procs in begun if earlier in orders for proc in procs]
            where = Where(plan.rank, me.where.step if me.where else -1, "flows", segment, f", {_name(flow.kind)}")
            begun.append((number, start_flow(self, rank, number, me, where, segment, after)))
        for _, procs in begun:
            for proc in procs:
                while not proc.done:
                    yield (("proc", id(proc)),)
                me.clock = self.join(me.clock, proc.clock)

    def _blame(self, proc: Proc, text: str) -> PlanFault:
        where = proc.where
        if where is None:
            return PlanFault(text)
        return PlanFault(f"{where}: {text}", rank=where.rank, step=where.step, segment=where.segment)


def on_host(plan: Plan, step: Step) -> bool:
    """Whether the executor does a step at once on the host, where the island's other local steps go onto the device's
    stream: local_step in executor.c."""
    if step.kind == StepKind.SCALE:
        return plan.scale_divisor == OWN_FACTOR or step.dst.buffer == Buffer.HOST_SCRATCH
    return step.kind in (StepKind.COMBINE, StepKind.FLOWS, StepKind.FILL)


def check_apart(src: Place, dst: Place) -> None:
    if src.region is dst.region and src.lo < dst.hi and dst.lo < src.hi:
        raise Fault(f"source [{src.lo}:{src.hi}] and target [{dst.lo}:{dst.hi}] of {src.region.name} overlap in part")


def _name(kind: FlowKind) -> str:
    return kind.name.lower()


def _tell(key: tuple[Any, ...]) -> str:
    kind, *of = key
    if kind == "step":
        return f"step {of[1]}"
    if kind == "call":
        return f"the other ranks of island {of[0]} in its call {of[1]}"
    if kind == "ring":
        return f"the ring from rank {of[0]} to rank {of[1]}, channel {of[2]}"
    return {"end": "the border lane to leave scratch", "stream": "the stream", "proc": "its flows"}.get(kind, "a flow")
