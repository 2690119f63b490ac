# SPDX-License-Identifier: Apache-2.0
"""Plans: what one rank does in one class of operation, as pure data. `plan.h` is the compiled form.

A plan is the period of a loop over segments and is closed over the count: every slice is affine in the *unit* u
(the segment's length divided by `units`) and the *tail* t (what is left over). See docs/design/plans.md.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hetccl.types import DType, Op, RedOp

__all__ = [
    "Buffer",
    "Flow",
    "FlowKind",
    "Lane",
    "Plan",
    "PlanBuilder",
    "Slice",
    "Step",
    "StepKind",
    "measure",
    "slice_range",
]

UNIT_ALIGN = 16  # elements; HX_UNIT_ALIGN
NOTHING = -1


class Buffer(enum.IntEnum):
    """IN and OUT are the caller's, in device memory; scratch belongs to the communicator."""

    IN = 0
    OUT = 1
    DEVICE_SCRATCH = 2
    HOST_SCRATCH = 3


class StepKind(enum.IntEnum):
    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_TO_ALL = 5
    TRANSFER = 6  # one island rank to another; the others only pass by
    COPY = 7
    COMBINE = 8
    SCALE = 9
    FLOWS = 10
    FILL = 11  # dst = what leaves the operator's other side as it is; host memory

    @property
    def is_call(self) -> bool:
        """Whether the island's library does it."""
        return self <= StepKind.TRANSFER


class FlowKind(enum.IntEnum):
    SEND = 0
    RECV = 1
    FORWARD = 2
    OWN = 3
    PASS = 4
    EXCHANGE = 5


class Lane(enum.IntEnum):
    ISLAND = 0
    BORDER = 1


class Channel(enum.IntEnum):
    CONTRIBUTE = 0
    RESULT = 1


@dataclass(frozen=True)
class Slice:
    """Elements [a*u + at*t, b*u + bt*t) of one block of a buffer."""

    buffer: int
    block: int = 0
    a: int = 0
    at: int = 0
    b: int = 0
    bt: int = 0

    def on(self, buffer: Buffer, block: int = 0) -> Slice:
        """The same range of another buffer."""
        return replace(self, buffer=int(buffer), block=block)


NO_SLICE = Slice(NOTHING)


@dataclass(frozen=True)
class Flow:
    """Messages between this rank and its `peers` (in island order)."""

    kind: FlowKind
    channel: Channel
    peers: tuple[int, ...]
    src: Slice = NO_SLICE
    dst: Slice = NO_SLICE
    position: int = 0
    give_back: bool = False
    finish: bool = False

    @cached_property
    def uses(self) -> frozenset[tuple[bool, int, int]]:
        """(whether it sends, peer, channel) of all its messages. Of two flows of a step that share one, the first goes
        first."""
        channel, first, last = int(self.channel), self.peers[:1], self.peers[-1:]
        sends: tuple[int, ...] = ()
        takes: tuple[int, ...] = ()
        if self.kind == FlowKind.SEND:
            sends = self.peers
        elif self.kind == FlowKind.RECV:
            takes = self.peers
        elif self.kind == FlowKind.FORWARD:
            takes, sends = first, self.peers[1:]
        elif self.kind == FlowKind.PASS:
            takes, sends = self.peers[:-1], last
        elif self.kind == FlowKind.EXCHANGE:
            takes = sends = self.peers
        else:
            takes, sends = self.peers, self.peers if self.give_back else ()
        combines = self.kind in (FlowKind.OWN, FlowKind.PASS, FlowKind.EXCHANGE)
        into = int(Channel.CONTRIBUTE) if combines else channel
        out = int(Channel.RESULT) if self.kind == FlowKind.OWN else channel
        return frozenset({(False, p, into) for p in takes} | {(True, p, out) for p in sends})


@dataclass(frozen=True)
class Step:
    kind: StepKind
    lane: Lane
    src: Slice = NO_SLICE
    dst: Slice = NO_SLICE
    len: Slice = NO_SLICE
    wait: int = -1
    shift: int = 0
    root: int = 0
    to: int = 0
    n_src: int = 0
    stride: int = 1
    as_bytes: bool = False
    group: int = 0  # of a vendor call: index into `groups_of` (core/topology.py); ranks outside only pass by
    first_flow: int = 0
    n_flows: int = 0


