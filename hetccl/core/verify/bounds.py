# SPDX-License-Identifier: Apache-2.0
"""Border elements of a run against the bound of the plan's class (design D3, both columns)."""

from __future__ import annotations

from hetccl.core.plan import Plan, measure
from hetccl.core.topology import Topology
from hetccl.core.verify.flows import Channels
from hetccl.core.verify.spec import Bound, spec_of
from hetccl.types import Op

__all__ = ["bound_of", "check_bounds"]

RELAYING = ("ring", "tree")


def bound_of(topology: Topology, plan: Plan, count: int, owned: dict[int, int] | None = None) -> Bound:
    """The bound of the plan's class in elements. `owned`: elements that each island combines (all_reduce)."""
    c_n = len(topology.islands)
    if c_n == 1:
        return Bound(0)
    if plan.op == Op.ALL_REDUCE and plan.plan_class == "latency":
        each = {i.index: (c_n - 1) * count for i in topology.islands}
        return Bound(c_n * (c_n - 1) * count, each, each)
    bound = spec_of(plan.op).bound(topology, plan.root, count)
    if plan.op == Op.BROADCAST and plan.plan_class == "latency":  # one island may send to several
        bound = Bound(bound.total, into=bound.into)
    elif plan.op == Op.BROADCAST and plan.algorithm == "owners":  # the owner of the last part has the tail, too
        most = (c_n - 2) * fair_share(topology, plan, count, c_n - 1)
        bound = Bound(bound.total, {i: max(n, most) for i, n in bound.out.items()}, bound.into)
    if plan.op == Op.ALL_REDUCE and owned is not None:
        # where partials are passed on, an island carries others' elements too, but no more than a fair owner's
        share = fair_share(topology, plan, count) if plan.algorithm in RELAYING else -1
        through = {i.index: count + (c_n - 2) * max(share, owned.get(i.index, 0)) for i in topology.islands}
        bound = Bound(bound.total, through, through)
    return bound


def check_bounds(topology: Topology, plan: Plan, count: int, channels: Channels, owned: dict[int, int]) -> str:
    """What is wrong, or nothing."""
    bound = bound_of(topology, plan, count, owned)
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


def fair_share(topology: Topology, plan: Plan, count: int, parts: int = 0) -> int:
    """Most elements that one island may own: equal shares (`parts`: of so many, not of all islands) of whole units,
    and the tail."""
    most = 0
    for length in plan.segments(count):
        unit, tail = measure(length, plan.units)
        most += -(-plan.units // (parts or len(topology.islands))) * unit + tail
    return most
