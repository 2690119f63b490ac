# SPDX-License-Identifier: Apache-2.0
"""Chooses an algorithm for a class of operation and makes this rank's plan. The choice depends on shared facts only."""

from __future__ import annotations

from hetccl.core.algorithms import all_gather, all_reduce, broadcast, reduce_scatter
from hetccl.core.algorithms.common import Algorithm, Shared
from hetccl.core.explain import Explanation, border_bound, describe_steps
from hetccl.core.plan import Plan
from hetccl.core.topology import Topology
from hetccl.core.verify.gate import Gate
from hetccl.errors import ConfigError, UnsupportedError
from hetccl.native.combine import can_combine
from hetccl.types import DType, Op, RedOp

__all__ = ["Planner"]

ALGORITHMS: dict[Op, dict[str, Algorithm]] = {
    Op.ALL_REDUCE: {"exchange": all_reduce.exchange, "owners": all_reduce.owners},
    Op.BROADCAST: {"chain": broadcast.chain},
    Op.ALL_GATHER: {"direct": all_gather.direct},
    Op.REDUCE_SCATTER: {"direct": reduce_scatter.direct},
}

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
        self.gate = Gate(topology, verify)
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

    def plan(self, op: int, dtype: int, redop: int, root: int, small: bool) -> Plan:
        """This rank's plan, proved together with those of all ranks. Raises `UnsupportedError` if no path can do it and
        `InternalError` if the proof fails, both before any traffic."""
        shared = Shared(Op(op), DType(dtype), RedOp(redop), root)
        self._check(shared)
        algorithm = self._algorithm(shared, small)
        self.gate.check(shared, algorithm)
        return algorithm(self.topology, shared, self.rank)

    def explain(
        self, op: Op, nbytes: int, dtype: DType, redop: RedOp, root: int, paths: dict[tuple[int, int], str]
    ) -> Explanation:
        """Plans of all ranks are made and their messages added up, so the border bytes are those of the plan itself."""
        shared = Shared(op, dtype, redop, root)
        self._check(shared)
        algorithm = self._algorithm(shared, op == Op.ALL_REDUCE and nbytes <= self.small_bytes)
        count = nbytes // dtype.itemsize
        mine = algorithm(self.topology, shared, self.rank)
        border = sum(
            sum(algorithm(self.topology, shared, r).sent_elements(count).values()) for r in range(self.topology.size)
        )
        island = self.topology.island_of(self.rank)
        return Explanation(
            op=op.label,
            nbytes=nbytes,
            dtype=dtype.label,
            redop=redop.label if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER) else "",
            algorithm=mine.algorithm,
            plan_class=mine.plan_class,
            combined_by="vendor's library" if len(self.topology.islands) == 1 else "host",
            islands=[f"{i.name}, ranks {', '.join(map(str, i.ranks))}" for i in self.topology.islands],
            paths=paths,
            steps=describe_steps(mine),
            segments=len(mine.segments(count)),
            border_bytes=border * dtype.itemsize,
            border_bound=border_bound(self.topology, op, mine.plan_class, count, dtype.itemsize),
            staged=not island.host_memory,
        )

    def _algorithm(self, shared: Shared, small: bool) -> Algorithm:
        if shared.op == Op.ALL_REDUCE and len(self.topology.islands) == 1:
            return all_reduce.island
        name = self.forced.get(shared.op.label) or ("exchange" if small else "owners")
        choices = ALGORITHMS[shared.op]
        return choices.get(name) or next(iter(choices.values()))

    def _check(self, shared: Shared) -> None:
        if shared.op not in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            return
        if shared.redop == RedOp.PREMUL_SUM:
            raise UnsupportedError("premul_sum is not supported yet; scale the input and use sum")
        op = RedOp.SUM if shared.redop == RedOp.AVG else shared.redop
        if not can_combine(shared.dtype, op) or (shared.redop == RedOp.AVG and shared.dtype == DType.BOOL):
            raise UnsupportedError(f"no path supports {shared.redop.label} of {shared.dtype.label}")
