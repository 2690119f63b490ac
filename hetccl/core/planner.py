# SPDX-License-Identifier: Apache-2.0
"""Chooses an algorithm for a class of operation and makes this rank's plan. The choice depends on shared facts only."""

from __future__ import annotations

from hetccl.core.algorithms import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from hetccl.core.algorithms.common import Algorithm, Places, Shared
from hetccl.core.explain import Explanation, border_bound, describe_steps
from hetccl.core.plan import Plan
from hetccl.core.topology import Topology
from hetccl.core.verify.gate import Gate
from hetccl.errors import ConfigError, UnsupportedError, UsageError
from hetccl.native.combine import can_combine
from hetccl.types import DType, Op, RedOp

__all__ = ["Planner", "Shape", "reducible"]

Shape = tuple[tuple[int, ...], Places]  # lengths of the blocks, equal on all ranks, and where they lie on this one

ALGORITHMS: dict[Op, dict[str, Algorithm]] = {
    Op.ALL_REDUCE: {"exchange": all_reduce.exchange, "owners": all_reduce.owners},
    Op.BROADCAST: {"chain": broadcast.chain},
    Op.ALL_GATHER: {"direct": all_gather.direct},
    Op.REDUCE_SCATTER: {"direct": reduce_scatter.direct},
    Op.REDUCE: {"chain": reduce.chain},
    Op.GATHER: {"direct": gather.direct},
    Op.SCATTER: {"direct": scatter.direct},
    Op.ALL_TO_ALL: {"direct": all_to_all.direct},
}

REDUCING = frozenset({Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE})

# Up to these sizes one exchange of everything beats two steps of halves (measured, docs/results/). With vendor
# calls around it, the exchange also saves two of them.
SMALL_BYTES = 8 << 10
SMALL_BYTES_WITH_ISLANDS = 32 << 10


class Planner:
    """Plans of one rank. `forced` is HETCCL_ALGORITHM: {"all_reduce": "owners"}; `verify` is HETCCL_VERIFY."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        forced: dict[str, str],
        segment_bytes: int | None = None,
        verify: str = "first",
    ) -> None:
        self.topology = topology
        self.rank = rank
        self.forced = forced
        self.gate = Gate(topology, verify, rank)
        self.small_bytes = SMALL_BYTES if all(i.size == 1 for i in topology.islands) else SMALL_BYTES_WITH_ISLANDS
        for op, name in forced.items():
            known = {o.label: sorted(a) for o, a in ALGORITHMS.items()}
            if op not in known or name not in known[op]:
                raise ConfigError(
                    f"HETCCL_ALGORITHM={op}={name}: there are "
                    + "; ".join(f"{o}: {', '.join(names)}" for o, names in known.items()),
                    variable="HETCCL_ALGORITHM",
                    value=f"{op}={name}",
                )

    def plan(self, op: int, dtype: int, redop: int, root: int, small: bool, shape: Shape | None = None) -> Plan:
        """This rank's plan, proved together with those of all ranks. Raises `UnsupportedError` if no path can do it and
        `InternalError` if the proof fails, both before any traffic."""
        shared, places = self.shared(op, dtype, redop, root, shape), shape[1] if shape else None
        self._check(shared)
        algorithm = self._algorithm(shared, small)
        self.gate.check(shared, algorithm, places)
        return algorithm(self.topology, shared, self.rank, places)

    def plans(
        self, op: int, dtype: int, redop: int, root: int, small: bool, shape: Shape | None = None
    ) -> list[Plan]:
        """Those of all ranks, by rank. In a v form this rank's blocks lie as `shape` says, the others' are packed."""
        shared, places = self.shared(op, dtype, redop, root, shape), shape[1] if shape else None
        algorithm = self._algorithm(shared, small)
        return [
            algorithm(self.topology, shared, r, places if r == self.rank else None) for r in range(self.topology.size)
        ]

    def shared(self, op: int, dtype: int, redop: int, root: int, shape: Shape | None = None) -> Shared:
        return Shared(Op(op), DType(dtype), RedOp(redop), root, counts=shape[0] if shape else ())

    def explain(
        self,
        op: Op,
        nbytes: int,
        dtype: DType,
        redop: RedOp,
        root: int,
        paths: dict[tuple[int, int], str],
        counts: tuple[int, ...] = (),
    ) -> Explanation:
        """Plans of all ranks are made and their messages added up, so the border bytes are those of the plan itself."""
        shared = Shared(op, dtype, redop, root, counts=counts)
        self._check(shared)
        algorithm = self._algorithm(shared, op == Op.ALL_REDUCE and nbytes <= self.small_bytes)
        count = 1 if counts else nbytes // dtype.itemsize
        mine = algorithm(self.topology, shared, self.rank, None)
        border = sum(
            sum(algorithm(self.topology, shared, r, None).sent_elements(count).values())
            for r in range(self.topology.size)
        )
        island = self.topology.island_of(self.rank)
        return Explanation(
            op=op.label,
            nbytes=nbytes,
            dtype=dtype.label,
            redop=redop.label if op in REDUCING else "",
            algorithm=mine.algorithm,
            plan_class=mine.plan_class,
            combined_by="vendor's library" if len(self.topology.islands) == 1 else "host",
            islands=[f"{i.name}, ranks {', '.join(map(str, i.ranks))}" for i in self.topology.islands],
            paths=paths,
            steps=describe_steps(mine),
            segments=len(mine.segments(count)),
            border_bytes=border * dtype.itemsize,
            border_bound=border_bound(self.topology, op, mine.plan_class, count, dtype.itemsize, root, counts),
            staged=not island.host_memory,
        )

    def _algorithm(self, shared: Shared, small: bool) -> Algorithm:
        if shared.op == Op.ALL_REDUCE and len(self.topology.islands) == 1:
            return all_reduce.island
        name = self.forced.get(shared.op.label) or ("exchange" if small else "owners")
        choices = ALGORITHMS[shared.op]
        return choices.get(name) or next(iter(choices.values()))

    def _check(self, shared: Shared) -> None:
        if shared.op not in ALGORITHMS:
            raise UsageError(f"{shared.op.label} is no operation that is planned")
        if not 0 <= shared.root < self.topology.size:
            raise UsageError(f"root {shared.root} is not a rank of this communicator (0 .. {self.topology.size - 1})")
        if shared.op in REDUCING and not reducible(shared.dtype, shared.redop):
            raise UnsupportedError(
                f"{shared.redop.label} of {shared.dtype.label} has no meaning; bitwise operators take integers and "
                "bool, complex numbers take sum, avg and premul_sum, bool takes neither avg nor premul_sum"
            )


def reducible(dtype: DType, redop: RedOp) -> bool:
    """Whether all_reduce, reduce and reduce_scatter take this dtype with this operator, on any mix of islands."""
    if redop in (RedOp.AVG, RedOp.PREMUL_SUM):
        return dtype != DType.BOOL
    return can_combine(dtype, redop)
