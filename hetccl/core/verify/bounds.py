# SPDX-License-Identifier: Apache-2.0
"""Border elements of a run against the bound of the plan's class (design D3, both columns)."""

from __future__ import annotations

from hetccl.core.plan import Plan, measure
from hetccl.core.topology import Topology
from hetccl.core.verify.flows import Channels
from hetccl.core.verify.spec import Bound, Sizes
from hetccl.types import Op

__all__ = ["bound_of", "check_bounds"]

RELAYING = ("ring", "tree")


def bound_of(topology: Topology, plan: Plan, sizes: Sizes, owned: dict[int, int] | None = None) -> Bound:
    """The bound of the plan's class in elements. `owned`: elements that each island combines (all_reduce)."""
    c_n, count = len(topology.islands), sizes.count
    if c_n == 1:
        return Bound(0)
    if plan.op == Op.ALL_REDUCE and plan.plan_class == "latency":
        each = {i.index: (c_n - 1) * count for i in topology.islands}
        if topology.border.mesh:
            return Bound(c_n * (c_n - 1) * count, each, each)
        each = {i.index: _relayed(topology, i.index, {topology.border.middle: count}) for i in topology.islands}
        return Bound(2 * (c_n - 1) * count, each, each)
    if plan.plan_class == "star":
        spokes = {i.index: i.size * count for i in topology.islands if i.host_memory}
        each = {i.index: spokes.get(i.index, sum(spokes.values())) for i in topology.islands}
        return Bound(2 * sum(spokes.values()), each, each)
    bound = sizes.spec.bound(topology, plan.root, sizes.length)
    if plan.op == Op.BROADCAST and plan.plan_class == "latency":  # one island may send to several
        bound = Bound(bound.total, into=bound.into)
    elif plan.op == Op.BROADCAST and plan.algorithm == "owners":  # the owner of the last part has the tail, too
        most = (c_n - 2) * fair_share(topology, plan, count, c_n - 1)
        bound = Bound(bound.total, {i: max(n, most) for i, n in bound.out.items()}, bound.into)
    if plan.op == Op.ALL_REDUCE and owned is not None:
        # where partials are passed on, an island carries others' elements too, but no more than a fair owner's
        share = fair_share(topology, plan, count) if plan.algorithm in RELAYING else -1
        through = {i.index: count + (c_n - 2) * max(share, owned.get(i.index, 0)) for i in topology.islands}
        if not topology.border.mesh:
            through = {i.index: _relayed(topology, i.index, owned) for i in topology.islands}
        bound = Bound(bound.total, through, through)
    return bound


def _relayed(topology: Topology, island: int, owned: dict[int, int]) -> int:
    """Elements each way through an island where partials and sums go along trees: for every owner one with the island
    before it, and one with each behind it. In a mesh this is S(1 + (C-2)w)."""
    border = topology.border
    return sum(n * (len(border.children(island, owner)) + (owner != island)) for owner, n in owned.items())


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
        for island, n in owned.items():
            relaying = plan.algorithm in RELAYING
            share = fair_share(topology, plan, count) if relaying else owner_share(topology, plan, count, island)
            if n > share:
                return f"island {island} combines {n} of {count} elements; its share is at most {share}"
    return ""


def owner_share(topology: Topology, plan: Plan, count: int, island: int) -> int:
    """Most elements that one island may own: what the rate of its border says, and the tail."""
    parts = topology.border.owners
    if len(set(parts)) == 1 and all(topology.border.even(i.index) for i in topology.islands):
        return fair_share(topology, plan, count)
    most = 0
    for length in plan.segments(count):
        unit, tail = measure(length, plan.units)
        most += -(-plan.units * parts[island] // sum(parts)) * unit + tail
    return most


def fair_share(topology: Topology, plan: Plan, count: int, parts: int = 0) -> int:
    """Most elements that one island may own: equal shares (`parts`: of so many, not of all islands) of whole units,
    and the tail."""
    most = 0
    for length in plan.segments(count):
        unit, tail = measure(length, plan.units)
        most += -(-plan.units // (parts or len(topology.islands))) * unit + tail
    return most
