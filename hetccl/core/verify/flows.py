# SPDX-License-Identifier: Apache-2.0
"""Border messages, chunk by chunk, over rings with a real number of slots: what flows.c does, as processes.

A flow that does several things which do not wait for each other (receive and forward, combine and give back) is several
processes, so that no order is assumed which the executor does not keep. A free slot gives no order: with more slots it
would not have been waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from hetccl.core.plan import Channel, Flow, FlowKind
from hetccl.core.topology import Topology
from hetccl.core.verify.layout import Place
from hetccl.core.verify.memory import Fault
from hetccl.core.verify.values import Content

if TYPE_CHECKING:
    from hetccl.core.verify.machine import Machine, Proc, Rank, Where

__all__ = ["COMBINING", "Channels", "contributors", "flow_clash", "parts_of", "start_flow"]

COMBINING = (FlowKind.OWN, FlowKind.PASS, FlowKind.EXCHANGE)
Waits = Generator[tuple[Any, ...], None, None]
Message = tuple[int, Content, int, "Where"]  # length, content, the sender's clock, who sent it


class Channels:
    """The rings between ranks, and how many elements have crossed."""

    def __init__(self, topology: Topology, slots: int) -> None:
        self._topology, self.slots = topology, slots
        self._linked = set(topology.border_pairs())
        self.rings: dict[tuple[int, int, int], deque[Message]] = {}
        self.out = {i.index: 0 for i in topology.islands}
        self.into = {i.index: 0 for i in topology.islands}
        self.total = 0

    def ring(self, source: int, target: int, channel: int) -> deque[Message]:
        key = (source, target, channel)
        found = self.rings.get(key)
        if found is None:
            if (min(source, target), max(source, target)) not in self._linked:
                raise Fault(f"ranks {source} and {target} have no link at the border")
            found = self.rings[key] = deque()
        return found

    def count(self, source: int, target: int, length: int) -> None:
        a, b = self._topology.place(source)[0], self._topology.place(target)[0]
        if a != b:
            self.total += length
            self.out[a] += length
            self.into[b] += length

    def left_over(self) -> str:
        """Messages that nobody took, as text."""
        for (source, target, channel), ring in self.rings.items():
            if ring:
                return (
                    f"{ring[0][3]}: sends {ring[0][0]} elements to rank {target} on channel {channel}, which nobody "
                    f"receives there (from rank {source})"
                )
        return ""


def contributors(flow: Flow) -> tuple[int, ...]:
    """Whose contributions a flow combines with its own. The peers of PASS end with the one that the result goes to."""
    return flow.peers[:-1] if flow.kind == FlowKind.PASS else flow.peers


def flow_clash(flows: Sequence[Flow], earlier: int, later: int) -> bool:
    """Whether the executor runs the later flow of a step after the earlier one, as both use one channel of a peer the
    same way."""
    return bool(flows[earlier].uses & flows[later].uses)


def parts_of(flow: Flow) -> int:
    """Things that a flow does without waiting for each other: `start_flow` makes a process of each."""
    alone = {FlowKind.SEND: 1, FlowKind.RECV: 1, FlowKind.PASS: 2}
    return alone.get(flow.kind, 1 + len(flow.peers))


def start_flow(
    machine: Machine, rank: Rank, number: int, lane: Proc, where: Where, segment: int, after: list[Proc]
) -> list[Proc]:
    """Starts the processes of a flow, once those in `after` have ended."""
    flow = rank.plan.flows[number]
    needed = 2 if flow.kind == FlowKind.FORWARD else 1
    sources = contributors(flow)
    if len(flow.peers) < needed or len(set(sources)) < len(sources):
        raise Fault(f"flow {number} ({flow.kind.name.lower()}) names peers {flow.peers}")
    if rank.plan.rank in flow.peers:
        raise Fault(f"flow {number} ({flow.kind.name.lower()}) has its own rank as peer")
    state = _FlowState(machine, rank, flow, segment)
    if state.n == 0:  # it only takes its turn
        proc = lane.forked(rank.flow_threads[number])
        proc.where = where
        machine.spawn(proc, _begin(machine, _nothing, proc, after))
        return [proc]
    if flow.kind == FlowKind.PASS and flow.give_back:
        raise Fault(f"flow {number} (pass) both passes its result on and gives it back")
    peers = range(len(flow.peers))
    parts: list[Any]
    if flow.kind == FlowKind.SEND:
        parts = [state.sender(0, flow.channel, "")]
    elif flow.kind == FlowKind.RECV:
        parts = [state.receive]
    elif flow.kind == FlowKind.FORWARD:
        parts = [state.receive, *(state.sender(k, flow.channel, "got") for k in peers[1:])]
    elif flow.kind == FlowKind.OWN:
        parts = [state.combine, *(state.sender(k, Channel.RESULT, "got") for k in peers if flow.give_back)]
    elif flow.kind == FlowKind.PASS:
        parts = [state.combine, state.sender(peers[-1], flow.channel, "got")]
    elif flow.kind == FlowKind.EXCHANGE:
        parts = [state.combine, *(state.sender(k, flow.channel, "turn") for k in peers)]
    else:
        raise Fault(f"the verifier does not know flows of kind {flow.kind!r}")
    procs = []
    for i, part in enumerate(parts):
        proc = lane.forked(rank.flow_threads[number] + i)
        proc.where = where
        procs.append(proc)
        machine.spawn(proc, _begin(machine, part, proc, after))
    return procs


def _nothing(me: Proc) -> Waits:
    yield from ()


def _begin(machine: Machine, part: Any, me: Proc, after: list[Proc]) -> Waits:
    for proc in after:
        while not proc.done:
            yield (("proc", id(proc)),)
        me.clock = machine.join(me.clock, proc.clock)
    yield from part(me)


class _FlowState:
    """What the processes of one flow share. `got` holds the clock after each chunk received or combined, `sent` those
    after each chunk sent to a peer."""

    def __init__(self, machine: Machine, rank: Rank, flow: Flow, segment: int) -> None:
        self.machine, self.rank, self.flow = machine, rank, flow
        place, length = rank.layout.place, rank.layout.length
        reads = flow.kind in (FlowKind.SEND, *COMBINING)
        writes = flow.kind != FlowKind.SEND
        self.src = place(flow.src, segment) if reads else None
        self.dst = place(flow.dst, segment) if writes else None
        if reads and writes and length(flow.src, segment) != length(flow.dst, segment):
            raise Fault(f"combines {length(flow.src, segment)} elements to where {length(flow.dst, segment)} lie")
        self.n = length(flow.src if reads else flow.dst, segment)
        n = len(contributors(flow))
        if flow.kind in COMBINING and not 0 <= flow.position <= n:
            raise Fault(f"puts its own contribution at place {flow.position} of {n + 1}")
        self.got: list[int] = []
        self.sent: list[list[int]] = [[] for _ in flow.peers]

    def chunks(self) -> list[tuple[int, int]]:
        return [(at, min(at + self.machine.chunk, self.n)) for at in range(0, self.n, self.machine.chunk)]

    def sender(self, k: int, channel: int, waits: str) -> Any:
        return lambda me: self.send(me, k, channel, waits)

    def send(self, me: Proc, k: int, channel: int, waits: str) -> Waits:
        """Sends all chunks to peer k. `waits` "got": each after it has been received or combined; "turn": each after
        the one before has been combined."""
        source, target = self.rank.plan.rank, self.flow.peers[k]
        ring = self.machine.channels.ring(source, target, channel)
        base = self.dst if waits == "got" else self.src
        assert base is not None
        for i, (lo, hi) in enumerate(self.chunks()):
            needed = i if waits == "got" else i - 1 if waits == "turn" else -1
            while len(self.got) <= needed:
                yield (("flow", id(self)),)
            if needed >= 0:
                me.clock = self.machine.join(me.clock, self.got[needed])
            while len(ring) >= self.machine.channels.slots:
                yield (("ring", source, target, channel),)
            content = base.region.read(base.lo + lo, base.lo + hi, me.access())
            assert me.where is not None
            ring.append((hi - lo, content, me.clock, me.where))
            self.machine.channels.count(source, target, hi - lo)
            self.machine.notify(("ring", source, target, channel))
            self.sent[k].append(me.clock)
            self.machine.notify(("flow", id(self)))

    def receive(self, me: Proc) -> Waits:
        for lo, hi in self.chunks():
            yield from self._arrived(me, 0, self.flow.channel)
            content, clock = self._take(0, self.flow.channel, hi - lo)
            me.clock = self.machine.join(me.clock, clock)
            self._store(me, lo, hi, content, me.access())
            self._note(me)

    def combine(self, me: Proc) -> Waits:
        flow, plan = self.flow, self.rank.plan
        assert self.src is not None and self.dst is not None
        if self.src != self.dst:
            _check_apart(self.src, self.dst)
        sources = range(len(contributors(flow)))
        for i, (lo, hi) in enumerate(self.chunks()):
            for k in sources:
                if flow.kind == FlowKind.EXCHANGE:
                    while len(self.sent[k]) <= i:
                        yield (("flow", id(self)),)
                    me.clock = self.machine.join(me.clock, self.sent[k][i])
                yield from self._arrived(me, k, Channel.CONTRIBUTE)
            contents = []
            for k in sources:
                content, clock = self._take(k, Channel.CONTRIBUTE, hi - lo)
                contents.append(content)
                me.clock = self.machine.join(me.clock, clock)
            access = me.access()
            contents.insert(flow.position, self.src.region.read(self.src.lo + lo, self.src.lo + hi, access))
            content = self.machine.combine(plan, contents, plan.divisor if flow.finish else 1.0)
            values = self.machine.values
            for length, node, index in content:
                values.made.setdefault(values.root_of(node), []).append((index, length, plan.rank))
            self._store(me, lo, hi, content, access)
            self._note(me)

    def _arrived(self, me: Proc, k: int, channel: int) -> Waits:
        source, target = self.flow.peers[k], self.rank.plan.rank
        ring = self.machine.channels.ring(source, target, channel)
        while not ring:
            yield (("ring", source, target, channel),)

    def _take(self, k: int, channel: int, n: int) -> tuple[Content, int]:
        source, target = self.flow.peers[k], self.rank.plan.rank
        length, content, clock, sender = self.machine.channels.ring(source, target, channel).popleft()
        if length != n:
            raise Fault(
                f"expects {n} elements from rank {source} on channel {int(channel)}, but {sender} sends {length}"
            )
        self.machine.notify(("ring", source, target, channel))
        return content, clock

    def _store(self, me: Proc, lo: int, hi: int, content: Content, access: Any) -> None:
        assert self.dst is not None
        self.machine.store(self.rank, Place(self.dst.region, self.dst.lo + lo, self.dst.lo + hi), content, access)

    def _note(self, me: Proc) -> None:
        self.got.append(me.clock)
        self.machine.notify(("flow", id(self)))


def _check_apart(src: Place, dst: Place) -> None:
    if src.region is dst.region and src.lo < dst.hi and dst.lo < src.hi:
        raise Fault(f"source [{src.lo}:{src.hi}] and target [{dst.lo}:{dst.hi}] of {src.region.name} overlap in part")
