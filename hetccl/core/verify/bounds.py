# SPDX-License-Identifier: Apache-2.0
"""Border elements of a run against the bound of the plan's class (design D3, both columns)."""

from __future__ import annotations

from hetccl.core.plan import Plan, measure
from hetccl.core.topology import Topology
from hetccl.core.verify.flows import Channels
from hetccl.core.verify.spec import Bound, Sizes
from hetccl.types import Op

__all__ = ["bound_of", "check_bounds"]


def bound_of(topology: Topology, plan: Plan, sizes: Sizes, owned: dict[int, int] | None = None) -> Bound:
    """The bound of the plan's class in elements. `owned`: elements that each island combines (all_reduce)."""
    c_n, count = len(topology.islands), sizes.count
    if c_n == 1:
        return Bound(0)
    if plan.op == Op.ALL_REDUCE and plan.plan_class == "latency":
        each = {i.index: (c_n - 1) * count for i in topology.islands}
        return Bound(c_n * (c_n - 1) * count, each, each)
    bound = sizes.spec.bound(topology, plan.root, sizes.length)
    if plan.op == Op.ALL_REDUCE and owned is not None:
        through = {i.index: count + (c_n - 2) * owned.get(i.index, 0) for i in topology.islands}
        bound = Bound(bound.total, through, through)
    return bound


def check_bounds(topology: Topology, plan: Plan, sizes: Sizes, channels: Channels, owned: dict[int, int]) -> str:
    """What is wrong, or nothing."""
    bound, count = bound_of(topology, plan, sizes, owned), sizes.count
    if channels.total > bound.total:
        return f"{channels.total} elements cross the border; the {plan.plan_class} class allows {bound.total}"
    for way, found, allowed in (("leave", channels.out, bound.out), ("enter", channels.into, bound.into)):
        for island, limit in allowed.items():
            if found[island] > limit:
                return (
                    f"{found[island]} elements {way} island {island}; "
                    f"the {plan.plan_class} class allows {limit} through it"
                )
    if plan.op == Op.ALL_REDUCE and plan.plan_class == "bandwidth":
        share = fair_share(topology, plan, count)
        for island, n in owned.items():
            if n > share:
                return f"island {island} combines {n} of {count} elements; its share is at most {share}"
    return ""


def fair_share(topology: Topology, plan: Plan, count: int) -> int:
    """Most elements that one island may own: equal shares of whole units, and the tail."""
    most = 0
    for length in plan.segments(count):
        unit, tail = measure(length, plan.units)
        most += -(-plan.units // len(topology.islands)) * unit + tail
    return most
