# SPDX-License-Identifier: Apache-2.0
"""What every operation promises, in one place: the caller's buffers, what each output element must be, and the least
bytes that must cross the border. A new operation needs one entry in `SPECS` and nothing else here.

Elements are counted as in `Communicator.run`: `count` is of the whole buffer (all_reduce, broadcast, reduce) or of one
rank's block (all others).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from hetccl.core.topology import Topology
from hetccl.types import Op

__all__ = ["SPECS", "Bound", "Need", "OpSpec", "spec_of"]

REDUCED = -1


class Need(NamedTuple):
    """Output elements [lo, hi) must be the input of rank `source`, or (REDUCED) the operator over all ranks' inputs
    once each; element lo is input element `at`."""

    lo: int
    hi: int
    source: int
    at: int


@dataclass(frozen=True)
class Bound:
    """Elements that may cross: in all, and out of and into each island ("most through one island")."""

    total: int
    out: dict[int, int] = field(default_factory=dict)
    into: dict[int, int] = field(default_factory=dict)


Blocks = Callable[[int, int, int], int]  # (size, rank, root) -> buffer length in counts


@dataclass(frozen=True)
class OpSpec:
    in_blocks: Blocks
    out_blocks: Blocks
    needs: Callable[[int, int, int, int], list[Need]]  # (size, rank, root, count)
    bound: Callable[[Topology, int, int], Bound]  # bandwidth class: (topology, root, count)
    reduces: bool = False
    # In place: where input and output lie in one memory, in counts: (size, rank, root) -> (input, output). None: the
    # caller cannot pass one memory for both.
    in_place: Callable[[int, int, int], tuple[int, int]] | None = None
    one_buffer: bool = False  # the output holds the input (broadcast)


def spec_of(op: Op) -> OpSpec:
    return SPECS[op.label]


def one(size: int, rank: int, root: int) -> int:
    return 1


def each(size: int, rank: int, root: int) -> int:
    return size


def one_at_root(size: int, rank: int, root: int) -> int:
    return int(rank == root)


def each_at_root(size: int, rank: int, root: int) -> int:
    return size if rank == root else 0


def outside(topology: Topology, island: int) -> int:
    """Ranks that are not in an island."""
    return topology.size - topology.islands[island].size


def everywhere(elements: int, topology: Topology) -> dict[int, int]:
    return {i.index: elements for i in topology.islands}


def per_island(topology: Topology, elements: Callable[[int], int]) -> dict[int, int]:
    return {i.index: elements(i.index) for i in topology.islands}


def rooted(topology: Topology, root: int, count: int, inwards: bool) -> Bound:
    """gather and scatter: everything enters or leaves the root's island once."""
    island = topology.place(root)[0]
    total = outside(topology, island) * count
    mine = per_island(topology, lambda c: total if c == island else 0)
    others = per_island(topology, lambda c: 0 if c == island else topology.islands[c].size * count)
    return Bound(total, others, mine) if inwards else Bound(total, mine, others)


def all_to_all_bound(topology: Topology, root: int, count: int) -> Bound:
    through = per_island(topology, lambda c: topology.islands[c].size * outside(topology, c) * count)
    return Bound(sum(through.values()), through, through)


def others(topology: Topology) -> int:
    return len(topology.islands) - 1


SPECS: dict[str, OpSpec] = {
    # shares of the owners come on top: see bounds.py
    "all_reduce": OpSpec(
        one, one,
        lambda n, r, root, count: [Need(0, count, REDUCED, 0)],
        lambda t, root, count: Bound(2 * others(t) * count),
        reduces=True, in_place=lambda n, r, root: (0, 0),
    ),
    "broadcast": OpSpec(
        one_at_root, one,
        lambda n, r, root, count: [Need(0, count, root, 0)],
        lambda t, root, count: Bound(others(t) * count, everywhere(count, t), everywhere(count, t)),
        one_buffer=True,
    ),
    "all_gather": OpSpec(
        one, each,
        lambda n, r, root, count: [Need(q * count, (q + 1) * count, q, 0) for q in range(n)],
        lambda t, root, count: Bound(
            others(t) * t.size * count, into=per_island(t, lambda c: outside(t, c) * count)
        ),
        in_place=lambda n, r, root: (r, 0),
    ),
    "reduce_scatter": OpSpec(
        each, one,
        lambda n, r, root, count: [Need(0, count, REDUCED, r * count)],
        lambda t, root, count: Bound(
            others(t) * t.size * count, out=per_island(t, lambda c: outside(t, c) * count)
        ),
        reduces=True, in_place=lambda n, r, root: (0, r),
    ),
    "reduce": OpSpec(
        one, one_at_root,
        lambda n, r, root, count: [Need(0, count, REDUCED, 0)] if r == root else [],
        lambda t, root, count: Bound(others(t) * count, everywhere(count, t), everywhere(count, t)),
        reduces=True, in_place=lambda n, r, root: (0, 0),
    ),
    "gather": OpSpec(
        one, each_at_root,
        lambda n, r, root, count: [Need(q * count, (q + 1) * count, q, 0) for q in range(n)] if r == root else [],
        lambda t, root, count: rooted(t, root, count, inwards=True),
        in_place=lambda n, r, root: (r if r == root else 0, 0),
    ),
    "scatter": OpSpec(
        each_at_root, one,
        lambda n, r, root, count: [Need(0, count, root, r * count)],
        lambda t, root, count: rooted(t, root, count, inwards=False),
        in_place=lambda n, r, root: (0, r if r == root else 0),
    ),
    "all_to_all": OpSpec(
        each, each,
        lambda n, r, root, count: [Need(q * count, (q + 1) * count, q, r * count) for q in range(n)],
        all_to_all_bound,
    ),
}  # fmt: skip
