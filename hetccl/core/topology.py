# SPDX-License-Identifier: Apache-2.0
"""Who is where: ranks, islands, and the paths between them. Computed once by rank 0 from all ranks' records and
published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from hetccl.core.border import Border
from hetccl.types import DType, RedOp

__all__ = ["Island", "IslandLink", "Record", "Topology", "compute_topology", "fitting_chunk"]

CHUNK_S = 1e-3  # that a wire message may take on the slowest border link,
LEAST_CHUNK = 64 << 10  # as long as it has as many bytes as this


@dataclass(frozen=True)
class Record:
    """What a rank says of itself when it joins."""

    rank: int
    host: str  # host name, for people
    host_id: str  # equal for ranks that may share a host
    pid: int
    vendor: str
    label: str  # from "vendor@label": splits one vendor into several islands
    island_key: tuple[str, str, str, str]
    max_island: int
    device: str
    host_memory: bool
    blocking: bool
    kernels: bool
    segment_bytes: int
    reduce_mask: tuple[int, ...]
    move_mask: int
    transports: dict[str, dict[str, Any]]  # name -> address
    max_message: dict[str, int]
    wire: tuple[int, int] = (1, 1)  # lowest and highest version spoken
    process: tuple[int, int] = (0, 0)  # different for every process, also where several have one pid
    calls: int = 0  # what the vendor's library can do: bits ALL_TO_ALL, TRANSFER, SPLIT, KEEPS_NAN
    place: str = ""  # where the device sits, equal only for ranks that share it; "" if unknown
    topology: str = ""  # digest of the topology file that this rank was given
    tuning: str = ""  # digest of the rank's own tuning file
    border_rate: float = 0.0  # bytes a second that HETCCL_BORDER_RATE leaves this rank each way; 0: all there is
    inner_rate: float = 0.0  # bytes a second that the vendor says its library moves inside, a rank; 0: unknown

    def to_json(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "island_key": list(self.island_key),
            "reduce_mask": list(self.reduce_mask),
            "wire": list(self.wire),
            "process": list(self.process),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Record:
        data = dict(data)
        data["island_key"] = tuple(data["island_key"])
        data["reduce_mask"] = tuple(data["reduce_mask"])
        data["wire"] = tuple(data["wire"])
        data["process"] = tuple(data["process"])
        return Record(**data)


@dataclass(frozen=True)
class Island:
    """The ranks that one vendor communicator serves, in global order."""

    index: int
    ranks: tuple[int, ...]
    vendor: str
    label: str
    host_memory: bool
    kernels: bool
    segment_bytes: int
    reduce_mask: tuple[int, ...]
    move_mask: int
    calls: int = 0
    direct: bool = False  # border messages go from and into the device's own memory
    border: tuple[int, ...] = ()  # ranks that talk to other islands, ascending; (): all
    speeds: tuple[float, ...] = ()  # bytes a second of each of them, each way; (): unknown, taken as equal
    latency: float = 0.0  # seconds of one message over a rail; 0: unknown
    rails: tuple[float, ...] = ()  # of each network card of a host, bytes a second; 0: unknown
    inner_rate: float = 0.0  # bytes a second and rank that the vendor's library moves inside; 0: unknown
    inner_latency: float = 0.0  # seconds of one call of it; 0: unknown
    border_why: str = ""  # who chose the border ranks, for people

    @property
    def staged(self) -> bool:
        """Whether what crosses the border passes through pinned memory of this rank's."""
        return not (self.host_memory or self.direct)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Ranks that talk to other islands."""
        return self.border or self.ranks

    @property
    def border_rate(self) -> float:
        """Bytes a second that all border ranks send together; 0: unknown."""
        return sum(self.speeds)

    @property
    def name(self) -> str:
        return f"{self.vendor}@{self.label}" if self.label else self.vendor

    @cached_property
    def contiguous(self) -> bool:
        return self.ranks == tuple(range(self.ranks[0], self.ranks[0] + self.size))

    def reduces(self, dtype: DType, redop: RedOp) -> bool:
        """Whether the vendor's library reduces this dtype with this operator."""
        return bool(self.reduce_mask[dtype] >> redop & 1)

    def moves(self, dtype: DType) -> bool:
        return bool(self.move_mask >> dtype & 1)

    @property
    def swaps(self) -> bool:
        """Whether the vendor's library has an all_to_all."""
        return bool(self.calls & 1)

    @property
    def transfers(self) -> bool:
        """Whether the vendor's library has send and receive."""
        return bool(self.calls & 2)

    @property
    def splits(self) -> bool:
        """Whether the vendor's library can make further communicators, of a part of the island."""
        return bool(self.calls & 4)

    @property
    def keeps_nan(self) -> bool:
        """Whether the vendor's min and max are known to propagate NaN."""
        return bool(self.calls & 8)


