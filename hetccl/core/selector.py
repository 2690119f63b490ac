# SPDX-License-Identifier: Apache-2.0
"""Which algorithm, in segments of what size, for an operation of how many bytes: whatever the cost model, or a
measurement of this very job, takes least time for.

A pure function of topology and cost table, which all ranks share, so all choose alike. Sizes fall into buckets between
which the choice changes; the executor finds a size's bucket without asking.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetccl.core.algorithms.common import ONE_SEGMENT, Algorithm, Shared, needs_segments
from hetccl.core.cost import Costs, CostTable
from hetccl.core.plan import Plan
from hetccl.core.simulate import Timeline, simulate
from hetccl.core.topology import Topology
from hetccl.errors import UnsupportedError
from hetccl.types import DType, Op, RedOp

__all__ = ["Choice", "Choices", "Selector", "measured_time", "predict", "stand_ins"]

OF_A_KIND = 2
ALL_RANKS = 16  # up to so many, predictions run the plans of all ranks
GRID = tuple(64 << 3 * k for k in range(9))  # 64 B to 1 GiB
SMALLEST_SEGMENT = 128 << 10
NEAR = 1.25  # algorithms whose first estimate is so near the best are tried with other segments
SAME = 1.01
ALIKE = 1.05  # measured times that are so near are equal
MOST_BUCKETS = 32
_known: dict[tuple[object, ...], Choices] = {}


@dataclass(frozen=True)
class Choice:
    """What is done with sizes of one bucket. `segment_bytes`: as in `Shared`."""

    algorithm: str
    segment_bytes: int = 0


@dataclass(frozen=True)
class Choices:
    """`limits[i]` is the last size in bytes (as `count` in `Communicator.run`) of bucket i; the last has none."""

    limits: tuple[int, ...]
    buckets: tuple[Choice, ...]

    def bucket(self, nbytes: int) -> int:
        return bisect_left(self.limits, nbytes)

    def of(self, nbytes: int) -> Choice:
        return self.buckets[self.bucket(nbytes)]


class Selector:
    """Chooses among `algorithms` of each operation; `forced` leaves one, and what is `settled` needs no search."""

    def __init__(
        self, topology: Topology, table: CostTable, algorithms: Mapping[Op, Mapping[str, Algorithm]],
        forced: Mapping[str, str], settled: Mapping[str, Choices] | None = None,
    ) -> None:  # fmt: skip
        self.costs = Costs(topology, table)
        self._algorithms, self._forced = algorithms, forced
        self._settled = {op: choices for op, choices in (settled or {}).items() if op not in forced}

    def choices(self, op: Op) -> Choices:
        """Computed on the first call for a topology and a table; some tens of milliseconds."""
        topology = self.costs.topology
        if op.label in self._settled:
            return self._settled[op.label]
        if len(topology.islands) == 1 or op not in MODEL_OPS:
            return Choices((), (Choice(self._forced.get(op.label) or next(iter(self._algorithms[op]))),))
        names = self.candidates(op)
        key = (topology.digest, self.costs.table.digest, op, names)
        found = _known.get(key)
        if found is None:
            found = _known[key] = _Search(self.costs, op, {n: self._algorithms[op][n] for n in names}).choices()
        return found

    def at(self, op: Op, nbytes: int) -> Choice:
        """The choice for one size, without asking about others."""
        names = self.candidates(op)
        if op.label in self._settled or len(self.costs.topology.islands) == 1 or op not in MODEL_OPS:
            return self.choices(op).of(nbytes)
        search = _Search(self.costs, op, {n: self._algorithms[op][n] for n in names})
        search.best(nbytes)
        return search.seen[nbytes]

    def candidates(self, op: Op) -> tuple[str, ...]:
        """Names of the algorithms that can be chosen on this topology."""
        forced = self._forced.get(op.label)
        if forced:
            return (forced,)
        if op.label in self._settled:
            return tuple(dict.fromkeys(choice.algorithm for choice in self._settled[op.label].buckets))
        topology, shared = self.costs.topology, Shared(op, DType.FLOAT32, RedOp.SUM)
        if len(topology.islands) == 1:  # nothing to choose: the planner takes the island's own call
            return tuple(self._algorithms[op])[:1]
        able = []
        for name, make in self._algorithms[op].items():
            with contextlib.suppress(UnsupportedError):
                make(topology, shared, 0, None)
                able.append(name)
        return tuple(able)


BLOCKS = (Op.ALL_GATHER, Op.REDUCE_SCATTER)
CHAINED = (Op.BROADCAST, Op.REDUCE)
MODEL_OPS = (Op.ALL_REDUCE, Op.BROADCAST, Op.ALL_GATHER, Op.REDUCE_SCATTER)


def predict(
    costs: Costs, shared: Shared, algorithm: Algorithm, nbytes: int, ranks: Sequence[int] = (), spans: bool = False,
    most_segments: int = 8,
) -> tuple[Timeline, dict[int, Plan]]:  # fmt: skip
    """The time that one operation takes, and the plans that it was found from: of `ranks`, or of those that stand for
    all."""
    topology = costs.topology
    plans = {r: algorithm(topology, shared, r, None) for r in ranks or stand_ins(topology, shared)}
    count = 1 if shared.counts else max(1, nbytes // shared.dtype.itemsize)
    return simulate(costs, plans, count, most_segments, spans), plans


def stand_ins(topology: Topology, shared: Shared, most: int = ALL_RANKS) -> list[int]:
    """Ranks that stand for all: all of a small job, else the heads of the first islands of each kind, of one also the
    last border rank. A broadcast waits for island after island, so it needs all heads."""
    if topology.size <= most:
        return list(range(topology.size))
    found = {shared.root}
    kinds: Counter[tuple[object, ...]] = Counter()
    for island in topology.islands:
        kind = (island.vendor, island.size, len(island.borders), island.speeds[:1], island.inner_rate)
        kinds[kind] += 1
        if kinds[kind] <= OF_A_KIND or shared.op in CHAINED:
            found.add(topology.border.head(island.index))
        if kinds[kind] == 1:
            found.add(island.borders[-1])
    return sorted(found)


def measured_time(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    """A time between measured ones, on a straight line in logarithms; beyond the last it grows with the bytes."""
    if nbytes <= points[0][0]:
        return points[0][1]
    if nbytes >= points[-1][0]:
        return points[-1][1] * nbytes / points[-1][0]
    at = bisect_left(points, (nbytes, 0.0))
    (n0, t0), (n1, t1) = points[at - 1], points[at]
    share = math.log(nbytes / n0) / math.log(n1 / n0)
    return math.exp(math.log(t0) * (1 - share) + math.log(t1) * share)


class _Search:
    """Finds the buckets of one operation."""

    def __init__(self, costs: Costs, op: Op, algorithms: Mapping[str, Algorithm]) -> None:
        self.costs, self.algorithms = costs, algorithms
        topology = costs.topology
        self.shared = Shared(op, DType.FLOAT32, RedOp.SUM)
        self.largest = needs_segments(topology)
        self.segments = _segments(self.largest, max(i.size for i in topology.islands))
        self.plans: dict[Choice, dict[int, Plan]] = {}
        self.seen: dict[int, Choice] = {}
        table = costs.table
        times = table.measured.get(op.label, {}) if table.job == Costs.job(topology) else {}
        self.measured = {name: times[name] for name in algorithms if name in times}

    def choices(self) -> Choices:
        grid = GRID
        if self.measured:
            sizes = {n for points in self.measured.values() for n, _ in points}
            grid = tuple(sorted(sizes)) or GRID
        for nbytes in grid:
            self.best(nbytes)
        for _ in range(2):  # where the choice changes, look closer
            known = sorted(self.seen)
            for low, high in pairwise(known):
                if self.seen[low] != self.seen[high] and high > 2 * low:
                    self.best(math.isqrt(low * high))
        known = sorted(self.seen)
        limits: list[int] = []
        buckets = [self.seen[known[0]]]
        for low, high in pairwise(known):
            if self.seen[high] != buckets[-1] and len(buckets) < MOST_BUCKETS:
                limits.append(math.isqrt(low * high))
                buckets.append(self.seen[high])
        return Choices(tuple(limits), tuple(buckets))

    def best(self, nbytes: int) -> None:
        names = list(self.measured or self.algorithms)
        if self.measured:  # what measured alike is left to the model: noise must not decide
            taken = {name: measured_time(self.measured[name], nbytes) for name in names}
            names = [name for name in names if taken[name] <= ALIKE * min(taken.values())]
        # blocks of one segment lie side by side: then one call of a library does for all of an island
        one = self.shared.op in BLOCKS and nbytes <= self.largest
        found = {choice: self._time(choice, nbytes) for choice in (Choice(n, ONE_SEGMENT if one else 0) for n in names)}
        least = min(found.values())
        times = {choice: t for choice, t in found.items() if t <= NEAR * least}
        for name in [] if one else [choice.algorithm for choice in times]:
            for segment in self.segments:
                choice = Choice(name, segment)
                cut = next(iter(self._plans(choice).values())).segment
                if cut and cut * self.shared.dtype.itemsize < nbytes:  # else it is one segment, as before
                    times[choice] = self._time(choice, nbytes)
        best = min(times, key=lambda c: times[c])
        below = [n for n in self.seen if n < nbytes]
        same = self.seen[max(below)] if below else best
        if times.get(same, math.inf) <= SAME * times[best]:  # no change without a reason
            best = same
        self.seen[nbytes] = best

    def _time(self, choice: Choice, nbytes: int) -> float:
        count = max(1, nbytes // self.shared.dtype.itemsize)
        return simulate(self.costs, self._plans(choice), count, 4).total

    def _plans(self, choice: Choice) -> dict[int, Plan]:
        plans = self.plans.get(choice)
        if plans is None:
            shared = replace(self.shared, segment_bytes=choice.segment_bytes)
            topology = self.costs.topology
            make = self.algorithms[choice.algorithm]
            plans = self.plans[choice] = {r: make(topology, shared, r, None) for r in stand_ins(topology, shared)}
        return plans


def _segments(largest: int, ranks: int) -> list[int]:
    """Sizes of segments to try: less than what the libraries like best, and more where an island's ranks are so many
    that each would get little of it."""
    found = [largest << 2 * k for k in range(1, 4) if largest and 4**k * 2 <= ranks]
    smaller: list[int] = []
    while largest // 4 >= SMALLEST_SEGMENT and len(smaller) < 3 and not found:
        largest //= 4
        smaller.append(largest)
    return smaller + found
