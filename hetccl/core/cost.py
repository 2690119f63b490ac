# SPDX-License-Identifier: Apache-2.0
"""What things cost: an alpha-beta line for every vendor call, copy and path, from a tuning file, a topology file, or
figures of our own.

A line gives seconds: alpha + beta * bytes. The bytes of a vendor call are those that pass a rank's link in a ring or a
chain (`carried`), so that one beta serves calls on islands of any size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from hetccl.core.plan import StepKind
from hetccl.core.topology import Island, Topology

__all__ = ["CALLS", "CostTable", "Costs", "IslandCost", "Line", "PathCost", "carried"]

CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "transfer")


class Line(NamedTuple):
    """Seconds of `n` bytes: alpha + beta * n."""

    alpha: float
    beta: float

    def __call__(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes


@dataclass(frozen=True)
class PathCost:
    """A way between two ranks of different islands. `message` is what each wire message costs either end."""

    latency: float
    beta: float
    message: float


@dataclass(frozen=True)
class IslandCost:
    """A vendor: its library's calls by name ("any": those not named), and a copy between device and host memory."""

    calls: Mapping[str, Line]
    copy: Line


@dataclass(frozen=True)
class CostTable:
    """All that was measured. Equal on all ranks (design D2): rank 0's goes with the topology.

    `measured`: {operation: {algorithm: ((bytes, seconds), ...)}}, of whole operations, only of the job whose `job`
    (see `Costs.job`) is the same.
    """

    paths: Mapping[str, PathCost] = field(default_factory=dict)
    vendors: Mapping[str, IslandCost] = field(default_factory=dict)
    combine: Line | None = None  # of the bytes that the host's own loop reads
    job: str = ""
    measured: Mapping[str, Mapping[str, tuple[tuple[int, float], ...]]] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Equal for equal tables. "" for an empty one."""
        if self == CostTable():
            return ""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "paths": {n: [p.latency, p.beta, p.message] for n, p in self.paths.items()},
            "vendors": {
                n: {"copy": list(v.copy), "calls": {c: list(line) for c, line in v.calls.items()}}
                for n, v in self.vendors.items()
            },
            "combine": list(self.combine) if self.combine else None,
            "job": self.job,
            "measured": {op: {a: [list(p) for p in ps] for a, ps in by.items()} for op, by in self.measured.items()},
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> CostTable:
        return CostTable(
            {n: PathCost(*p) for n, p in data["paths"].items()},
            {
                n: IslandCost({c: Line(*line) for c, line in v["calls"].items()}, Line(*v["copy"]))
                for n, v in data["vendors"].items()
            },
            Line(*data["combine"]) if data["combine"] else None,
            data["job"],
            {
                op: {a: tuple((int(n), float(t)) for n, t in ps) for a, ps in by.items()}
                for op, by in data["measured"].items()
            },
        )


# Used where nothing was measured: one core of a server, its memory, a fast network, a GPU. They decide well between
# algorithms whose costs differ much; `hetccl tune` finds this job's own.
PATHS = {
    "shm": PathCost(0.4e-6, 1 / 8e9, 0.2e-6),
    "network": PathCost(15e-6, 1 / 3e9, 2e-6),
    "rail": PathCost(5e-6, 1 / 25e9, 0.5e-6),
}
HOST = IslandCost({"any": Line(1.5e-6, 1 / 6e9)}, Line(0.1e-6, 1 / 8e9))
DEVICE = IslandCost({"any": Line(15e-6, 1 / 150e9)}, Line(8e-6, 1 / 20e9))
COMBINE = Line(0.05e-6, 1 / 16e9)
DEVICE_COMBINE = Line(5e-6, 1 / 200e9)


def carried(kind: StepKind, nbytes: float, size: int) -> float:
    """Bytes that pass the busiest link of a ring or chain of `size` ranks in a call; `nbytes` of its `len`."""
    if kind == StepKind.ALL_REDUCE:
        return 2 * nbytes * (size - 1) / size
    if kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_GATHER, StepKind.ALL_TO_ALL):
        return nbytes * (size - 1)
    return nbytes


class Costs:
    """What steps of plans cost on one topology. What a topology file says goes before what was measured elsewhere, and
    that before our own figures."""

    def __init__(self, topology: Topology, table: CostTable | None = None) -> None:
        self.topology, self.table = topology, table or CostTable()
        self.combine = self.table.combine or COMBINE
        self._pairs: dict[tuple[int, int], PathCost] = {}
        self._islands = [self._island(i) for i in topology.islands]

    @staticmethod
    def job(topology: Topology) -> str:
        """The make-up of a job: measured times of whole operations hold for it alone."""
        hosts = list(dict.fromkeys(topology.host_ids))
        where = [hosts.index(h) for h in topology.host_ids]
        return "; ".join(
            f"{i.name} {','.join(map(str, i.ranks))} on {','.join(str(where[r]) for r in i.ranks if where)}"
            for i in topology.islands
        )

    def call(self, island: int, kind: StepKind, nbytes: float) -> float:
        """A call of the island's library."""
        size = self.topology.islands[island].size
        calls = self._islands[island].calls
        line = calls.get(CALLS[kind]) or calls.get("any") or next(iter(calls.values()))
        return line(carried(kind, nbytes, size))

    def copy(self, island: int, nbytes: float) -> float:
        """Between device and host memory, or within host memory."""
        return self._islands[island].copy(nbytes)

    def combines(self, island: int, nbytes: float) -> float:
        """Of a border message with what the island has: on the direct path a device that can adds in its own memory."""
        there = self.topology.islands[island]
        return (DEVICE_COMBINE if there.direct and there.kernels else self.combine)(nbytes)

    def path(self, a: int, b: int) -> PathCost:
        """From rank a to rank b of another island."""
        key = (a, b) if a < b else (b, a)
        found = self._pairs.get(key)
        if found is None:
            found = self._pairs[key] = self._path(*key)
        return found

    def path_name(self, a: int, b: int) -> str:
        """ "shm", the name of a network path that was measured, or "rail"."""
        ids = self.topology.host_ids
        known = self.table.paths
        if ids and ids[a] == ids[b] and ("shm" in known or not known):
            return "shm"
        one, other = self.topology.island_of(a), self.topology.island_of(b)
        if one.speeds and other.speeds and not known:
            return "rail"
        others = [n for n in known if n != "shm"]
        return others[0] if others else "shm" if known else "network"

    def _path(self, a: int, b: int) -> PathCost:
        name = self.path_name(a, b)
        base = self.table.paths.get(name) or PATHS[name]
        if name == "shm" and not self.topology.shaped:
            return base
        one, other = self.topology.island_of(a), self.topology.island_of(b)
        link = self.topology.link(one.index, other.index)
        beta = max(_rank_beta(one, a), _rank_beta(other, b)) or base.beta
        if link.rate:  # shared by the pairs that may use it at once
            beta = max(beta, min(len(one.borders), len(other.borders)) / link.rate)
        latency = link.latency or max(one.latency, other.latency) or base.latency
        return PathCost(latency, beta, base.message)

    def _island(self, island: Island) -> IslandCost:
        ours = HOST if island.host_memory else DEVICE
        cost = self.table.vendors.get(island.name) or self.table.vendors.get(island.vendor) or ours
        if not island.inner_rate and not island.inner_latency:
            return cost
        any_line = cost.calls.get("any") or next(iter(cost.calls.values()))
        alpha = island.inner_latency or any_line.alpha
        beta = 1 / island.inner_rate if island.inner_rate else any_line.beta
        return IslandCost({"any": Line(alpha, beta)}, cost.copy)


def _rank_beta(island: Island, rank: int) -> float:
    """Seconds a byte of a rank's own rails; 0: unknown."""
    if not island.speeds:
        return 0.0
    if rank in island.borders:
        return 1 / island.speeds[island.borders.index(rank)]
    return 1 / min(island.speeds)
