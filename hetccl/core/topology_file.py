# SPDX-License-Identifier: Apache-2.0
"""hetccl.yaml: a cluster's islands, hosts, rails and the ways between islands, as a user writes them down.

    islands:
      amd:    {vendor: rccl, ranks: 256, hosts: 32, rails: 8, rate: 50GB/s}
      nvidia: {vendor: nccl, ranks: 256, hosts: 32, rails: 8, rate: 50GB/s, border: 64}
      cpu:    {vendor: oneccl, ranks: [512, 513], hosts: [head]}
    links:
      - {between: [amd, cpu], rate: none}

The keys are declared in `topology_keys.py`. A file describes a running job, whose ranks are compared with it when they
join, or a cluster that does not run (`hetccl plan`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetccl.core.ranks import RankSpec
from hetccl.core.topology import Island, IslandLink, Topology
from hetccl.core.topology_keys import ISLAND_NAME, KEYS, Hosts
from hetccl.core.yaml_keys import MAX_FILE, Document, Found
from hetccl.errors import ConfigError

__all__ = ["IslandEntry", "TopologyFile", "choose_border", "load_topology", "parse_topology"]

HOST_VENDORS = ("host", "oneccl")  # vendors whose ranks compute in host memory, where a file does not say
ALL_REDUCES = (1 << 9) - 1  # what is assumed of a library that is not there to be asked: every operator and dtype,
ALL_DTYPES = (1 << 19) - 1  # all_to_all, send and receive
ALL_CALLS = 3
SEGMENT_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class IslandEntry:
    """An island as the file has it. `hosts`: name of each rank's host, in the order of `ranks`; () if not said."""

    name: str
    vendor: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    named_hosts: bool  # False: only their number is known, names are made up
    border: int | tuple[int, ...]  # how many at most (0: all), or which
    rails: tuple[float, ...]  # of one host, bytes a second each, 0: unknown; (): not said
    latency: float
    inner_rate: float
    inner_latency: float
    measured: float
    memory: str  # "host", "device", or "": not said
    where: str  # "hetccl.yaml:4:3"
    border_where: str

    @property
    def host_memory(self) -> bool:
        return self.memory == "host" or (not self.memory and self.vendor in HOST_VENDORS)


@dataclass(frozen=True)
class TopologyFile:
    """A topology file that has been read and is consistent in itself."""

    path: str
    islands: tuple[IslandEntry, ...]  # in the order of the file
    links: tuple[IslandLink, ...]  # by indices of `order`
    chunk_bytes: int
    digest: str  # of the content, not of its layout

    @property
    def size(self) -> int:
        return sum(len(i.ranks) for i in self.islands)

    @property
    def order(self) -> tuple[IslandEntry, ...]:
        """Islands by lowest rank, as `Topology.islands`."""
        return tuple(sorted(self.islands, key=lambda i: i.ranks[0]))

    def island_of(self, rank: int) -> IslandEntry:
        return next(i for i in self.islands if rank in i.ranks)

    def part(self, members: Sequence[int]) -> TopologyFile:
        """The file of a group of some ranks, which are numbered anew in the order of `members`. Border ranks that are
        not members are left out; islands without members, too."""
        number = {rank: i for i, rank in enumerate(members)}
        kept = []
        for entry in self.islands:
            ranks = tuple(sorted(number[r] for r in entry.ranks if r in number))
            hosts = dict(zip(entry.ranks, entry.hosts, strict=False))
            border = entry.border
            if isinstance(border, tuple):
                border = tuple(sorted(number[r] for r in border if r in number)) or 0
            if ranks:
                names = tuple(hosts[members[r]] for r in ranks) if hosts else ()
                kept.append(replace(entry, ranks=ranks, hosts=names, border=border))
        before = [entry.name for entry in self.order]
        after = [entry.name for entry in sorted(kept, key=lambda i: i.ranks[0])]
        links = []
        for link in self.links:
            ends = [before[link.a], before[link.b]]
            if all(name in after for name in ends):
                a, b = sorted(after.index(name) for name in ends)
                links.append(replace(link, a=a, b=b))
        left = apart([link for link in links if not link.direct], len(after))
        if left:
            raise ConfigError(
                f"{self.path}: no way leads from {after[0]} to {', '.join(after[i] for i in left)} inside this group "
                "of ranks: the islands between have no rank in it",
                path=self.path,
            )
        return TopologyFile(self.path, tuple(kept), tuple(links), self.chunk_bytes, f"{self.digest}/{sorted(number)}")

    def rank_specs(self) -> list[RankSpec]:
        """Vendor and label of each rank, as HETCCL_RANKS would say them."""
        specs: dict[int, RankSpec] = {r: RankSpec(i.vendor, i.name) for i in self.islands for r in i.ranks}
        return [specs[r] for r in range(self.size)]

    def topology(self) -> Topology:
        """The topology of the cluster as described, for plans that nobody runs: libraries are taken to do all."""
        hosts, ids, islands = [""] * self.size, [""] * self.size, []
        for index, entry in enumerate(self.order):
            names = entry.hosts or (entry.name,) * len(entry.ranks)
            for rank, name in zip(entry.ranks, names, strict=True):
                hosts[rank] = ids[rank] = name
            island = Island(
                index, entry.ranks, entry.vendor, entry.name, entry.host_memory, True, SEGMENT_BYTES,
                (ALL_REDUCES,) * 19, ALL_DTYPES, ALL_CALLS,
            )  # fmt: skip
            islands.append(with_border(island, entry, dict(zip(entry.ranks, names, strict=True))))
        devices = [spec.vendor for spec in self.rank_specs()]
        return Topology(
            self.size, tuple(islands), self.chunk_bytes or CHUNK_BYTES, tuple(hosts), tuple(ids), tuple(devices),
            self.links, self.digest,
        )  # fmt: skip


