# SPDX-License-Identifier: Apache-2.0
"""Which algorithms serve which topologies."""

from __future__ import annotations

from hetccl.core.algorithms import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from hetccl.core.algorithms.common import Algorithm
from hetccl.core.topology import Topology

__all__ = ["serves"]

# Go around missing links, keep to the border ranks that are allowed, and cut shards by their speeds.
ANYWHERE = (
    all_gather.direct,
    all_reduce.owners,
    all_to_all.direct,
    broadcast.chain,
    gather.direct,
    reduce.chain,
    reduce_scatter.direct,
    scatter.direct,
)
# Keep to the border ranks that are allowed, but want every island to reach every other.
MESHED = (all_reduce.exchange,)


def serves(algorithm: Algorithm, topology: Topology) -> bool:
    """Whether an algorithm can plan for a topology. The others take every rank to be at the border, all equally fast,
    and every pair of islands to be linked."""
    border = topology.border
    if border.plain or algorithm in ANYWHERE:
        return True
    return border.mesh and algorithm in MESHED
