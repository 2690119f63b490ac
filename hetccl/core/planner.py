# SPDX-License-Identifier: Apache-2.0
"""Chooses an algorithm for a class of operation and makes this rank's plan. The choice depends on shared facts only."""

from __future__ import annotations

from dataclasses import replace

from hetccl.core.algorithms import (
    all_gather,
    all_gather_rounds,
    all_reduce,
    all_reduce_rounds,
    all_reduce_star,
    all_to_all,
    broadcast,
    broadcast_parts,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_rounds,
    scatter,
)
from hetccl.core.algorithms.common import Algorithm, Places, Shared
from hetccl.core.arguments import number
from hetccl.core.cost import CostTable
from hetccl.core.explain import Explanation, border_bound, describe_steps
from hetccl.core.explain_border import describe_borders, describe_relays, describe_through, sent_between
from hetccl.core.plan import Plan
from hetccl.core.selector import Choice, Choices, Selector
from hetccl.core.topology import Topology
from hetccl.core.verify.gate import Gate
from hetccl.core.ways import Ways, rates_of
from hetccl.errors import ConfigError, UnsupportedError, UsageError
from hetccl.native.combine import can_combine
from hetccl.types import DType, Op, RedOp

__all__ = ["Planner", "Shape", "reducible"]

Shape = tuple[tuple[int, ...], Places]  # lengths of the blocks, equal on all ranks, and where they lie on this one

ALGORITHMS: dict[Op, dict[str, Algorithm]] = {
    Op.ALL_REDUCE: {
        "exchange": all_reduce.exchange,
        "owners": all_reduce.owners,
        "ring": all_reduce_rounds.ring,
        "star": all_reduce_star.star,
        "tree": all_reduce_rounds.tree,
    },
    Op.BROADCAST: {
        "chain": broadcast.chain,
        "direct": broadcast.direct,
        "owners": broadcast_parts.owners,
        "tree": broadcast.tree,
    },
    Op.ALL_GATHER: {
        "direct": all_gather.direct,
        "heads": all_gather_rounds.heads,
        "ring": all_gather_rounds.ring,
        "tree": all_gather_rounds.tree,
    },
    Op.REDUCE_SCATTER: {
        "direct": reduce_scatter.direct,
        "heads": reduce_scatter_rounds.heads,
        "ring": reduce_scatter_rounds.ring,
        "tree": reduce_scatter_rounds.tree,
    },
    Op.REDUCE: {"chain": reduce.chain},
    Op.GATHER: {"direct": gather.direct},
    Op.SCATTER: {"direct": scatter.direct},
    Op.ALL_TO_ALL: {"direct": all_to_all.direct},
}

# Between two ranks on the direct path, at any size: an exchange of everything sends as many bytes as two steps of
# halves and is as fast, and nothing is gained by cutting blocks up (docs/design/device-path.md).
PAIR = {"all_reduce": "exchange", "broadcast": "chain", "all_gather": "direct", "reduce_scatter": "direct"}
PAIR_STAR = 2 << 20  # bytes up to which of a device and a rank in host memory the latter does the sums


def _pair(topology: Topology) -> dict[str, Choices]:
    settled = {op: Choices((), (Choice(name),)) for op, name in PAIR.items()}
    hub = all_reduce_star.hub_of(topology)
    if hub and hub.kernels:
        settled["all_reduce"] = Choices((PAIR_STAR,), (Choice(PAIR["all_reduce"]), Choice("star")))
    return settled


REDUCING = frozenset({Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE})


