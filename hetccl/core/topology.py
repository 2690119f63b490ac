# SPDX-License-Identifier: Apache-2.0
"""Who is where: ranks, islands, and the paths between them. Computed once by rank 0 from all ranks' records and
published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hetccl.types import DType, RedOp

__all__ = ["Island", "Record", "Topology", "compute_topology"]


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
    calls: int = 0  # which optional calls the vendor's library has: bits ALL_TO_ALL, TRANSFER
    place: str = ""  # where the device sits, equal only for ranks that share it; "" if unknown

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

    @property
    def staged(self) -> bool:
        """Whether what crosses the border passes through pinned memory of this rank's."""
        return not (self.host_memory or self.direct)

    @property
    def size(self) -> int:
        return len(self.ranks)

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


@dataclass(frozen=True)
class Topology:
    """Islands in order of their lowest rank, and where each rank stands."""

    size: int
    islands: tuple[Island, ...]
    chunk_bytes: int
    hosts: tuple[str, ...] = ()
    host_ids: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
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

    def border_pairs(self) -> list[tuple[int, int]]:
        """Pairs of ranks that exchange border messages, lower rank first: all pairs in different islands that some
        plan uses.

        Shards of islands of n and m ranks meet in n + m - gcd(n, m) pairs; blocks enter an island at their rank's
        number modulo the island's size; heads meet heads.
        """
        return sorted(
            (min(p, q), max(p, q))
            for a in self.islands
            for b in self.islands[a.index + 1 :]
            for p in a.ranks
            for q in b.ranks
            if self.linked(p, q)
        )

    def linked(self, p: int, q: int) -> bool:
        """Whether two ranks of different islands exchange border messages."""
        (one, i), (other, j) = self.place(p), self.place(q)
        n, m = self.islands[one].size, self.islands[other].size
        shards = i * m < (j + 1) * n and j * n < (i + 1) * m  # [i/n, (i+1)/n) and [j/m, (j+1)/m) overlap
        # a broadcast's root sends to the next island's head, whoever is root
        return shards or i % m == j or j % n == i or i == 0 or j == 0

    def to_json(self) -> dict[str, Any]:
        islands = [{**i.__dict__, "ranks": list(i.ranks), "reduce_mask": list(i.reduce_mask)} for i in self.islands]
        for i in islands:
            i.pop("contiguous", None)
        return {
            "size": self.size,
            "islands": islands,
            "chunk_bytes": self.chunk_bytes,
            "hosts": list(self.hosts),
            "host_ids": list(self.host_ids),
            "devices": list(self.devices),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Topology:
        islands = tuple(
            Island(**{**i, "ranks": tuple(i["ranks"]), "reduce_mask": tuple(i["reduce_mask"])}) for i in data["islands"]
        )
        return Topology(
            data["size"],
            islands,
            data["chunk_bytes"],
            tuple(data["hosts"]),
            tuple(data["host_ids"]),
            tuple(data["devices"]),
        )


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
    )


def _and(masks: Any) -> int:
    result = -1
    for mask in masks:
        result &= mask
    return result
