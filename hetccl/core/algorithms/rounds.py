# SPDX-License-Identifier: Apache-2.0
"""Schedules of islands: in which round who sends whose part to whom. An all_gather reads a schedule forwards, a
reduce_scatter backwards (`reversed_rounds`); an all_reduce does both, one after the other.

Parts are numbered by the island that they come from or end in. Rounds follow each other on the border lane, so what
travels in one is complete before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetccl.core.plan import Slice
from hetccl.core.topology import Topology

__all__ = ["Round", "Schedule", "carrier", "blocks_slice", "my_pieces", "reversed_rounds", "ring", "runs", "star", "tree"]


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
    """The rank of an island that carries the block of `rank`, which may be of another island: equal shares of the way
    from first to last, so that two carriers of one block are always linked."""
    home, index = topology.place(rank)
    ranks = topology.islands[island].ranks
    return ranks[index * len(ranks) // topology.islands[home].size]


def my_pieces(topology: Topology, units: int, island: int, index: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """The pieces of one rank's shard: (first unit, last unit, the holder in each island), cut wherever the shards of
    some island end."""
    width = units // topology.islands[island].size
    first, last = index * width, (index + 1) * width
    cuts = {first, last}
    for step in {units // i.size for i in topology.islands}:
        cuts.update(range(-(-first // step) * step, last, step))
    ends = sorted(cuts)
    return [
        (lo, hi, tuple(i.ranks[lo // (units // i.size)] for i in topology.islands))
        for lo, hi in zip(ends, ends[1:], strict=False)
    ]


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