def load_topology(path: str, sets: Sequence[str] = ()) -> TopologyFile:
    """Reads a topology file. `sets` override values: "islands.amd.rails=8". Raises `ConfigError` with file, line and
    column."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the topology file {path} cannot be read: {why}", path=path) from None
    if len(text) > MAX_FILE:
        raise ConfigError(f"the topology file {path} is larger than {MAX_FILE >> 20} MiB", path=path)
    return parse_topology(text, path, sets)


def parse_topology(text: str, path: str = "hetccl.yaml", sets: Sequence[str] = ()) -> TopologyFile:
    document = Document(path, text, KEYS, sets)
    top = document.mapping(document.root, "")
    entries = _islands(document, top["islands"].node)
    order = sorted(entries, key=lambda i: i.ranks[0])
    links = _links(document, top["links"].node if "links" in top else None, [i.name for i in order])
    chunk = top["chunk"].value if "chunk" in top else 0
    content = [_facts(i) for i in entries], [link.__dict__ for link in links], chunk
    digest = hashlib.sha256(repr(content).encode()).hexdigest()
    return TopologyFile(path, tuple(entries), tuple(links), chunk, digest)


def with_border(island: Island, entry: IslandEntry, hosts: dict[int, str]) -> Island:
    """The island with the border ranks, their speeds and the rates that the file gives it. `hosts`: of each rank."""
    border, why = choose_border(island.ranks, entry, hosts)
    return replace(
        island,
        border=border if border != island.ranks else (),
        speeds=_speeds(border, island.ranks, entry, hosts) or _known_speeds(border, island),
        latency=entry.latency,
        rails=entry.rails,
        inner_rate=entry.inner_rate or island.inner_rate,
        inner_latency=entry.inner_latency,
        border_why=why,
    )


def choose_border(ranks: Sequence[int], entry: IslandEntry, hosts: dict[int, str]) -> tuple[tuple[int, ...], str]:
    """Which ranks talk to other islands, and why these: those named; else as many as allowed, so that hosts and rails
    are shared by as few as possible, the fastest rails first."""
    if isinstance(entry.border, tuple):
        return entry.border, f"named in {entry.border_where}"
    if not entry.border or entry.border >= len(ranks):
        return tuple(ranks), "all ranks of the island"
    local = _local_numbers(ranks, hosts)
    names = list(dict.fromkeys(hosts[r] for r in ranks))
    rails = entry.rails or (0.0,) * len(ranks)

    def merit(rank: int) -> tuple[float, ...]:
        number, rail = divmod(local[rank], len(rails))
        return (number, -rails[rail], rail, names.index(hosts[rank]))

    chosen = tuple(sorted(sorted(ranks, key=merit)[: entry.border]))
    reason = "hosts in turn" + (", fastest rails first" if len(set(entry.rails)) > 1 else "")
    return chosen, f"border: {entry.border} in {entry.border_where}, {reason}"


def _known_speeds(border: Sequence[int], island: Island) -> tuple[float, ...]:
    """What the ranks say themselves of their speeds."""
    return tuple(island.speeds[island.ranks.index(r)] for r in border) if island.speeds else ()


def _local_numbers(ranks: Sequence[int], hosts: dict[int, str]) -> dict[int, int]:
    seen: dict[str, int] = {}
    numbers = {}
    for rank in ranks:
        numbers[rank] = seen.get(hosts[rank], 0)
        seen[hosts[rank]] = numbers[rank] + 1
    return numbers


def _speeds(
    border: Sequence[int], ranks: Sequence[int], entry: IslandEntry, hosts: dict[int, str]
) -> tuple[float, ...]:
    """Bytes a second of each border rank: of the rails that it has for itself, or its part of the one it shares. Rails
    go to a host's border ranks in turn, each first to the rank that is next to it."""
    if entry.measured:
        base = _rail_shares(border, ranks, entry, hosts) or (1.0,) * len(border)
        return tuple(entry.measured * b / sum(base) for b in base)
    return _rail_shares(border, ranks, entry, hosts)