class Planner:
    """Plans of one rank. `forced` is HETCCL_ALGORITHM: {"all_reduce": "owners"}; `verify` is HETCCL_VERIFY."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        forced: dict[str, str],
        verify: str = "first",
        table: CostTable | None = None,
        combine: str = "auto",
    ) -> None:
        self.topology = topology
        self.ways = Ways(topology, combine, rates_of(table) if table else None)
        self.rank = rank
        self.forced = forced
        self.gate = Gate(topology, verify, rank)
        self.selector = Selector(topology, table or CostTable(), ALGORITHMS, forced)
        self._given = verify, table or CostTable(), combine
        for op, name in forced.items():
            known = {o.label: sorted(a) for o, a in ALGORITHMS.items()}
            if op not in known or name not in known[op]:
                raise ConfigError(
                    f"HETCCL_ALGORITHM={op}={name}: there are "
                    + "; ".join(f"{o}: {', '.join(names)}" for o, names in known.items()),
                    variable="HETCCL_ALGORITHM",
                    value=f"{op}={name}",
                )

    def use_direct(self) -> None:
        """Plans border messages from and into device memory. Before the first plan, and on all ranks or none."""
        verify, table, combine = self._given
        islands = tuple(replace(i, direct=not i.host_memory) for i in self.topology.islands)
        topology = self.topology = replace(self.topology, islands=islands, _place={})
        self.ways = Ways(topology, combine, rates_of(table))
        self.gate = Gate(topology, verify, self.rank)
        settled = _pair(topology) if len(islands) == 2 and topology.size == 2 else {}
        self.selector = Selector(topology, table, ALGORITHMS, self.forced, settled)

    def limits(self, op: int) -> tuple[int, ...]:
        """The last size in bytes of each bucket of an operation, but for the last bucket."""
        return self.selector.choices(Op(op)).limits if op in ALGORITHMS else ()

    def plan(self, op: int, dtype: int, redop: int, root: int, bucket: int, shape: Shape | None = None) -> Plan:
        """This rank's plan for sizes of a bucket, proved together with those of all ranks. Raises `UnsupportedError` if
        no path can do it and `InternalError` if the proof fails, both before any traffic."""
        shared, algorithm = self.choose(op, dtype, redop, root, bucket, shape)
        places = shape[1] if shape else None
        self.gate.check(shared, algorithm, places)
        plan = algorithm(self.topology, shared, self.rank, places)
        return replace(plan, op=Op.BARRIER) if op == Op.BARRIER else plan

    def choose(
        self, op: int, dtype: int, redop: int, root: int, bucket: int, shape: Shape | None = None
    ) -> tuple[Shared, Algorithm]:
        """What ranks share in a class, and what makes their plans. A barrier is an all_reduce of next to nothing,
        whatever is forced for real ones."""
        if op == Op.BARRIER:
            able = self.selector.candidates(Op.ALL_REDUCE)
            least: Algorithm = ALGORITHMS[Op.ALL_REDUCE]["exchange" if "exchange" in able else able[0]]
            if len(self.topology.islands) == 1:
                least = all_reduce.island
            return Shared(Op.ALL_REDUCE, DType.INT32, RedOp.SUM), least
        operator, element = number(RedOp, redop, "operator"), number(DType, dtype, "dtype")
        shared = Shared(number(Op, op, "operation"), element, operator, root, counts=shape[0] if shape else ())
        self.check(shared)
        choice = self.choice(shared, 0) if shape else self.selector.choices(shared.op).buckets[bucket]
        algorithm, shared = self.algorithm_of(shared, choice)
        return shared, algorithm

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
        self.check(shared)
        choice = self.choice(shared, nbytes)
        combined_by = "nobody"
        if op in REDUCING:
            combined_by = self.ways.describe(self._algorithm(shared, choice.algorithm), shared)
        algorithm, shared = self.algorithm_of(shared, choice)
        count = 1 if counts else nbytes // dtype.itemsize
        plans = [algorithm(self.topology, shared, r, None) for r in range(self.topology.size)]
        mine = plans[self.rank]
        out, into = sent_between(self.topology, plans, count)
        island = self.topology.island_of(self.rank)
        return Explanation(
            op=op.label,
            nbytes=nbytes,
            dtype=dtype.label,
            redop=redop.label if op in REDUCING else "",
            algorithm=mine.algorithm,
            plan_class=mine.plan_class,
            combined_by=combined_by,
            islands=[f"{i.name}, ranks {', '.join(map(str, i.ranks))}" for i in self.topology.islands],
            paths=paths,
            steps=describe_steps(mine),
            segments=len(mine.segments(count)),
            border_bytes=sum(out.values()) * dtype.itemsize,
            border_bound=border_bound(self.topology, op, mine.plan_class, count, dtype.itemsize, root, counts),
            staged=island.staged,
            borders=describe_borders(self.topology, op),
            relays=describe_relays(self.topology),
            through=describe_through(self.topology, shared, plans, count, out, into),
            proof=self.gate.tell(shared, plans),
        )

    def choice(self, shared: Shared, nbytes: int) -> Choice:
        """What is done with an operation of so many bytes; the v forms go by their mean block."""
        if shared.counts:
            nbytes = _mean_bytes(shared, self.topology.size)
        return self.selector.choices(shared.op).of(nbytes)

    def algorithm_of(self, shared: Shared, choice: Choice) -> tuple[Algorithm, Shared]:
        """The algorithm of a choice, with its way to combine, and what it is asked to plan."""
        shared = replace(shared, segment_bytes=choice.segment_bytes)
        algorithm = self._algorithm(shared, choice.algorithm)
        return (self.ways.apply(algorithm, shared) if shared.op in REDUCING else algorithm), shared

    def _algorithm(self, shared: Shared, name: str) -> Algorithm:
        choices = ALGORITHMS[shared.op]
        if len(self.topology.islands) == 1:  # where nothing crosses a border there is nothing to choose
            return all_reduce.island if shared.op == Op.ALL_REDUCE else next(iter(choices.values()))
        return self._combinable(shared, choices[name]) if shared.op in REDUCING else choices[name]

    def _combinable(self, shared: Shared, algorithm: Algorithm) -> Algorithm:
        """The algorithm, or another where HETCCL_COMBINE forces a way to combine that it has no place for."""
        wrong = self.ways.fits(algorithm, shared)
        if not wrong:
            return algorithm
        if shared.op.label not in self.forced:
            for name in self.selector.candidates(shared.op):
                if not self.ways.fits(ALGORITHMS[shared.op][name], shared):
                    return ALGORITHMS[shared.op][name]
        raise UnsupportedError(
            f"HETCCL_COMBINE={self.ways.wanted} cannot be used with {shared.op.label} by "
            f"{self.forced.get(shared.op.label, 'any algorithm')}: {wrong}. Force only one of HETCCL_COMBINE and "
            "HETCCL_ALGORITHM"
        )

    def check(self, shared: Shared) -> None:
        """Raises where nobody could do it, on whatever path."""
        if shared.op not in ALGORITHMS:
            raise UsageError(f"{shared.op.label} is no operation that is planned")
        if not 0 <= shared.root < self.topology.size:
            raise UsageError(f"root {shared.root} is not a rank of this communicator (0 .. {self.topology.size - 1})")
        if shared.op in REDUCING and not reducible(shared.dtype, shared.redop):
            raise UnsupportedError(
                f"{shared.redop.label} of {shared.dtype.label} has no meaning; bitwise operators take integers and "
                "bool, complex numbers take sum, avg and premul_sum, bool takes neither avg nor premul_sum"
            )


def _mean_bytes(shared: Shared, size: int) -> int:
    """Bytes of a mean block of the v forms, which chooses their algorithm."""
    blocks = size * size if shared.op == Op.ALL_TO_ALL else size
    return sum(shared.counts) * shared.dtype.itemsize // max(1, blocks)


def reducible(dtype: DType, redop: RedOp) -> bool:
    """Whether all_reduce, reduce and reduce_scatter take this dtype with this operator, on any mix of islands."""
    if redop in (RedOp.AVG, RedOp.PREMUL_SUM):
        return dtype != DType.BOOL
    return can_combine(dtype, redop)
