# SPDX-License-Identifier: Apache-2.0
"""Topologies and classes of operation for the tests of the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetccl.core.algorithms.all_reduce_star import hub_of
from hetccl.core.algorithms.common import Places, Shared
from hetccl.core.plan import Plan
from hetccl.core.planner import ALGORITHMS
from hetccl.core.topology import Island, Topology
from hetccl.core.ways import Ways
from hetccl.errors import UnsupportedError
from hetccl.types import DType, Op, RedOp

REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
ROOTED = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
UNEVEN = (Op.ALL_GATHER, Op.GATHER, Op.SCATTER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL)  # those with v forms


def topology(
    islands: Sequence[Sequence[int]], device: Sequence[int] = (), poor: Sequence[int] = (),
    segment_bytes: int = 1 << 20, lacking: Sequence[int] = (), plain: Sequence[int] = (),
) -> Topology:  # fmt: skip
    """Islands by their ranks; those in `device` have memory of their own, those in `poor` a library that cannot
    reduce or move anything but bytes; that of those in `lacking` has neither all_to_all nor send and receive, and
    devices of those in `plain` have no kernels."""
    ordered = sorted((tuple(sorted(i)) for i in islands), key=lambda ranks: ranks[0])
    return Topology(
        sum(len(i) for i in ordered),
        tuple(
            Island(
                index, ranks, "dev" if index in device else "cpu", "", index not in device, index not in plain,
                segment_bytes, (0 if index in poor else 0x1FF,) * 32, 0 if index in poor else (1 << 32) - 1,
                0 if index in poor else 4 if index in lacking else 15 if index % 2 else 11,
            )
            for index, ranks in enumerate(ordered)
        ),
        1 << 20,
    )  # fmt: skip


def algorithms(op: Op, top: Topology) -> list[str]:
    if len(top.islands) == 1:  # nothing crosses a border, so there is nothing to choose: as in planner.py
        return ["island"] if op == Op.ALL_REDUCE else [next(iter(ALGORITHMS[op]))]
    return able(op, top)


def able(op: Op, top: Topology) -> list[str]:
    """Algorithms that take any topology, and a star where this one has a hub."""
    return sorted(name for name in ALGORITHMS[op] if name != "star" or hub_of(top))


def starry(hub: Sequence[int], others: Sequence[Sequence[int]], **more: Sequence[int]) -> Topology:
    """An island of devices on the direct path, and ranks in host memory around it."""
    islands = sorted([sorted(hub), *(sorted(o) for o in others)])
    top = topology(islands, device=[islands.index(sorted(hub))], **more)
    return replace(top, islands=tuple(replace(i, direct=not i.host_memory) for i in top.islands), _place={})


def by_border(top: Topology, shared: Shared, algorithm: str) -> bool:
    """Whether a border communicator can combine in an algorithm ("owners+border")."""
    if len(top.islands) == 1:
        return False
    ways = Ways(top, "border")
    try:
        ways.apply(ALGORITHMS[shared.op][algorithm], shared)
    except UnsupportedError:
        return False
    return not ways.fits(ALGORITHMS[shared.op][algorithm], shared)


def plans(top: Topology, shared: Shared, algorithm: str) -> list[Plan]:
    from hetccl.core.algorithms import all_reduce

    name, _, border = algorithm.partition("+")
    make = all_reduce.island if algorithm == "island" else ALGORITHMS[shared.op][name]
    if border:
        make = Ways(top, "border").apply(make, shared)
    places = places_of(top, shared) or [None] * top.size
    return [make(top, shared, rank, places[rank]) for rank in range(top.size)]


def places_of(top: Topology, shared: Shared) -> list[Places]:
    """Where the blocks of a v form lie: the even ranks have theirs packed, the odd ones backwards and with gaps."""
    if not shared.counts:
        return []
    found = []
    for rank in range(top.size):
        of = [held(shared, rank, top.size, out) for out in (False, True)]
        found.append(Places(*(_spread([shared.counts[b] for b in blocks], rank % 2 == 1) for blocks in of)))
    return found


def _spread(lengths: list[int], apart: bool) -> tuple[int, ...]:
    starts, at = [0] * len(lengths), 0
    for i in reversed(range(len(lengths))) if apart else range(len(lengths)):
        starts[i] = at
        at += lengths[i] + (i % 3 if apart else 0)
    return tuple(starts)


def held(shared: Shared, rank: int, n: int, out: bool) -> list[int]:
    """The blocks of a rank's input or output, in order; for the root, where the others have none."""
    if shared.op == Op.ALL_TO_ALL:
        return [q * n + rank if out else rank * n + q for q in range(n)]
    many = (Op.ALL_GATHER, Op.GATHER) if out else (Op.REDUCE_SCATTER, Op.SCATTER)
    if shared.op in many:
        return list(range(n))
    return [rank] if shared.op in UNEVEN else [0]


def ragged(shared: Shared, n: int, seed: int = 0) -> Shared:
    """The v form of a class, with blocks of 0 to 6 elements; a longest one is there always."""
    pairs = n * n if shared.op == Op.ALL_TO_ALL else n
    counts = tuple((i * i + i // n + seed) * 7 % 11 % 7 for i in range(pairs - 1))
    return replace(shared, counts=(*counts, 6))


def classes(
    top: Topology, redops: Sequence[RedOp] = (RedOp.SUM,), dtype: DType = DType.FLOAT32
) -> list[tuple[Shared, str]]:
    """(class, algorithm) of all operations on a topology, roots first and last, and their v forms."""
    found = []
    for op in ALGORITHMS:
        roots = sorted({0, top.size - 1, top.size // 2}) if op in ROOTED else [0]
        for root in roots:
            for redop in redops if op in REDUCING else (RedOp.SUM,):
                for algorithm in algorithms(op, top):
                    shared = Shared(op, dtype, redop, root)
                    found.append((shared, algorithm))
                    if op in REDUCING and by_border(top, shared, algorithm):
                        found.append((shared, algorithm + "+border"))
    return found + [
        (ragged(shared, top.size, i), algorithm) for i, (shared, algorithm) in enumerate(found) if shared.op in UNEVEN
    ]
