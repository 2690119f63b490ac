# SPDX-License-Identifier: Apache-2.0
"""all_gather: each block enters every other island once and is spread there by the vendor's library."""

from __future__ import annotations

from hetccl.core.algorithms.common import Shared, island_broadcast, needs_segments, segment_elements
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder, StepKind
from hetccl.core.topology import Topology

__all__ = ["direct"]


def direct(topology: Topology, shared: Shared, rank: int) -> Plan:
    """(C-1)ns border bytes, (n-n_c)s into island c. The count is one rank's; block r of OUT is rank r's input."""
    mine, me = topology.place(rank)
    isl = topology.islands[mine]
    single = len(topology.islands) == 1
    b = PlanBuilder()
    own = b.whole(Buffer.OUT, rank)
    segment = (
        0
        if single or all(i.host_memory for i in topology.islands)
        else segment_elements(topology, shared, 1, needs_segments(topology))
    )
    host_blocks = 0
    b.island(StepKind.COPY, b.whole(Buffer.IN), own)
    ready, source = -1, b.whole(Buffer.IN)
    if not isl.host_memory and not single:
        source = b.whole(Buffer.HOST_SCRATCH)
        ready = b.island(StepKind.COPY, b.whole(Buffer.IN), source)
        host_blocks = 1
    if isl.size > 1 and isl.contiguous and segment == 0:
        whole = b.whole(Buffer.OUT, isl.ranks[0])
        b.island(StepKind.ALL_GATHER, own, whole, b.whole(Buffer.OUT, rank), as_bytes=not isl.moves(shared.dtype))
    else:
        for j, r in enumerate(isl.ranks):
            island_broadcast(b, isl, shared, b.whole(Buffer.OUT, r), j)
    flows, arrivals = [], []
    for q in range(topology.size):
        q_island, q_index = topology.place(q)
        if q == rank:
            to = [(i, i.ranks[me % i.size]) for i in topology.islands if i.index != mine]
            flows += [Flow(FlowKind.SEND, Channel.RESULT, (r,), src=source) for _, r in to]
        elif q_island != mine and q_index % isl.size == me:
            dst = b.whole(Buffer.OUT, q)
            if not isl.host_memory:
                arrivals.append((b.whole(Buffer.HOST_SCRATCH, host_blocks), dst))
                dst = arrivals[-1][0]
                host_blocks += 1
            flows.append(Flow(FlowKind.RECV, Channel.RESULT, (q,), dst=dst))
    wait = b.border(flows, ready)
    for staged, dst in arrivals:
        b.island(StepKind.COPY, staged, dst, wait=wait)
        wait = -1
    for q in range(topology.size):
        q_island, q_index = topology.place(q)
        if q_island != mine:
            island_broadcast(b, isl, shared, b.whole(Buffer.OUT, q), q_index % isl.size, wait)
            wait = -1
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        0,
        rank,
        "island" if single else "direct",
        "island" if single else "bandwidth",
        1,
        segment,
        tuple(b.steps),
        tuple(b.flows),
        out_blocks=topology.size,
        host_blocks=host_blocks,
    )
