# SPDX-License-Identifier: Apache-2.0
"""A timeline in the trace event format, which Perfetto and chrome://tracing open: a process a rank, a thread a lane."""

from __future__ import annotations

import json
from typing import Any

from hetccl.core.simulate import Timeline
from hetccl.core.topology import Topology

__all__ = ["trace"]

LANES = {"island": 0, "border": 1}


def trace(topology: Topology, timeline: Timeline, title: str) -> str:
    """The file's text. Times are microseconds from the start of the operation."""
    events: list[dict[str, Any]] = []
    for rank in sorted({s.rank for s in timeline.spans}):
        island = topology.island_of(rank)
        name = f"rank {rank} ({island.name}, {topology.hosts[rank]})" if topology.hosts else f"rank {rank}"
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
        events += [
            {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": f"{lane} lane"}}
            for lane, tid in LANES.items()
        ]
    events += [
        {
            "ph": "X",
            "pid": s.rank,
            "tid": LANES[s.lane],
            "name": s.name,
            "cat": s.stage,
            "ts": s.start * 1e6,
            "dur": (s.end - s.start) * 1e6,
            "args": {"segment": s.segment, "bytes": s.nbytes, "stage": s.stage},
        }
        for s in timeline.spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"title": title}}) + "\n"
