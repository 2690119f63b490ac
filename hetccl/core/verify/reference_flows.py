# SPDX-License-Identifier: Apache-2.0
"""The border messages of the reference interpreter: flows.c, written down once more on lists of numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from hetccl.core.plan import Channel, Flow, FlowKind, Plan, Slice, Step

__all__ = ["FlowState", "Flows", "Stuck", "World"]


class Stuck(Exception):
    """The run ended with a lock-up, or with messages or sizes that do not fit."""


class World(Protocol):
    """What flows need of the world that they run in: `sent` counts elements by (sender, receiver)."""

    draw: Random
    eager: bool
    chunk: int
    slots: int
    sent: dict[tuple[int, int], int]

    def ring(self, source: int, target: int, channel: int) -> deque[list[float]]: ...


@dataclass
class FlowState:
    src: list[float]
    lo: int
    dst: list[float]
    at: int
    n: int
    pos: int = 0
    sent: list[int] = field(default_factory=list)
    done: bool = False


class Flows:
    """Mixin of a rank."""

    world: World
    plan: Plan
    flows: dict[int, FlowState]

    def at(self, s: Slice, segment: int) -> tuple[list[float], int, int]:
        raise NotImplementedError

    def load(self, memory: list[float], lo: int, n: int) -> list[float]:
        raise NotImplementedError

    def save(self, memory: list[float], lo: int, values: list[float]) -> None:
        raise NotImplementedError

    def fold(self, parts: list[list[float]], divisor: float = 1.0) -> list[float]:
        raise NotImplementedError

    def begin_flows(self, step: Step, segment: int) -> None:
        for number in range(step.first_flow, step.first_flow + step.n_flows):
            flow = self.plan.flows[number]
            src, lo, n_src = self.at(flow.src, segment) if flow.src.buffer >= 0 else ([], 0, 0)
            dst, to, n_dst = self.at(flow.dst, segment) if flow.dst.buffer >= 0 else ([], 0, 0)
            n = n_src if flow.src.buffer >= 0 else n_dst
            self.flows[number] = FlowState(src, lo, dst, to, n, sent=[0] * len(flow.peers), done=n == 0)

    def move_flows(self, step: Step) -> bool:
        moved = False
        numbers = range(step.first_flow, step.first_flow + step.n_flows)
        for number in numbers:
            state, flow = self.flows[number], self.plan.flows[number]
            if state.done or self.blocked(step, number) or (not self.world.eager and self.world.draw.random() < 0.3):
                continue
            moved |= self.move(flow, state)
        return moved

    def blocked(self, step: Step, number: int) -> bool:
        uses = self.plan.flows[number].uses
        return any(not self.flows[e].done and self.plan.flows[e].uses & uses for e in range(step.first_flow, number))

    def move(self, flow: Flow, s: FlowState) -> bool:
        before = (s.pos, *s.sent)
        if flow.kind == FlowKind.SEND:
            self.send(flow, s, 0, s.src, s.lo, s.n, flow.channel)
            s.pos = s.sent[0]
            s.done = s.pos == s.n
        elif flow.kind in (FlowKind.RECV, FlowKind.FORWARD):
            if s.pos < s.n:
                m = min(self.world.chunk, s.n - s.pos)
                data = self.take([flow.peers[0]], flow.channel, m)
                if data:
                    self.save(s.dst, s.at + s.pos, data[0])
                    s.pos += m
            onward = range(1, len(flow.peers) if flow.kind == FlowKind.FORWARD else 1)
            for k in onward:
                self.send(flow, s, k, s.dst, s.at, s.pos, flow.channel)
            s.done = s.pos == s.n and all(s.sent[k] == s.n for k in onward)
        elif flow.kind in (FlowKind.OWN, FlowKind.PASS):
            if s.pos < s.n:
                self.combine(flow, s)
            if flow.kind == FlowKind.PASS:
                last = len(flow.peers) - 1
                self.send(flow, s, last, s.dst, s.at, s.pos, flow.channel)
                s.done = s.pos == s.n and s.sent[last] == s.n
                return (s.pos, *s.sent) != before
            for k in range(len(flow.peers) if flow.give_back else 0):
                self.send(flow, s, k, s.dst, s.at, s.pos, Channel.RESULT)
            s.done = s.pos == s.n and (not flow.give_back or all(n == s.n for n in s.sent))
        else:
            m = min(self.world.chunk, s.n - s.pos)
            for k in range(len(flow.peers)):
                self.send(flow, s, k, s.src, s.lo, s.pos + m, flow.channel)
            if all(n == s.pos + m for n in s.sent):
                self.combine(flow, s)
            s.done = s.pos == s.n
        return (s.pos, *s.sent) != before

    def send(self, flow: Flow, s: FlowState, k: int, memory: list[float], lo: int, limit: int, channel: int) -> None:
        source, target = self.plan.rank, flow.peers[k]
        ring = self.world.ring(source, target, channel)
        if s.sent[k] < limit and len(ring) < self.world.slots:
            m = min(self.world.chunk, s.n - s.sent[k])
            ring.append(self.load(memory, lo + s.sent[k], m))
            s.sent[k] += m
            self.world.sent[source, target] = self.world.sent.get((source, target), 0) + m

    def take(self, peers: Sequence[int], channel: int, m: int) -> list[list[float]]:
        rings = [self.world.ring(p, self.plan.rank, channel) for p in peers]
        if not all(rings):
            return []
        if any(len(ring[0]) != m for ring in rings):
            raise Stuck(f"rank {self.plan.rank}: a message of another size came")
        return [ring.popleft() for ring in rings]

    def combine(self, flow: Flow, s: FlowState) -> None:
        m = min(self.world.chunk, s.n - s.pos)
        peers = flow.peers[:-1] if flow.kind == FlowKind.PASS else flow.peers
        parts = self.take(peers, Channel.CONTRIBUTE, m)
        if len(parts) < len(peers):
            return
        parts.insert(flow.position, self.load(s.src, s.lo + s.pos, m))
        self.save(s.dst, s.at + s.pos, self.fold(parts, self.plan.divisor if flow.finish else 1.0))
        s.pos += m
