# SPDX-License-Identifier: Apache-2.0
"""The three ways to combine what crosses the border (design D4): the host, the device's own kernel, the border
communicator.

Each island that owns elements chooses for itself: whichever way makes them, its bits are final and only copied from
then on, so all ranks hold the same bits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetccl.core.algorithms import border_communicator
from hetccl.core.algorithms.common import Algorithm, Places, Shared, combining_op
from hetccl.core.cost import CostTable
from hetccl.core.groups import group_for
from hetccl.core.plan import FlowKind, Plan
from hetccl.core.topology import Island, Topology
from hetccl.errors import UnsupportedError
from hetccl.types import DType, RedOp

__all__ = ["DEVICE_KERNEL", "Rates", "Way", "Ways", "decide", "obstacle", "rates_of"]

COMBINES = (FlowKind.OWN, FlowKind.PASS, FlowKind.EXCHANGE)
DEVICE_KERNEL = "device kernel"
FLOATS = frozenset(d for d in DType if "FLOAT" in d.name)
REMEDY = "HETCCL_COMBINE=auto lets hetccl choose a way that works"


class Way(enum.StrEnum):
    HOST = "host"
    DEVICE = "device"
    BORDER = "border"


@dataclass(frozen=True)
class Rates:
    """Bytes a second of one rank: what the host combines, what the device combines, and copies between them. The
    defaults only say that the host is best where data lie in host memory anyway; measured ones come from the tuning
    table."""

    host: float = 8e9
    device: float = 50e9
    copy: float = 6e9


def rates_of(table: CostTable) -> Rates:
    """What a tuning table says of them: the slowest copies, since one figure serves all islands."""
    rates = Rates()
    if table.combine:
        rates = replace(rates, host=1 / table.combine.beta)
    copies = [vendor.copy.beta for vendor in table.vendors.values()]
    return replace(rates, copy=1 / max(copies)) if copies else rates


def decide(island: Island, shared: Shared, contributions: int, wanted: str, rates: Rates = Rates()) -> Way:
    """How an island combines: as `wanted` (HETCCL_COMBINE), or, with "auto", in the cheapest way that it can.

    The cost of a way is seconds a byte of the result. A border communicator would have to exist already, so "auto"
    never picks it.
    """
    if wanted != "auto":
        return Way(wanted)
    n = contributions
    costs = {Way.HOST: n / rates.host, Way.DEVICE: (n + 1) / rates.copy + n / rates.device}
    able = [way for way in costs if not obstacle(way, island, shared, n)]
    return min(able, key=lambda way: costs[way])


def obstacle(way: Way, island: Island, shared: Shared, contributions: int) -> str:
    """Why an island cannot combine in this way, or nothing."""
    if way == Way.DEVICE:
        missing = not island.host_memory and not island.kernels
        return "its device has no kernels that combine" if missing else ""
    if way == Way.HOST:
        return ""
    redop = combining_op(shared)
    if island.size < 2:
        return "it has one rank, and a vendor's communicator needs two"
    if not island.reduces(shared.dtype, redop):
        return f"its library cannot reduce {shared.dtype.label} with {redop.label}"
    _, members = group_for(island, contributions, contributions, 0)
    idle = not island.splits and len(members) < island.size
    if idle and redop in (RedOp.MIN, RedOp.MAX) and shared.dtype in FLOATS and not island.keeps_nan:
        return (
            "its library can make no communicator of a part of the island, and with idle ranks cleared "
            f"{redop.label} of {shared.dtype.label} is only right where NaN is known to propagate"
        )
    return ""


class Ways:
    """Applies the chosen ways to algorithms. `wanted` is HETCCL_COMBINE, equal on all ranks."""

    def __init__(self, topology: Topology, wanted: str = "auto", rates: Rates | None = None) -> None:
        self._topology, self.wanted = topology, wanted
        self._rates = rates or Rates()

    def of(self, island: Island, shared: Shared) -> Way:
        return decide(island, shared, len(self._topology.islands), self.wanted, self._rates)

    def apply(self, algorithm: Algorithm, shared: Shared) -> Algorithm:
        """The algorithm with its combinations done as chosen. Raises `UnsupportedError` where a way is forced that
        cannot be, the same on all ranks."""
        topology = self._topology
        if len(topology.islands) == 1:
            return algorithm
        if self.wanted not in ("auto", Way.HOST):
            self._check(algorithm, shared)

        def made(topology: Topology, shared: Shared, rank: int, places: Places | None) -> Plan:
            island = topology.island_of(rank)
            way = self.of(island, shared)
            if way == Way.BORDER:
                return border_communicator.plan(algorithm, topology, shared, rank, places)
            found = algorithm(topology, shared, rank, places)
            if way == Way.DEVICE and island.staged:
                return replace(found, device_sums=any(f.kind in (FlowKind.OWN, FlowKind.PASS) for f in found.flows))
            return found

        return made

    def fits(self, algorithm: Algorithm, shared: Shared) -> str:
        """Why a forced way cannot be used with an algorithm, or nothing."""
        islands = self._topology.islands
        if self.wanted in ("auto", Way.HOST) or len(islands) == 1:
            return ""
        if self.wanted == Way.DEVICE and all(i.host_memory for i in islands):
            return ""
        plans = [algorithm(self._topology, shared, r, None) for r in range(self._topology.size)]
        if any(f.kind == FlowKind.EXCHANGE for p in plans for f in p.flows):
            return "every island combines everything for itself in it, which gives equal bits only on hosts"
        if self.wanted == Way.BORDER and border_communicator.locks(plans):
            return "its islands combine in a ring, each waiting for the one before"
        return ""

    def describe(self, algorithm: Algorithm, shared: Shared) -> str:
        """Which islands combine, and how: "host", or by island where they differ."""
        topology = self._topology
        if len(topology.islands) == 1:
            return "vendor's library"
        plans = [algorithm(topology, shared, r, None) for r in range(topology.size)]
        exchanged = any(f.kind == FlowKind.EXCHANGE for p in plans for f in p.flows)
        if exchanged and not any(i.direct for i in topology.islands):
            return "host"
        ways = {i.index: self._text(i, shared) for i in _combining(topology, plans)}
        if len(set(ways.values())) <= 1:
            return next(iter(ways.values()), "nobody")
        return ", ".join(f"{text} (island {index})" for index, text in ways.items())

    def _text(self, island: Island, shared: Shared) -> str:
        if any(i.direct for i in self._topology.islands):  # there a device combines what is in its own memory
            return DEVICE_KERNEL if island.direct and island.kernels else "host"
        return {Way.HOST: "host", Way.DEVICE: DEVICE_KERNEL, Way.BORDER: "border communicator"}[
            Way.HOST if island.host_memory and self.of(island, shared) == Way.DEVICE else self.of(island, shared)
        ]

    def _check(self, algorithm: Algorithm, shared: Shared) -> None:
        topology, way = self._topology, Way(self.wanted)
        plans = [algorithm(topology, shared, r, None) for r in range(topology.size)]
        for island in _combining(topology, plans):
            wrong = obstacle(way, island, shared, len(topology.islands))
            if wrong:
                raise UnsupportedError(
                    f"HETCCL_COMBINE={way}: island {island.index} ({island.name}, {island.size} ranks) owns elements "
                    f"of this {shared.op.label} and cannot combine them so: {wrong}. {REMEDY}"
                )


def _combining(topology: Topology, plans: list[Plan]) -> Iterator[Island]:
    """Islands some rank of which combines what comes over the border."""
    for island in topology.islands:
        if any(f.kind in COMBINES for r in island.ranks for f in plans[r].flows):
            yield island
