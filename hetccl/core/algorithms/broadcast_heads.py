# SPDX-License-Identifier: Apache-2.0
"""broadcast from head to head in the latency class: straight from the root, or along a binomial tree of islands."""

from __future__ import annotations

from hetccl.core.algorithms.broadcast import chain
from hetccl.core.algorithms.common import Places, Shared, island_broadcast, needs_segments, segment_elements
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology

__all__ = ["direct", "tree"]


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, all of them out of the root's island: one message deep."""
    return _along(topology, shared, rank, places, "direct", lambda at, n: (0, tuple(range(1, n)) if at == 0 else ()))


def tree(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, ceil(log2 C) messages deep; the root sends ceil(log2 C) times."""
    return _along(topology, shared, rank, places, "tree", _binomial)


def _binomial(at: int, n: int) -> tuple[int, tuple[int, ...]]:
    """Parent and children of node `at` of n: a node's parent lacks its highest bit. The farthest go first."""
    above = 1 << at.bit_length()
    steps = [1 << k for k in range(n.bit_length()) if (1 << k) >= above]
    children = tuple(at + step for step in reversed(steps) if at + step < n)
    return (at - (above >> 1) if at else 0), children


def _along(topology: Topology, shared: Shared, rank: int, places: Places | None, name: str, family) -> Plan:  # type: ignore[no-untyped-def]
    if len(topology.islands) == 1:
        return chain(topology, shared, rank, places)
    root_island, root_index = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    order = [root_island] + [i for i in range(len(topology.islands)) if i != root_island]
    heads = [shared.root] + [topology.islands[i].ranks[0] for i in order[1:]]
    at = order.index(mine)
    parent, children = family(at, len(order))
    b = PlanBuilder()
    out = b.whole(Buffer.OUT)
    host_blocks = 0
    if rank == heads[at]:
        buffer, wait = out, -1
        if not isl.host_memory:
            buffer, host_blocks = out.on(Buffer.HOST_SCRATCH), 1
            if at == 0:
                wait = b.island(StepKind.COPY, out, buffer)
        done = -1
        if at:
            done = b.border([Flow(FlowKind.RECV, Channel.RESULT, (heads[parent],), dst=buffer)])
        sends = [Flow(FlowKind.SEND, Channel.RESULT, (heads[child],), src=buffer) for child in children]
        b.border(sends, wait)
        if at and not isl.host_memory:
            b.island(StepKind.COPY, buffer, out, wait=done)
            done = -1
        island_broadcast(b, isl, shared, out, me, done)
    else:
        island_broadcast(b, isl, shared, out, root_index if at == 0 else 0)
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        shared.root,
        rank,
        name,
        "latency",
        1,
        segment_elements(topology, shared, 1, needs_segments(topology)),
        tuple(b.steps),
        tuple(b.flows),
        in_blocks=1 if rank == shared.root else 0,
        host_blocks=host_blocks,
    )
