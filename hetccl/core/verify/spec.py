# SPDX-License-Identifier: Apache-2.0
"""What every operation promises, in one place: which blocks the caller's buffers hold, what each output block must be,
and the least bytes that must cross the border. A new operation needs one entry in `SPECS` and nothing else here.

Blocks have numbers, as in `Blocks` of the algorithms: block r belongs to rank r, in all_to_all block i * n + j goes
from rank i to rank j, and operations on a whole buffer have only block 0. Blocks are equally long, or, in the v forms,
as long as `Shared.counts` says and where `Places` puts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetccl.core.algorithms.blocks import packed
from hetccl.core.algorithms.common import Places, Shared
from hetccl.core.topology import Topology
from hetccl.types import Op

__all__ = ["SPECS", "Bound", "Need", "OpSpec", "Sizes", "spec_of"]

REDUCED = -1


class Need(NamedTuple):
    """The block at `place` of the output must be the block at place `at` of rank `source`'s input, or (REDUCED) the
    operator over the blocks at that place of all ranks' inputs, once each."""

    place: int
    source: int
    at: int


@dataclass(frozen=True)
class Bound:
    """Elements that may cross: in all, and out of and into each island ("most through one island")."""

    total: int
    out: dict[int, int] = field(default_factory=dict)
    into: dict[int, int] = field(default_factory=dict)


Held = Callable[[int, int, int], Sequence[int]]  # (size, rank, root) -> the blocks that a buffer holds, in order
Length = Callable[[int], int]  # of a block, in elements


@dataclass(frozen=True)
class OpSpec:
    inputs: Held
    outputs: Held
    needs: Callable[[int, int, int], list[Need]]  # (size, rank, root)
    bound: Callable[[Topology, int, Length], Bound]  # bandwidth class: (topology, root, length of a block)
    reduces: bool = False
    # In place: (size, rank, root) -> (output lies in the input, at this place of it), or the other way round. None: the
    # caller cannot pass one memory for both.
    in_place: Callable[[int, int, int], tuple[bool, int]] | None = None
    one_buffer: bool = False  # the output holds the input (broadcast)


def spec_of(op: Op) -> OpSpec:
    return SPECS[op.label]


class Sizes:
    """How long the blocks of one operation are, and where they lie in each rank's buffers."""

    def __init__(self, shared: Shared, n: int, count: int, places: Sequence[Places] = ()) -> None:
        self.spec, self.n, self.root, self.count, self.counts = spec_of(shared.op), n, shared.root, count, shared.counts
        self._places: Sequence[Places] = ()
        if shared.counts:
            self._places = places or [packed(shared, rank, n) for rank in range(n)]

    def length(self, block: int) -> int:
        return self.counts[block] if self.counts else self.count

    def held(self, rank: int, out: bool) -> Sequence[int]:
        return (self.spec.outputs if out else self.spec.inputs)(self.n, rank, self.root)

    def start(self, rank: int, out: bool, place: int) -> int:
        """The first element of the block at a place of a buffer."""
        if not self.counts:
            return place * self.count
        found = self._places[rank]
        return (found.outputs if out else found.inputs)[place]

    def blocks(self, rank: int, out: bool) -> list[tuple[int, int]]:
        """(first, last and one) element of each block of a buffer, in the order of places."""
        starts = [self.start(rank, out, place) for place in range(len(self.held(rank, out)))]
        return [(lo, lo + self.length(b)) for lo, b in zip(starts, self.held(rank, out), strict=True)]

    def extent(self, rank: int, out: bool) -> int:
        """Elements from the beginning of a buffer to the end of its last block."""
        return max((hi for _, hi in self.blocks(rank, out)), default=0)

    def in_place(self, rank: int) -> tuple[int, int]:
        """Where input and output begin in their common memory."""
        if self.spec.in_place is None:
            return 0, 0
        inside_input, place = self.spec.in_place(self.n, rank, self.root)
        at = self.start(rank, not inside_input, place)
        return (0, at) if inside_input else (at, 0)


def one(size: int, rank: int, root: int) -> Sequence[int]:
    return (0,)


def own(size: int, rank: int, root: int) -> Sequence[int]:
    return (rank,)


def each(size: int, rank: int, root: int) -> Sequence[int]:
    return range(size)


def at_root(held: Held) -> Held:
    return lambda size, rank, root: held(size, rank, root) if rank == root else ()


