# SPDX-License-Identifier: Apache-2.0
"""What an operation would do on a cluster that need not exist: its algorithm, its stages and their times, the border
bytes against the bound. `hetccl plan` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hetccl.core.algorithms.common import Algorithm, Shared
from hetccl.core.explain import border_bound
from hetccl.core.plan import Plan
from hetccl.core.planner import Planner
from hetccl.core.selector import Choice, predict, stand_ins
from hetccl.core.simulate import Timeline
from hetccl.core.topology import Topology
from hetccl.types import Op

__all__ = ["Forecast", "border_elements", "forecast"]

ALL_PLANS = 128  # up to so many ranks, border bytes are added up over every rank's plan


@dataclass(frozen=True)
class Forecast:
    """One operation on one topology. Times in seconds; `border_exact` is False where the bytes of some ranks were taken
    for those of all."""

    shared: Shared
    nbytes: int
    choice: Choice
    plan: Plan
    timeline: Timeline
    simulated: int
    others: dict[str, float] = field(default_factory=dict)  # algorithm: its time
    border_bytes: int = 0
    border_bound: int = 0
    border_exact: bool = True


def forecast(planner: Planner, shared: Shared, nbytes: int, spans: bool = False, most_segments: int = 8) -> Forecast:
    """Raises as `Planner.plan` does. `nbytes` as `count` in `Communicator.run`."""
    topology, costs = planner.topology, planner.selector.costs
    choice = planner.selector.at(shared.op, nbytes)
    algorithm, shared = planner.algorithm_of(shared, choice)
    timeline, plans = predict(costs, shared, algorithm, nbytes, spans=spans, most_segments=most_segments)
    times = {}
    for name in planner.selector.candidates(shared.op):
        if name != choice.algorithm and len(topology.islands) > 1:
            other, its = planner.algorithm_of(shared, replace(choice, algorithm=name))
            times[name] = predict(costs, its, other, nbytes, most_segments=most_segments)[0].total
    count = max(1, nbytes // shared.dtype.itemsize)
    border, exact = border_elements(topology, shared, algorithm, count)
    mine = plans[min(plans)]
    size = shared.dtype.itemsize
    bound = border_bound(topology, shared.op, mine.plan_class, count, size, shared.root)
    return Forecast(shared, nbytes, choice, mine, timeline, len(plans), times, border * size, bound, exact)


def border_elements(topology: Topology, shared: Shared, algorithm: Algorithm, count: int) -> tuple[int, bool]:
    """Elements that all ranks together send over the border, and whether every rank's plan was asked. On large
    clusters one rank stands for all those of its island that are neither its head nor the first or last at its border
    nor the root."""
    if topology.size <= ALL_PLANS:
        plans = (algorithm(topology, shared, r, None) for r in range(topology.size))
        return sum(sum(p.sent_elements(count).values()) for p in plans), True
    sizes = {(i.size, len(i.borders), len(set(i.speeds)) > 1) for i in topology.islands}
    alike = len(sizes) == 1 and not next(iter(sizes))[2]
    total, exact = 0, True
    for island in topology.islands:
        special = {topology.border.head(island.index), island.borders[0], island.borders[-1]}
        special |= {shared.root} & set(island.ranks)
        others = [r for r in island.borders if r not in special]
        weights = dict.fromkeys(special, 1)
        if others:
            weights[others[0]] = len(others)
            exact &= len(others) == 1 or alike
        for rank, weight in weights.items():
            total += weight * sum(algorithm(topology, shared, rank, None).sent_elements(count).values())
    return total, exact


def time_of(planner: Planner, shared: Shared, nbytes: int) -> float:
    """Seconds of the algorithm that is chosen."""
    algorithm, its = planner.algorithm_of(shared, planner.selector.at(shared.op, nbytes))
    return predict(planner.selector.costs, its, algorithm, nbytes)[0].total


def ranks_shown(topology: Topology, shared: Shared, most: int) -> list[int]:
    """Ranks for a picture: all, or those that stand for all, at most `most`."""
    return stand_ins(topology, shared, most)[:most]


OPERATIONS = tuple(op.label for op in (Op.ALL_REDUCE, Op.BROADCAST, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.REDUCE,
                                       Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL))  # fmt: skip
