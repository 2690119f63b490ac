# SPDX-License-Identifier: Apache-2.0
"""broadcast from head to head, each island entered once, and the vendor's broadcast inside each: along a chain of
islands (bandwidth), a binomial tree, or straight from the root (latency)."""

from __future__ import annotations

from hetccl.core.algorithms.common import Places, Shared, island_broadcast, needs_segments, segment_elements
from hetccl.core.algorithms.rounds import need_mesh
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology

__all__ = ["chain", "direct", "tree"]


def chain(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes; where links allow, at most S through one island, else along a tree with few branches."""
    single = len(topology.islands) == 1
    parents = topology.border.chain(topology.place(shared.root)[0])
    return _along(topology, shared, rank, parents, ("island", "island") if single else ("chain", "bandwidth"))


def direct(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, all of them out of the root's island: one message deep."""
    need_mesh(topology, shared, "direct")
    root = topology.place(shared.root)[0]
    parents = [-1 if c == root else root for c in range(len(topology.islands))]
    return _along(topology, shared, rank, parents, ("direct", "latency"))


def tree(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, ceil(log2 C) messages deep; the root sends ceil(log2 C) times."""
    need_mesh(topology, shared, "tree")
    root = topology.place(shared.root)[0]
    order = [root] + [c for c in range(len(topology.islands)) if c != root]
    parents = [-1] * len(order)
    for at in range(1, len(order)):  # a node's parent lacks its highest bit
        parents[order[at]] = order[at - (1 << at.bit_length() >> 1)]
    return _along(topology, shared, rank, parents, ("tree", "latency"))


def _along(topology: Topology, shared: Shared, rank: int, parents: list[int], names: tuple[str, str]) -> Plan:
    """Along a tree of islands, given by parents (-1: the root's). The buffer is OUT on every rank."""
    border = topology.border
    root_island, root_index = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl, single = topology.islands[mine], len(topology.islands) == 1
    heads = [border.head(i.index) for i in topology.islands]
    if single or border.at_border(shared.root):
        heads[root_island] = shared.root
    b = PlanBuilder()
    out = b.whole(Buffer.OUT)
    host_blocks = 0
    if mine == root_island and heads[mine] != shared.root:  # the root is not at the border: its island first
        island_broadcast(b, isl, shared, out, root_index)
    if rank == heads[mine] and not single:
        buffer, wait = out, len(b.steps) - 1
        if isl.staged:
            buffer, host_blocks = out.on(Buffer.HOST_SCRATCH), 1
            if mine == root_island:
                wait = b.island(StepKind.COPY, out, buffer)
        onward = tuple(heads[c] for c, up in enumerate(parents) if up == mine)
        if mine == root_island:
            flows = [Flow(FlowKind.SEND, Channel.RESULT, (h,), src=buffer) for h in onward]
        elif onward:
            flows = [Flow(FlowKind.FORWARD, Channel.RESULT, (heads[parents[mine]], *onward), dst=buffer)]
        else:
            flows = [Flow(FlowKind.RECV, Channel.RESULT, (heads[parents[mine]],), dst=buffer)]
        done = b.border(flows, wait)
        if mine != root_island:
            if isl.staged:
                done = b.island(StepKind.COPY, buffer, out, wait=done)
                done = -1
            island_broadcast(b, isl, shared, out, me, done)
        elif rank == shared.root:
            island_broadcast(b, isl, shared, out, me)
    elif mine != root_island:
        island_broadcast(b, isl, shared, out, topology.place(heads[mine])[1])
    elif heads[mine] == shared.root:
        island_broadcast(b, isl, shared, out, root_index)
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        shared.root,
        rank,
        *names,
        1,
        0 if single else segment_elements(topology, shared, 1, needs_segments(topology)),
        tuple(b.steps),
        tuple(b.flows),
        in_blocks=1 if rank == shared.root else 0,
        host_blocks=host_blocks,
    )