@dataclass(frozen=True)
class IslandLink:
    """What is known of the way between two islands, a < b. Where nothing is said, it is direct."""

    a: int
    b: int
    direct: bool = True  # False: no rank of a reaches a rank of b; data is relayed by a third island
    rate: float = 0.0  # bytes a second each way, all border ranks together; 0: what their rails give
    latency: float = 0.0  # seconds; 0: unknown


@dataclass(frozen=True)
class Topology:
    """Islands in order of their lowest rank, and where each rank stands."""

    size: int
    islands: tuple[Island, ...]
    chunk_bytes: int
    hosts: tuple[str, ...] = ()
    host_ids: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    links: tuple[IslandLink, ...] = ()  # pairs of islands of which something is known
    source: str = ""  # digest of the topology file, "" without one
    shaped: bool = False  # HETCCL_BORDER_RATE slows all paths between islands, those within a host as well
    _place: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)

    def place(self, rank: int) -> tuple[int, int]:
        """(island, rank in it)"""
        if not self._place:
            for island in self.islands:
                for i, r in enumerate(island.ranks):
                    self._place[r] = (island.index, i)
        return self._place[rank]

    def island_of(self, rank: int) -> Island:
        return self.islands[self.place(rank)[0]]

    @cached_property
    def border(self) -> Border:
        """Who carries what between islands."""
        return Border(self)

    def border_pairs(self) -> list[tuple[int, int]]:
        """Pairs of ranks that exchange border messages, lower rank first: all pairs in different islands that some
        plan uses."""
        return sorted(self.border.pairs())

    def linked(self, p: int, q: int) -> bool:
        """Whether two ranks of different islands exchange border messages."""
        return self.border.linked(p, q)

    def direct(self, a: int, b: int) -> bool:
        """Whether ranks of two islands reach each other without a third island."""
        return not self._links or self.link(a, b).direct

    @cached_property
    def digest(self) -> str:
        """Equal for equal topologies: islands, borders, links, hosts, devices and the file they came from."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def link(self, a: int, b: int) -> IslandLink:
        """The way between two islands."""
        return self._links.get((min(a, b), max(a, b))) or IslandLink(min(a, b), max(a, b))

    @cached_property
    def _links(self) -> dict[tuple[int, int], IslandLink]:
        return {(link.a, link.b): link for link in self.links}

    def to_json(self) -> dict[str, Any]:
        return {
            **{f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "_place"},
            "islands": [_as_json(i) for i in self.islands],
            "links": [_as_json(link) for link in self.links],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Topology:
        return Topology(
            **{
                **{name: _tuple(value) for name, value in data.items()},
                "islands": tuple(Island(**{k: _tuple(v) for k, v in i.items()}) for i in data["islands"]),
                "links": tuple(IslandLink(**link) for link in data["links"]),
            }
        )


def _as_json(one: Island | IslandLink) -> dict[str, Any]:
    return {f.name: _plain(getattr(one, f.name)) for f in fields(one)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def compute_topology(records: Sequence[Record], chunk_bytes: int) -> Topology:
    """Groups ranks with equal vendor, label and island key; islands larger than a library allows are cut."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = (record.vendor, record.label, record.island_key)
        group = groups.setdefault(key, [])
        if len(group) == record.max_island:  # full: later ranks open a new one
            n = sum(1 for k in groups if k[:3] == key)
            groups[(*key, n)] = group
            group = groups[key] = []
        group.append(record)
    ordered = sorted(groups.values(), key=lambda g: g[0].rank)
    islands = tuple(
        Island(
            index,
            tuple(r.rank for r in group),
            group[0].vendor,
            group[0].label,
            all(r.host_memory for r in group),
            all(r.kernels for r in group),
            min(r.segment_bytes for r in group),
            tuple(_and(r.reduce_mask[d] for r in group) for d in range(len(group[0].reduce_mask))),
            _and(r.move_mask for r in group),
            _and(r.calls for r in group),
            speeds=tuple(r.border_rate for r in group) if all(r.border_rate for r in group) else (),
            inner_rate=min(r.inner_rate for r in group),
        )
        for index, group in enumerate(ordered)
    )
    return Topology(
        len(records),
        islands,
        chunk_bytes,
        tuple(r.host for r in records),
        tuple(r.host_id for r in records),
        tuple(r.device for r in records),
        shaped=any(r.border_rate for r in records),
    )


def fitting_chunk(topology: Topology) -> int:
    """Bytes of a wire message: less than the transports allow where a link is so slow that one would take long. What
    comes back is a chunk or two behind what goes out, and for so long the link idles at the end of every segment."""
    slowest = min((speed for i in topology.islands for speed in i.speeds), default=0.0)
    if not slowest:
        return topology.chunk_bytes
    fitting = 1 << max(0, int(slowest * CHUNK_S).bit_length() - 1)
    return min(topology.chunk_bytes, max(LEAST_CHUNK, fitting))


def _and(masks: Any) -> int:
    result = -1
    for mask in masks:
        result &= mask
    return result
