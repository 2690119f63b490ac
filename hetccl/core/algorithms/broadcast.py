# SPDX-License-Identifier: Apache-2.0
"""broadcast: a chain of islands from the root's, each entered once, and the vendor's broadcast inside each."""

from __future__ import annotations

from hetccl.core.algorithms.common import Places, Shared, island_broadcast, needs_segments, segment_elements
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology

__all__ = ["chain"]


def chain(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """(C-1)S border bytes, at most S through one island. The buffer is OUT on every rank."""
    root_island, root_index = topology.place(shared.root)
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    order = [root_island] + [i for i in range(len(topology.islands)) if i != root_island]
    heads = [shared.root] + [topology.islands[i].ranks[0] for i in order[1:]]
    at = order.index(mine)
    b = PlanBuilder()
    out = b.whole(Buffer.OUT)
    host_blocks = 0
    if rank == heads[at] and len(order) > 1:
        buffer, wait = out, -1
        if isl.staged:
            buffer, host_blocks = out.on(Buffer.HOST_SCRATCH), 1
            if at == 0:
                wait = b.island(StepKind.COPY, out, buffer)
        onward = heads[at + 1 : at + 2]
        if at == 0:
            flow = Flow(FlowKind.SEND, Channel.RESULT, tuple(onward), src=buffer)
        elif onward:
            flow = Flow(FlowKind.FORWARD, Channel.RESULT, (heads[at - 1], *onward), dst=buffer)
        else:
            flow = Flow(FlowKind.RECV, Channel.RESULT, (heads[at - 1],), dst=buffer)
        done = b.border([flow], wait)
        if at == 0:
            island_broadcast(b, isl, shared, out, me)
        else:
            if isl.staged:
                done = b.island(StepKind.COPY, buffer, out, wait=done)
                done = -1
            island_broadcast(b, isl, shared, out, me, done)
    else:
        island_broadcast(b, isl, shared, out, root_index if at == 0 else 0)
    single = len(topology.islands) == 1
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        shared.root,
        rank,
        "island" if single else "chain",
        "island" if single else "bandwidth",
        1,
        0 if single else segment_elements(topology, shared, 1, needs_segments(topology)),
        tuple(b.steps),
        tuple(b.flows),
        in_blocks=1 if rank == shared.root else 0,
        host_blocks=host_blocks,
    )