def far(topology: Topology, island: int) -> list[int]:
    """Ranks that are not in an island."""
    return [r for r in range(topology.size) if topology.place(r)[0] != island]


def per_island(topology: Topology, elements: Callable[[int], int]) -> dict[int, int]:
    return {i.index: elements(i.index) for i in topology.islands}


def others(topology: Topology) -> int:
    return len(topology.islands) - 1


def everywhere(topology: Topology, root: int, length: Length) -> Bound:
    """broadcast and reduce: the whole buffer enters or leaves every island but one, and goes through each once; where
    links are missing, as often as the tree with the fewest branches wants."""
    parents = topology.border.chain(topology.place(root)[0])
    through = per_island(topology, lambda c: max(1, parents.count(c)) * length(0))
    return Bound(others(topology) * length(0), through, through)


def from_all(topology: Topology, length: Length, inwards: bool) -> Bound:
    """all_gather and reduce_scatter: every block enters, or its partials leave, every island but its own."""
    total = others(topology) * sum(length(r) for r in range(topology.size))
    through = per_island(topology, lambda c: sum(length(r) for r in far(topology, c)))
    return Bound(total, into=through) if inwards else Bound(total, out=through)


def rooted(topology: Topology, root: int, length: Length, inwards: bool) -> Bound:
    """gather and scatter: everything enters or leaves the root's island once."""
    ranks = far(topology, topology.place(root)[0])
    return carried(topology, [((r, root) if inwards else (root, r), length(r)) for r in ranks])


def of_pairs(topology: Topology, root: int, length: Length) -> Bound:
    """all_to_all: each pair's block once, if its ranks are in different islands."""
    n = topology.size
    pairs = [(i, j) for i in range(n) for j in far(topology, topology.place(i)[0])]
    return carried(topology, [((i, j), length(i * n + j)) for i, j in pairs])


def carried(topology: Topology, blocks: Sequence[tuple[tuple[int, int], int]]) -> Bound:
    """Blocks ((from, to), length) that go their ways alone: once over every link on the shortest way."""
    out, into = per_island(topology, lambda c: 0), per_island(topology, lambda c: 0)
    for (source, target), n in blocks:
        here, goal = topology.place(source)[0], topology.place(target)[0]
        while here != goal:
            out[here] += n
            here = topology.border.parent(here, goal)
            into[here] += n
    return Bound(sum(out.values()), out, into)


SPECS: dict[str, OpSpec] = {
    # shares of the owners come on top: see bounds.py
    "all_reduce": OpSpec(
        one, one,
        lambda n, r, root: [Need(0, REDUCED, 0)],
        lambda t, root, length: Bound(2 * others(t) * length(0)),
        reduces=True, in_place=lambda n, r, root: (False, 0),
    ),
    "broadcast": OpSpec(
        at_root(one), one,
        lambda n, r, root: [Need(0, root, 0)],
        everywhere,
        one_buffer=True,
    ),
    "all_gather": OpSpec(
        own, each,
        lambda n, r, root: [Need(q, q, 0) for q in range(n)],
        lambda t, root, length: from_all(t, length, inwards=True),
        in_place=lambda n, r, root: (False, r),
    ),
    "reduce_scatter": OpSpec(
        each, own,
        lambda n, r, root: [Need(0, REDUCED, r)],
        lambda t, root, length: from_all(t, length, inwards=False),
        reduces=True, in_place=lambda n, r, root: (True, r),
    ),
    "reduce": OpSpec(
        one, at_root(one),
        lambda n, r, root: [Need(0, REDUCED, 0)] if r == root else [],
        everywhere,
        reduces=True, in_place=lambda n, r, root: (False, 0),
    ),
    "gather": OpSpec(
        own, at_root(each),
        lambda n, r, root: [Need(q, q, 0) for q in range(n)] if r == root else [],
        lambda t, root, length: rooted(t, root, length, inwards=True),
        in_place=lambda n, r, root: (False, r if r == root else 0),
    ),
    "scatter": OpSpec(
        at_root(each), own,
        lambda n, r, root: [Need(0, root, r)],
        lambda t, root, length: rooted(t, root, length, inwards=False),
        in_place=lambda n, r, root: (True, r if r == root else 0),
    ),
    "all_to_all": OpSpec(
        lambda n, r, root: range(r * n, (r + 1) * n),
        lambda n, r, root: range(r, n * n, n),
        lambda n, r, root: [Need(q, q, r) for q in range(n)],
        of_pairs,
    ),
}  # fmt: skip
