# SPDX-License-Identifier: Apache-2.0
"""For `explain()`: who carries what between islands and why, what is relayed, and the bytes through each island against
their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hetccl.core.algorithms.common import Shared
from hetccl.core.plan import FlowKind, Plan, slice_range
from hetccl.core.topology import Topology
from hetccl.core.verify.bounds import bound_of
from hetccl.core.verify.spec import Sizes
from hetccl.types import Op

__all__ = ["describe_borders", "describe_relays", "describe_through", "sent_between"]


def describe_borders(topology: Topology, op: Op) -> list[str]:
    """One line an island: its border ranks, why these, how shards are cut, what it owns of an all_reduce."""
    border = topology.border
    if len(topology.islands) == 1:
        return []
    lines = []
    for island in topology.islands:
        words = [f"{_ranks(island.borders)} at the border ({island.border_why or 'all ranks of the island'})"]
        cuts = border.cuts(island.index)
        widths = [b - a for a, b in pairwise(cuts)]
        if len(set(widths)) > 1:
            parts = ", ".join(f"{100 * w / border.units:.1f} %" for w in widths)
            words.append(f"shards by their speeds: {parts}")
        if len(island.borders) > 1:
            chosen = "the fastest" if len(set(island.speeds)) > 1 else "the first"
            words.append(f"rank {border.head(island.index)} ({chosen}) carries what is not cut")
        if op == Op.ALL_REDUCE and len(topology.islands) > 2:
            share = border.owners[island.index] / sum(border.owners)
            why = f", by its border's {rate(island.border_rate)}" if len(set(border.owners)) > 1 else ""
            words.append(f"may own {100 * share:.1f} % of the elements{why}")
        lines.append("; ".join(words))
    return lines


def describe_relays(topology: Topology) -> list[str]:
    """Pairs of islands without a direct link, and over which islands they reach each other."""
    lines = []
    for link in topology.links:
        if link.direct:
            continue
        over, here = [], topology.border.parent(link.a, link.b)
        while here != link.b:
            over.append(f"{here} ({topology.islands[here].name})")
            here = topology.border.parent(here, link.b)
        lines.append(f"islands {link.a} and {link.b} have no direct link: over island {', '.join(over)}")
    return lines


def sent_between(topology: Topology, plans: Sequence[Plan], count: int) -> tuple[dict[int, int], dict[int, int]]:
    """Elements that (leave, enter) each island."""
    out = {i.index: 0 for i in topology.islands}
    into = dict(out)
    for plan in plans:
        for peer, n in plan.sent_elements(count).items():
            out[topology.place(plan.rank)[0]] += n
            into[topology.place(peer)[0]] += n
    return out, into


def describe_through(
    topology: Topology, shared: Shared, plans: Sequence[Plan], count: int, out: dict[int, int], into: dict[int, int]
) -> list[str]:
    """One line an island: bytes that leave and enter it, and the most that the plan's class allows."""
    if len(topology.islands) == 1:
        return []
    bound = bound_of(topology, plans[0], Sizes(shared, topology.size, count), _owned(topology, plans, count))
    size = shared.dtype.itemsize

    def text(found: int, allowed: int | None) -> str:
        return f"{found * size}" + (f" of {allowed * size}" if allowed is not None else "")

    return [
        f"{text(out[i.index], bound.out.get(i.index))} bytes leave, "
        f"{text(into[i.index], bound.into.get(i.index))} enter"
        for i in topology.islands
    ]


def rate(bytes_per_second: float) -> str:
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if bytes_per_second < 1000 or unit == "GB/s":
            return f"{bytes_per_second:.3g} {unit}"
        bytes_per_second /= 1000
    raise AssertionError


def _owned(topology: Topology, plans: Sequence[Plan], count: int) -> dict[int, int]:
    """Elements that each island combines last, and gives back."""
    owned = {i.index: 0 for i in topology.islands}
    for plan in plans:
        for length in plan.segments(count):
            for flow in plan.flows:
                if flow.kind == FlowKind.OWN and flow.give_back:
                    lo, hi = slice_range(flow.dst, length, plan.units)
                    owned[topology.place(plan.rank)[0]] += hi - lo
    return owned


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]} .. {ranks[-1]})"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

