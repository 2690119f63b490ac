# SPDX-License-Identifier: Apache-2.0
"""A topology file in a running job: which vendor a rank is, and whether those that joined are what the file says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetccl.core.ranks import RankSpec, check_size, format_ranks
from hetccl.core.topology import Record, Topology
from hetccl.core.topology_file import IslandEntry, TopologyFile, load_topology, with_border
from hetccl.errors import ConfigError

__all__ = ["apply", "labelled", "rank_specs", "read"]


def read(topology: str | TopologyFile | None, config_path: str) -> TopologyFile | None:
    """The file that a communicator was given, or HETCCL_TOPOLOGY names."""
    if isinstance(topology, TopologyFile):
        return topology
    path = topology or config_path
    return load_topology(path) if path else None


def rank_specs(file: TopologyFile, named: Sequence[RankSpec] | None, size: int) -> list[RankSpec]:
    """What each rank is. Raises `ConfigError` if HETCCL_RANKS (`named`) says otherwise, or the job has another size."""
    specs = file.rank_specs()
    if len(specs) != size:
        raise ConfigError(
            f"{file.path} describes {len(specs)} ranks, but the job has {size} (WORLD_SIZE). Start {len(specs)} ranks "
            "or change the islands' ranks",
            path=file.path,
        )
    if named is not None:
        check_size(list(named), size)
        for rank, (one, other) in enumerate(zip(specs, named, strict=True)):
            if one.vendor != other.vendor or (other.label and one.label != other.label):
                raise ConfigError(
                    f"{file.island_of(rank).where}: rank {rank} is {one} in {file.path}, but {other} in "
                    f"HETCCL_RANKS={format_ranks(named)}. Leave one of them out",
                    path=file.path,
                )
    return specs


def labelled(file: TopologyFile, records: Sequence[Record]) -> list[Record]:
    """Rank 0: the records with the islands' names as labels, once they have been compared with the file. Raises
    `ConfigError` with the file's line where a rank is not what it says."""
    different = [r.rank for r in records if r.topology not in ("", file.digest)]
    if different:
        raise ConfigError(
            f"ranks {different} have another topology file than rank 0 ({file.path}): use the same everywhere, or give "
            "it to rank 0 alone",
            path=file.path,
        )
    rank_specs(file, None, len(records))
    found = []
    for record in records:
        entry = file.island_of(record.rank)
        if record.vendor != entry.vendor:
            raise ConfigError(
                f"{entry.where}: island {entry.name} is of vendor {entry.vendor}, but its rank {record.rank} on "
                f"{record.host} runs {record.vendor}",
                path=file.path,
            )
        if entry.memory and record.host_memory != (entry.memory == "host"):
            raise ConfigError(
                f"{entry.where}: island {entry.name} has {entry.memory} memory in {file.path}, but rank {record.rank} "
                f"({record.vendor}) has {'host' if record.host_memory else 'device'} memory",
                path=file.path,
            )
        found.append(replace(record, label=entry.name))
    return found


def apply(file: TopologyFile, topology: Topology, records: Sequence[Record]) -> Topology:
    """The topology that was found, with the borders, rails and links of the file. Raises `ConfigError` where islands or
    hosts are not as the file says."""
    islands = []
    for entry, island in zip(file.order, topology.islands, strict=False):
        if entry.ranks != island.ranks:
            raise ConfigError(
                f"{entry.where}: island {entry.name} cannot be one island: {_apart(entry, records)}", path=file.path
            )
        _check_hosts(file, entry, records)
        hosts = {rank: records[rank].host_id for rank in entry.ranks}
        islands.append(with_border(island, entry, hosts))
    chunk = min(topology.chunk_bytes, file.chunk_bytes or topology.chunk_bytes)
    return replace(topology, islands=tuple(islands), links=file.links, chunk_bytes=chunk, source=file.digest)


def _apart(entry: IslandEntry, records: Sequence[Record]) -> str:
    first = records[entry.ranks[0]]
    for rank in entry.ranks:
        if records[rank].island_key != first.island_key:
            return (
                f"the libraries of rank {first.rank} ({' '.join(first.island_key)}) and rank {rank} "
                f"({' '.join(records[rank].island_key)}) do not make one communicator; write two islands"
            )
    return f"a communicator of {entry.vendor} holds {first.max_island} ranks at most; write several islands"


def _check_hosts(file: TopologyFile, entry: IslandEntry, records: Sequence[Record]) -> None:
    if not entry.hosts:
        return
    written = dict(zip(entry.ranks, entry.hosts, strict=True))
    found: dict[int, Record] = {}
    for rank in entry.ranks:
        record = records[rank]
        if entry.named_hosts and written[rank] != record.host:
            raise ConfigError(
                f"{entry.where}: rank {rank} of island {entry.name} is on host {record.host}, not on {written[rank]}",
                path=file.path,
            )
        for other in found:  # two ranks share a host here just where they share one there
            if (written[other] == written[rank]) != (records[other].host_id == record.host_id):
                together = "share a host" if records[other].host_id == record.host_id else "are on different hosts"
                raise ConfigError(
                    f"{entry.where}: ranks {other} and {rank} of island {entry.name} {together}, unlike in {file.path} "
                    f"({written[other]} and {written[rank]})",
                    path=file.path,
                )
        found[rank] = record
