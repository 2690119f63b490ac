# SPDX-License-Identifier: Apache-2.0
"""Groups of an island's ranks that have a vendor communicator of their own: the border communicators of design D4.

A group has as many ranks as there are contributions to combine, so that every rank passes a real one and no operator
needs a neutral element. A pure function of the topology: all ranks know all groups and their numbers.
"""

from __future__ import annotations

from hetccl.core.topology import Island

__all__ = ["group_for", "groups_of"]


def groups_of(size: int, islands: int) -> tuple[tuple[int, ...], ...]:
    """Island ranks of each group of an island of `size` ranks, one of `islands`. Group 0 is the whole island. Then come
    pairs, and groups of one rank an island, where these are less than all: side by side, the last one moved back so
    that it is full."""
    found = [tuple(range(size))]
    for width in sorted({2, islands}):
        if 2 <= width < size:
            starts = [*range(0, size - width, width), size - width]
            found += [tuple(range(start, start + width)) for start in starts]
    return tuple(found)


def group_for(island: Island, islands: int, contributions: int, owner: int) -> tuple[int, tuple[int, ...]]:
    """(number, island ranks) of the group in which island rank `owner` combines: one rank a contribution, or a pair
    where the island has fewer ranks than that. The number is 0 where the library can make no communicator of a part
    of the island: then all ranks call, and those outside the group pass neutral elements."""
    width = contributions if contributions in (2, islands) and contributions <= island.size else 2
    groups = groups_of(island.size, islands)
    start = min(owner // width * width, island.size - width)
    members = tuple(range(start, start + width))
    return (groups.index(members) if island.splits or width == island.size else 0), members