def _rail_shares(
    border: Sequence[int], ranks: Sequence[int], entry: IslandEntry, hosts: dict[int, str]
) -> tuple[float, ...]:
    rails = entry.rails
    if not rails or not all(rails):
        return ()
    local = _local_numbers(ranks, hosts)
    speed = dict.fromkeys(border, 0.0)
    by_host: dict[str, list[int]] = {}
    for rank in border:
        by_host.setdefault(hosts[rank], []).append(rank)
    for mates in by_host.values():
        users: dict[int, list[int]] = {}
        for rank in mates:
            users.setdefault(local[rank] % len(rails), []).append(rank)
        for number, rail in enumerate(rails):
            sharing = users.get(number) or [mates[number % len(mates)]]
            for rank in sharing:
                speed[rank] += rail / len(sharing)
    return tuple(speed[rank] for rank in border)


def _islands(document: Document, node: Any) -> list[IslandEntry]:
    pairs = document.pairs(node, "islands")
    if not pairs:
        document.fail(node, "islands is empty; name at least one, as in gpu: {vendor: nccl, ranks: 8}")
    found = []
    for key, value in pairs:
        document.value(key, ISLAND_NAME, "islands")
        found.append((key, document.mapping(value, "islands.*", f"islands.{key.value}")))
    ranks = _ranks(document, node, found)
    return [_entry(document, key, keys, ranks[key.value]) for key, keys in found]


def _ranks(document: Document, node: Any, found: list[tuple[Any, dict[str, Found]]]) -> dict[str, tuple[int, ...]]:
    """Numbers of each island's ranks. A count takes the lowest numbers that no island names."""
    taken: dict[int, Any] = {}
    for _, keys in found:
        for rank, at in keys["ranks"].value if isinstance(keys["ranks"].value, list) else ():
            if rank in taken:
                document.fail(at, f"rank {rank} stands there twice, first in {document.where(taken[rank])}")
            taken[rank] = at
    size = sum(k["ranks"].value if isinstance(k["ranks"].value, int) else len(k["ranks"].value) for _, k in found)
    for rank, at in taken.items():
        if rank >= size:
            missing = next(r for r in range(size) if r not in taken)
            document.fail(
                at, f"rank {rank} is named, but the islands have {size} ranks together: rank {missing} is in no island"
            )
    free = iter(r for r in range(size) if r not in taken)
    ranks = {}
    for key, keys in found:
        value = keys["ranks"].value
        chosen = [next(free) for _ in range(value)] if isinstance(value, int) else [r for r, _ in value]
        ranks[key.value] = tuple(sorted(chosen))
    return ranks


