# SPDX-License-Identifier: Apache-2.0
"""Combining by the vendor's own library (arXiv 2605.31000's border communicator): no kernel and no host arithmetic.

Takes the plans that an algorithm makes for an island and rewrites those where a rank combines what comes over the
border. Instead of combining chunk by chunk, the owner receives the contributions whole, hands each to a rank of its
group, and the group's communicator reduces them to the owner; then the results leave as before. Every rank of the group
passes a real contribution. With fewer ranks than contributions a pair takes them one by one. The border carries the
same messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hetccl.core.algorithms.common import Algorithm, Places, Shared, in_scratch
from hetccl.core.groups import group_for
from hetccl.core.plan import NO_SLICE, Buffer, Channel, Flow, FlowKind, Lane, Plan, Slice, Step, StepKind
from hetccl.core.topology import Island, Topology

__all__ = ["locks", "plan"]

COMBINING = (FlowKind.OWN, FlowKind.PASS)
DEVICE, HOST = Buffer.DEVICE_SCRATCH, Buffer.HOST_SCRATCH


def plan(algorithm: Algorithm, topology: Topology, shared: Shared, rank: int, places: Places | None) -> Plan:
    """This rank's part: also of its mates' combinations. One plan a rank of the island is made."""
    island = topology.island_of(rank)
    plans = [algorithm(topology, shared, r, places if r == rank else None) for r in island.ranks]
    return _Rewriter(topology, shared, island, island.ranks.index(rank), plans).plan()


def contributors(flow: Flow) -> tuple[int, ...]:
    return flow.peers[:-1] if flow.kind == FlowKind.PASS else flow.peers


@dataclass(frozen=True)
class _Combination:
    """A flow of island rank `owner`, which is rewritten. `at`: how many vendor calls stand before it, and how many
    steps of messages with combinations since the last of those: mates find the same place in their own plans."""

    owner: int
    flow: Flow
    at: tuple[int, int]


@dataclass
class _Rewriter:
    topology: Topology
    shared: Shared
    island: Island
    me: int
    plans: list[Plan]
    steps: list[Step] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    blocks: dict[Buffer, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)  # scratch blocks that serve all combinations
    todo: list[_Combination] = field(default_factory=list)
    width: int = 0  # elements of a block, in the v forms
    wide: int = 1  # segments of a block, in the others: a piece may be several ranks' blocks
    cleared: int = -1  # the last step that read the host's neutral elements
    # of the combination that is being written
    piece: Slice = NO_SLICE
    owner: int = 0
    number: int = 0
    members: tuple[int, ...] = ()

    def plan(self) -> Plan:
        mine = self.plans[self.me]
        todo = [c for owner, p in enumerate(self.plans) for c in _combinations(owner, p)]
        if not todo:
            return mine
        pieces = [c.flow.src for c in todo]
        if self.shared.counts:
            self.width = max(1, *self.shared.counts, *(p.b - p.a for p in pieces))
        else:
            self.wide = max(1, *(-(-p.b // mine.units) for p in pieces), *(p.bt for p in pieces))
        self.blocks = {DEVICE: mine.device_blocks, HOST: mine.host_blocks}
        self.todo = sorted(todo, key=lambda c: (c.at, c.owner))
        moved: dict[int, int] = {}  # old index of a step -> the new one
        kept: dict[int, int] = {}  # new index of a step that stays -> the old one of the step it waits for
        calls = own = 0
        self._help(calls)
        for index, step in enumerate(mine.steps):
            if step.kind == StepKind.FLOWS and any(f.kind in COMBINING for f in _flows(mine, step)):
                moved[index] = self._border(step, (calls, own), kept)
                own += 1
                self._help(calls)
                continue
            if step.kind == StepKind.FLOWS:
                first = len(self.flows)
                self.flows += _flows(mine, step)
                step = replace(step, first_flow=first)
            moved[index] = self._add(step)
            kept[moved[index]] = step.wait
            if step.kind.is_call:
                calls, own = calls + 1, 0
                self._help(calls)
        for index, wait in kept.items():
            self.steps[index] = replace(self.steps[index], wait=moved.get(wait, -1))
        finishes = any(c.flow.finish for c in _combinations(self.me, mine))
        return replace(
            mine,
            steps=tuple(self.steps),
            flows=tuple(self.flows),
            device_blocks=self.blocks[DEVICE],
            host_blocks=0 if self.island.host_memory else self.blocks[HOST],
            scale_divisor=mine.divisor if finishes else mine.scale_divisor,
        )

    def _help(self, calls: int) -> None:
        """Takes part in what mates combine here, up to where this rank combines something itself: as early as it can,
        for its own later steps may wait for what depends on the help."""
        mine = min((c.at for c in self.todo if c.owner == self.me), default=(calls + 1, 0))
        for combination in self._take(lambda at: at[0] == calls and at < mine):
            self._combine(combination, [], -1)

    def _take(self, wanted: Callable[[tuple[int, int]], bool]) -> list[_Combination]:
        taken = [c for c in self.todo if wanted(c.at)]
        self.todo = [c for c in self.todo if not wanted(c.at)]
        return taken

    def _border(self, step: Step, at: tuple[int, int], kept: dict[int, int]) -> int:
        """The rewritten form of a step of mine: contributions in, combined, results out. Returns the last step."""
        mine = self.plans[self.me]
        before: list[Flow] = []
        after: list[Flow] = []
        landed: dict[int, list[Slice]] = {}  # by the flow's place: where its contributions land
        banks: list[tuple[int, list[Slice]]] = []
        for place, flow in enumerate(_flows(mine, step)):
            if flow.kind not in COMBINING:
                (after if flow.channel == Channel.RESULT else before).append(flow)
                continue
            landed[place] = [self._landing(flow, k, banks) for k in range(len(contributors(flow)))]
            before += [
                Flow(FlowKind.RECV, Channel.CONTRIBUTE, (peer,), dst=dst)
                for peer, dst in zip(contributors(flow), landed[place], strict=True)
            ]
            if flow.kind == FlowKind.PASS:
                after.append(Flow(FlowKind.SEND, flow.channel, flow.peers[-1:], flow.dst))
            elif flow.give_back:
                after += [Flow(FlowKind.SEND, Channel.RESULT, (peer,), flow.dst) for peer in flow.peers]
        arrived = self._flow_step(before, -1)
        kept[arrived] = step.wait
        ready, own = -1, iter(landed.values())
        for combination in self._take(lambda there: there == at):
            mine_now = combination.owner == self.me
            done = self._combine(combination, next(own) if mine_now else [], arrived if mine_now else -1)
            ready = max(ready, done)
        return self._flow_step(after, ready)

    def _flow_step(self, flows: list[Flow], wait: int) -> int:
        """May be empty: a place in the lane that can be waited for."""
        first = len(self.flows)
        self.flows += flows
        return self._add(Step(StepKind.FLOWS, Lane.BORDER, wait=wait, first_flow=first, n_flows=len(flows)))

    def _combine(self, c: _Combination, landed: list[Slice], arrived: int) -> int:
        """Hands the contributions out and reduces them to the owner. Every rank of the island makes the same calls.
        Returns the step with which the result lies at the flow's target, on the owner."""
        flow, host_memory = c.flow, self.island.host_memory
        owner = c.owner == self.me
        peers = len(contributors(flow))
        self.number, self.members = group_for(self.island, len(self.topology.islands), peers + 1, c.owner)
        self.owner, self.piece = c.owner, flow.src
        helpers = [m for m in self.members if m != c.owner]
        sum_at = flow.src
        if owner and not host_memory:
            sum_at = self._scratch(DEVICE, "own")
            self._add(Step(StepKind.COPY, Lane.ISLAND, flow.src, sum_at, flow.src, wait=arrived))
        for turn, rounds in enumerate([peers] if len(helpers) == peers else [1] * peers):
            for k in range(turn, turn + rounds):
                self._hand_out(helpers[k - turn], landed[k] if owner else NO_SLICE, arrived)
            sum_at = self._reduce(sum_at if owner else self._scratch(DEVICE, "handed"), f"sum{turn % 2}")
        if not owner:
            return -1
        if flow.finish and (host_memory or self.island.kernels):
            self._add(Step(StepKind.SCALE, Lane.ISLAND, sum_at, sum_at, sum_at))
        done = self._add(Step(StepKind.COPY, Lane.ISLAND, sum_at, flow.dst, flow.dst))
        if flow.finish and not host_memory and not self.island.kernels:
            self._add(Step(StepKind.SCALE, Lane.BORDER, flow.dst, flow.dst, flow.dst, wait=done))
        return done

    def _hand_out(self, helper: int, landed: Slice, arrived: int) -> None:
        """One contribution, from the owner to a helper."""
        owner = self.me == self.owner
        if owner and not self.island.host_memory:
            up = self._scratch(DEVICE, "up")
            self._add(Step(StepKind.COPY, Lane.ISLAND, landed, up, landed, wait=arrived))
            landed = up
        kind = StepKind.TRANSFER if self.island.transfers else StepKind.BROADCAST
        src = dst = landed if owner else NO_SLICE
        if self.me == helper:
            dst = self._scratch(DEVICE, "handed")
        elif kind == StepKind.BROADCAST and not owner:
            dst = self._scratch(DEVICE, "unread")
        if kind == StepKind.BROADCAST:
            src = dst
        elif owner:
            dst = NO_SLICE
        as_bytes = not self.island.moves(self.shared.dtype)
        wait = arrived if owner else -1
        self._add(Step(kind, Lane.ISLAND, src, dst, self._range(), wait, root=self.owner, to=helper, as_bytes=as_bytes))

    def _reduce(self, mine: Slice, target: str) -> Slice:
        """The vendor's reduction, to the owner. A library may scribble into the target of the other ranks."""
        out = self._scratch(DEVICE, target if self.me == self.owner else "unread")
        if self.me not in self.members:
            mine = self._cleared() if self.number == 0 else NO_SLICE
            out = out if self.number == 0 else NO_SLICE
        self._add(Step(StepKind.REDUCE, Lane.ISLAND, mine, out, self._range(), root=self.owner, group=self.number))
        return out

    def _cleared(self) -> Slice:
        """Neutral elements, for a rank that has no contribution and must call all the same."""
        there = self._scratch(DEVICE, "neutral")
        if self.island.host_memory:
            self._add(Step(StepKind.FILL, Lane.ISLAND, there, there, there))
            return there
        filled = self._scratch(HOST, "neutral")
        wait = self._add(Step(StepKind.FILL, Lane.BORDER, filled, filled, filled, wait=self.cleared))
        self.cleared = self._add(Step(StepKind.COPY, Lane.ISLAND, filled, there, there, wait=wait))
        return there

    # ---- memory

    def _range(self) -> Slice:
        """The combined elements, as a length."""
        return in_scratch(self.piece, DEVICE, 0, self.width)

    def _scratch(self, buffer: Buffer, name: str) -> Slice:
        """The piece's range of a scratch block. Island lanes run in order, so blocks serve one combination after the
        other."""
        key = f"{buffer.name} {name}"
        if key not in self.names:
            self.names[key] = self._new_block(buffer)
        return in_scratch(self.piece, buffer, self.names[key], self.width)

    def _new_block(self, buffer: Buffer) -> int:
        """Its number, as `in_scratch` counts them."""
        if not self.width:
            block, self.blocks[buffer] = self.blocks[buffer], self.blocks[buffer] + self.wide
            return block
        block = -(-self.blocks[buffer] // self.width)
        self.blocks[buffer] = (block + 1) * self.width
        return block

    def _landing(self, flow: Flow, k: int, banks: list[tuple[int, list[Slice]]]) -> Slice:
        """Memory of its own for a contribution: all of a step's come in at once. Pieces that do not overlap share a
        block."""
        buffer = DEVICE if self.island.host_memory else HOST
        piece = in_scratch(flow.src, buffer, 0, self.width)
        for block, used in banks:
            if all(_apart(piece, other) for other in used):
                used.append(piece)
                return in_scratch(flow.src, buffer, block, self.width)
        banks.append((self._new_block(buffer), [piece]))
        return in_scratch(flow.src, buffer, banks[-1][0], self.width)

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1


def _flows(p: Plan, step: Step) -> tuple[Flow, ...]:
    return p.flows[step.first_flow : step.first_flow + step.n_flows]


def _combinations(owner: int, p: Plan) -> list[_Combination]:
    found, calls, since = [], 0, 0
    for step in p.steps:
        if step.kind == StepKind.FLOWS and any(f.kind in COMBINING for f in _flows(p, step)):
            found += [_Combination(owner, f, (calls, since)) for f in _flows(p, step) if f.kind in COMBINING]
            since += 1
        elif step.kind.is_call:
            calls, since = calls + 1, 0
    return found


def _apart(a: Slice, b: Slice) -> bool:
    return (a.b, a.bt) <= (b.a, b.at) or (b.b, b.bt) <= (a.a, a.at)


def locks(plans: list[Plan]) -> bool:
    """Whether the plans of all ranks lock each other up once every rank takes in all its contributions before anything
    combined leaves it: where islands pass sums on in a ring."""
    passed = {(f.peers[-1], p.rank) for p in plans for f in p.flows if f.kind == FlowKind.PASS}
    waits: dict[int, set[int]] = {}
    for p in plans:
        for f in p.flows:
            if f.kind in COMBINING:
                waits.setdefault(p.rank, set()).update(q for q in contributors(f) if (p.rank, q) in passed)
    while waits:
        free = [rank for rank, others in waits.items() if not others & waits.keys()]
        if not free:
            return True
        for rank in free:
            del waits[rank]
    return False