@dataclass(frozen=True)
class Plan:
    """One rank's part of one class of operation."""

    op: Op
    dtype: DType
    redop: RedOp
    root: int
    rank: int
    algorithm: str
    plan_class: str  # "bandwidth", "latency", "star" or "island"
    units: int
    segment: int  # elements, 0: always one segment
    steps: tuple[Step, ...]
    flows: tuple[Flow, ...]
    in_blocks: int = 1
    out_blocks: int = 1
    device_blocks: int = 0
    host_blocks: int = 0
    divisor: float = 1.0  # of avg; 0: the vendor's library averages itself
    scale_divisor: float = 1.0  # 0: multiply by the rank's own factor (premul_sum)
    device_sums: bool = False  # the device's own kernel combines what comes over the border, not the host
    reads_out: bool = False  # OUT is not written as a whole
    digest: int = 0  # of the blocks' lengths, where they differ
    number: int = field(default=0, compare=False)  # for the trace: which of the communicator's plans it is

    def lane(self, lane: Lane) -> list[int]:
        return [i for i, s in enumerate(self.steps) if s.lane == lane]

    def signals(self) -> set[int]:
        """Steps that another step waits for."""
        return {s.wait for s in self.steps if s.wait >= 0}

    def segments(self, count: int) -> list[int]:
        """Lengths of the segments of an operation on `count` elements."""
        if not self.segment or count <= self.segment:
            return [count]
        full, rest = divmod(count, self.segment)
        return [self.segment] * full + ([rest] if rest else [])

    def sent_elements(self, count: int) -> dict[int, int]:
        """Elements that this rank sends to each peer over the border."""
        sent: dict[int, int] = {}
        for length in self.segments(count):
            for flow in self.flows:
                src = flow.src if flow.src.buffer != NOTHING else flow.dst
                lo, hi = slice_range(src, length, self.units)
                targets: Iterable[int] = ()
                if flow.kind in (FlowKind.SEND, FlowKind.EXCHANGE):
                    targets = flow.peers
                elif flow.kind == FlowKind.OWN and flow.give_back:
                    targets = flow.peers
                elif flow.kind == FlowKind.PASS:
                    targets = flow.peers[-1:]
                elif flow.kind == FlowKind.FORWARD:
                    targets = flow.peers[1:]
                for peer in targets:
                    sent[peer] = sent.get(peer, 0) + hi - lo
        return sent


def measure(length: int, units: int) -> tuple[int, int]:
    """Unit and tail of a segment of `length` elements."""
    unit = length // units
    if unit >= UNIT_ALIGN:
        unit -= unit % UNIT_ALIGN
    return unit, length - unit * units


def slice_range(s: Slice, length: int, units: int) -> tuple[int, int]:
    """First and last-plus-one element of a slice in a segment of `length` elements."""
    unit, tail = measure(length, units)
    lo, hi = s.a * unit + s.at * tail, s.b * unit + s.bt * tail
    return lo, max(lo, hi)


@dataclass
class PlanBuilder:
    """Collects steps and flows."""

    units: int = 1
    steps: list[Step] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)

    def whole(self, buffer: Buffer, block: int = 0) -> Slice:
        return Slice(int(buffer), block, 0, 0, self.units, 1)

    def tail(self, buffer: Buffer) -> Slice:
        return Slice(int(buffer), 0, self.units, 0, self.units, 1)

    def range(self, buffer: Buffer, first: int, last: int) -> Slice:
        """Units [first, last); the tail belongs to the range that ends at the last unit."""
        return Slice(int(buffer), 0, first, 0, last, 1 if last == self.units else 0)

    def body(self, buffer: Buffer, first: int, last: int) -> Slice:
        """Units [first, last) without the tail."""
        return Slice(int(buffer), 0, first, 0, last, 0)

    def island(self, kind: StepKind, src: Slice, dst: Slice, length: Slice | None = None, **more: int | bool) -> int:
        """Appends a step to the island lane; returns its index."""
        self.steps.append(Step(kind, Lane.ISLAND, src, dst, length or src, **more))  # type: ignore[arg-type]
        return len(self.steps) - 1

    def border_step(self, kind: StepKind, src: Slice, dst: Slice, **more: int | bool) -> int:
        """Appends a local step to the border lane."""
        self.steps.append(Step(kind, Lane.BORDER, src, dst, src, **more))  # type: ignore[arg-type]
        return len(self.steps) - 1

    def border(self, flows: Sequence[Flow], wait: int = -1) -> int:
        """Appends a group of flows to the border lane; returns the step's index, or -1 if there are none."""
        if not flows:
            return -1
        self.steps.append(Step(StepKind.FLOWS, Lane.BORDER, wait=wait, first_flow=len(self.flows), n_flows=len(flows)))
        self.flows.extend(flows)
        return len(self.steps) - 1