def _entry(document: Document, key: Any, keys: dict[str, Found], ranks: tuple[int, ...]) -> IslandEntry:
    def get(name: str, default: Any) -> Any:
        return keys[name].value if name in keys else default

    hosts: Hosts = get("hosts", None)
    names: tuple[str, ...] = ()
    if hosts is not None:
        try:
            names = hosts.spread(key.value, len(ranks))
        except ValueError as error:
            document.fail(keys["hosts"].node, f"islands.{key.value}.hosts: {error}")
    border = get("border", 0)
    if isinstance(border, list):
        for rank, at in border:
            if rank not in ranks:
                document.fail(at, f"rank {rank} is not in island {key.value} (ranks {_runs(ranks)}), so not its border")
        border = tuple(sorted({rank for rank, _ in border}))
    rails, rate = get("rails", 0), get("rate", 0.0)
    if isinstance(rails, tuple) and rate:
        document.fail(
            keys["rate"].node, f"islands.{key.value}: rails gives each rail its rate already; leave one of them out"
        )
    cards = rails if isinstance(rails, tuple) else (rate,) * (rails or (1 if rate else 0))
    vendor = get("vendor", "")
    inside: dict[str, Found] = {}
    if "inside" in keys:
        inside = document.mapping(keys["inside"].node, "islands.*.inside", f"islands.{key.value}.inside")
    return IslandEntry(
        key.value, vendor, ranks, names, bool(hosts and hosts.names), border, cards, get("latency", 0.0),
        inside["rate"].value if "rate" in inside else 0.0, inside["latency"].value if "latency" in inside else 0.0,
        get("measured", 0.0), get("memory", ""), document.where(key),
        document.where(keys["border"].node) if "border" in keys else "",
    )  # fmt: skip


def _links(document: Document, node: Any, names: list[str]) -> list[IslandLink]:
    if node is None:
        return []
    links: list[IslandLink] = []
    where: list[str] = []
    for number, item in enumerate(document.items(node, "links")):
        keys = document.mapping(item, "links[]", f"links[{number}]")
        ends = []
        for name, at in keys["between"].value:
            if name not in names:
                document.fail(at, f"there is no island {name!r}; there are {', '.join(names)}")
            ends.append(names.index(name))
        a, b = sorted(ends)
        if a == b:
            document.fail(keys["between"].node, f"a link is between two islands, not between {names[a]} and itself")
        for other, place in zip(links, where, strict=True):
            if (other.a, other.b) == (a, b):
                document.fail(item, f"the link between {names[a]} and {names[b]} stands there twice, first in {place}")
        rate = keys["rate"].value if "rate" in keys else 0.0
        measured = keys["measured"].value if "measured" in keys else 0.0
        if rate is None and (measured or "latency" in keys):
            document.fail(
                item, f"there is no way between {names[a]} and {names[b]} (rate: none), so nothing to measure"
            )
        latency = keys["latency"].value if "latency" in keys else 0.0
        links.append(IslandLink(a, b, rate is not None, measured or rate or 0.0, latency))
        where.append(document.where(item))
    _connected(document, node, links, names)
    return links


def _connected(document: Document, node: Any, links: list[IslandLink], names: list[str]) -> None:
    """Every island must be reached from the first, over others if need be."""
    left = apart([link for link in links if not link.direct], len(names))
    if left:
        document.fail(
            node, f"no way leads from {names[0]} to {', '.join(names[i] for i in left)}, not even over other islands"
        )


def apart(missing: Sequence[IslandLink], n: int) -> list[int]:
    """Islands that no way leads to from the first."""
    pairs = {(link.a, link.b) for link in missing}
    reached, fresh = {0}, [0]
    while fresh:
        here = fresh.pop()
        for other in range(n):
            if other not in reached and (min(here, other), max(here, other)) not in pairs:
                reached.add(other)
                fresh.append(other)
    return [i for i in range(n) if i not in reached]


def _facts(entry: IslandEntry) -> tuple[Any, ...]:
    return tuple(value for name, value in entry.__dict__.items() if name not in ("where", "border_where"))


def _runs(ranks: Sequence[int]) -> str:
    """ "0-3, 6" """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
