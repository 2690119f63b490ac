# SPDX-License-Identifier: Apache-2.0
"""all_reduce of ranks in host memory around an island of devices, all on the direct path: the devices own the elements,
and every other rank sends each device its shard and gets the sum back. What a CPU would do for sums inside its own
island costs it more than the copies to and from the devices' rings, and devices add at the speed of their memory."""

from __future__ import annotations

from hetccl.core.algorithms.common import (
    Places,
    Shared,
    averages_by,
    island_only,
    prescaled,
    segment_elements,
)
from hetccl.core.algorithms.shards import Shards
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, Plan, PlanBuilder
from hetccl.core.topology import Island, Topology
from hetccl.errors import UnsupportedError

__all__ = ["MOST_SPOKES", "hub_of", "star"]

MOST_SPOKES = 7  # contributions that a flow combines with its own
SEGMENT = 32 << 20  # bytes: chunks overlap within one, and a device's library takes little time for so much


def hub_of(topology: Topology) -> Island | None:
    """The island that a star has in its middle: the only one of devices, on the direct path, with ways from each of its
    border ranks to all the other ranks, which are few. None: there is no such island."""
    devices = [i for i in topology.islands if not i.host_memory]
    if len(devices) != 1 or not devices[0].direct or len(topology.islands) < 2:
        return None
    hub, others = devices[0], [r for i in topology.islands if i.host_memory for r in i.ranks]
    linked = all(topology.linked(p, q) for p in hub.borders for q in others)
    return hub if linked and len(others) <= MOST_SPOKES else None


def star(topology: Topology, shared: Shared, rank: int, places: Places | None = None) -> Plan:
    """2 S border bytes for each rank in host memory, half of them each way. Raises `UnsupportedError` where no island
    can be the middle."""
    hub, isl, border = hub_of(topology), topology.island_of(rank), topology.border
    if hub is None:
        raise UnsupportedError(
            f"all_reduce by star: it takes one island of devices on the direct path, linked with at most {MOST_SPOKES} "
            "ranks in host memory"
        )
    b = PlanBuilder(units=border.units)
    before, after = averages_by(shared, topology.size)
    # the library reduces the next segment before it spreads this one
    shift = int(isl.size > 1 and isl.index == hub.index)
    buffer = prescaled(b, isl, shared, [b.whole(Buffer.IN)], before, shift)
    device_blocks = host_blocks = int(buffer != Buffer.IN)
    ready = len(b.steps) - 1 if b.steps else -1
    if isl.index == hub.index:
        shards = Shards(topology, b, rank)
        if isl.size > 1:
            last, used = shards.partials(shared, buffer, device_blocks, shift)
            ready = max(ready, last)
            device_blocks, host_blocks = device_blocks + used, host_blocks + used
        mine, done = shards.mine(Buffer.OUT), -1
        if mine is not None:
            spokes = tuple(r for i in topology.islands if i.index != hub.index for r in i.ranks)
            position = sum(len(i.ranks) for i in topology.islands[: hub.index])
            part = mine if isl.size > 1 else mine.on(buffer)
            own = Flow(
                FlowKind.OWN, Channel.CONTRIBUTE, spokes, part, mine, position, give_back=True, finish=after != 1.0
            )
            done = b.border([own], island_only(b, ready))
        if isl.size > 1:
            shards.spread(shared, done)
    else:
        cuts, n = border.cuts(hub.index), len(hub.borders)
        first = topology.size - rank  # spokes begin with different devices
        ways = [(first + x) % n for x in range(n)]
        flows = [
            Flow(FlowKind.SEND, Channel.CONTRIBUTE, (hub.borders[x],), b.range(buffer, cuts[x], cuts[x + 1]))
            for x in ways
        ]
        flows += [
            Flow(FlowKind.RECV, Channel.RESULT, (hub.borders[x],), dst=b.range(Buffer.OUT, cuts[x], cuts[x + 1]))
            for x in ways
        ]
        b.border(flows, island_only(b, ready))
    return Plan(
        shared.op,
        shared.dtype,
        shared.redop,
        0,
        rank,
        "star",
        "star",
        b.units,
        segment_elements(topology, shared, b.units, SEGMENT if hub.size > 1 else 0),
        tuple(b.steps),
        tuple(b.flows),
        device_blocks=device_blocks,
        host_blocks=0 if isl.host_memory else host_blocks,
        divisor=after,
        scale_divisor=before,
    )
