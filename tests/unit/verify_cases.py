# SPDX-License-Identifier: Apache-2.0
"""Topologies and classes of operation for the tests of the verifier."""

from __future__ import annotations

from collections.abc import Sequence

from hetccl.core.algorithms.common import Shared
from hetccl.core.plan import Plan
from hetccl.core.planner import ALGORITHMS
from hetccl.core.topology import Island, Topology
from hetccl.types import DType, Op, RedOp

REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)


def topology(
    islands: Sequence[Sequence[int]], device: Sequence[int] = (), poor: Sequence[int] = (), segment_bytes: int = 1 << 20
) -> Topology:
    """Islands by their ranks; those in `device` have memory of their own, those in `poor` a library that cannot
    reduce or move anything but bytes."""
    ordered = sorted((tuple(sorted(i)) for i in islands), key=lambda ranks: ranks[0])
    return Topology(
        sum(len(i) for i in ordered),
        tuple(
            Island(
                index, ranks, "dev" if index in device else "cpu", "", index not in device, True, segment_bytes,
                (0 if index in poor else 0x1FF,) * 32, 0 if index in poor else (1 << 32) - 1,
            )
            for index, ranks in enumerate(ordered)
        ),
        1 << 20,
    )  # fmt: skip


def algorithms(op: Op, islands: int) -> list[str]:
    if op == Op.ALL_REDUCE and islands == 1:
        return ["island"]
    return sorted(ALGORITHMS[op])


def plans(top: Topology, shared: Shared, algorithm: str) -> list[Plan]:
    from hetccl.core.algorithms import all_reduce

    make = all_reduce.island if algorithm == "island" else ALGORITHMS[shared.op][algorithm]
    return [make(top, shared, rank) for rank in range(top.size)]


def classes(
    top: Topology, redops: Sequence[RedOp] = (RedOp.SUM,), dtype: DType = DType.FLOAT32
) -> list[tuple[Shared, str]]:
    """(class, algorithm) of all operations on a topology, roots first and last."""
    found = []
    for op in ALGORITHMS:
        roots = sorted({0, top.size - 1, top.size // 2}) if op == Op.BROADCAST else [0]
        for root in roots:
            for redop in redops if op in REDUCING else (RedOp.SUM,):
                for algorithm in algorithms(op, len(top.islands)):
                    found.append((Shared(op, dtype, redop, root), algorithm))
    return found
