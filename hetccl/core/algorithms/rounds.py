# SPDX-License-Identifier: Apache-2.0
"""Schedules of islands: in which round who sends whose part to whom. An all_gather reads a schedule forwards, a
reduce_scatter backwards (`reversed_rounds`); an all_reduce does both, one after the other.

Parts are numbered by the island that they come from or end in. Rounds follow each other on the border lane, so what
travels in one is complete before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetccl.core.algorithms.common import Shared
from hetccl.core.plan import Slice
from hetccl.core.topology import Topology
from hetccl.errors import UnsupportedError

__all__ = [
    "Round",
    "Schedule",
    "blocks_slice",
    "carrier",
    "need_all_at_border",
    "need_mesh",
    "pieces_of",
    "reversed_rounds",
    "ring",
    "runs",
    "side_by_side",
    "star",
    "tree",
]


@dataclass(frozen=True)
class Round:
    """What one island does: parts that it sends to, and gets from, other islands."""

    sends: tuple[tuple[int, tuple[int, ...]], ...]
    receives: tuple[tuple[int, tuple[int, ...]], ...]


Schedule = Callable[[int, int], list[Round]]  # (island, islands) -> its rounds in an all_gather


def star(island: int, islands: int) -> list[Round]:
    """One round: everybody sends its part to everybody."""
    others = [i for i in range(islands) if i != island]
    return [Round(tuple((i, (island,)) for i in others), tuple((i, (i,)) for i in others))]


def ring(island: int, islands: int) -> list[Round]:
    """C-1 rounds: each island passes on to the next what it got from the one before."""
    after, before = (island + 1) % islands, (island - 1) % islands
    return [
        Round(((after, ((island - t) % islands,)),), ((before, ((before - t) % islands,)),)) for t in range(islands - 1)
    ]


def tree(island: int, islands: int) -> list[Round]:
    """ceil(log2 C) rounds: all that an island holds goes to the island 1, 2, 4, ... further on, so that every part
    travels along a binomial tree."""
    rounds, far = [], 1
    while far < islands:
        n = min(far, islands - far)
        to, source = (island + far) % islands, (island - far) % islands
        sent = tuple((island - j) % islands for j in range(n))
        got = tuple((source - j) % islands for j in range(n))
        rounds.append(Round(((to, sent),), ((source, got),)))
        far *= 2
    return rounds


def reversed_rounds(schedule: Schedule, island: int, islands: int) -> list[Round]:
    """The same backwards: where an all_gather brings a part, a reduce_scatter fetches a partial of it."""
    return [Round(r.receives, r.sends) for r in reversed(schedule(island, islands))]


def carrier(topology: Topology, island: int, rank: int) -> int:
    """The border rank of an island that carries the block of `rank`, which may be of another: the one in whose shard
    the shard of the rank itself begins, so that any two carriers of one block are linked."""
    return topology.border.shard_carriers(island, topology.place(rank)[0])[rank]


def side_by_side(topology: Topology, island: int, other: int) -> bool:
    """Whether the blocks of island `other` lie side by side and each rank of `island` carries the one that a vendor's
    all_gather or reduce_scatter gives it."""
    ours, theirs = topology.islands[island].ranks, topology.islands[other]
    if theirs.size != len(ours) or not theirs.contiguous:
        return False
    carriers = topology.border.shard_carriers(island, other)
    return all(carriers[r] == ours[k] for k, r in enumerate(theirs.ranks))


def pieces_of(topology: Topology, rank: int, scale: int = 1) -> list[tuple[int, int, tuple[int, ...]]]:
    """The pieces of one border rank's shard: (first unit, last unit, who holds it in each island)."""
    return [(lo * scale, hi * scale, who) for lo, hi, who in topology.border.pieces_of(rank)]


def need_mesh(topology: Topology, shared: Shared, name: str) -> None:
    """Raises `UnsupportedError` where some islands have no direct link."""
    if not topology.border.mesh:
        raise UnsupportedError(
            f"{shared.op.label} by {name}: some islands have no direct link; choose another algorithm with "
            "HETCCL_ALGORITHM, or leave the choice to hetccl"
        )


def need_all_at_border(topology: Topology, shared: Shared, name: str) -> None:
    """Raises `UnsupportedError` where ranks may not talk to other islands."""
    need_mesh(topology, shared, name)
    if any(i.border for i in topology.islands):
        raise UnsupportedError(
            f"{shared.op.label} by {name}: some ranks are not at the border, so they cannot carry their blocks; choose "
            "another algorithm with HETCCL_ALGORITHM, or leave the choice to hetccl"
        )


def runs(ranks: tuple[int, ...], mergeable: bool) -> list[tuple[int, int]]:
    """(first rank, how many) of ranks that follow each other; one by one where blocks cannot be merged."""
    found: list[tuple[int, int]] = []
    for r in ranks:
        if mergeable and found and sum(found[-1]) == r:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((r, 1))
    return found


def blocks_slice(buffer: int, first: int, n: int) -> Slice:
    """n whole blocks that follow each other; only where a message is one segment."""
    return Slice(buffer, first, 0, 0, n, n)
