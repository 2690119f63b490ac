# SPDX-License-Identifier: Apache-2.0
"""Links that are slow are kept busy: messages to several peers take turns."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import hetccl
from hetccl.core.plan import FlowKind
from hetccl.core.tracing import Traced
from hetccl.core.verify.replay import Did
from hetccl.testing.launch import run

RATE = {"HETCCL_BORDER_RATE": "50M"}


def sends_of_a_single(rank: int, size: int) -> tuple[int, list[int]]:
    """How many chunks each of this rank's messages has; and of all chunks, in order, to which peer they went."""
    with hetccl.init() as comm:
        kept: list[Traced] = []
        comm.tracing.keep = kept
        data = np.full(1 << 19, rank + 1.0, np.float32)
        comm.all_reduce(data)
        assert (data == size * (size + 1) / 2).all()
        (only,) = (t.run for t in kept if t.run.count == data.size)
        flows = only.plan.flows
        order = [flows[e.number].peers[0] for e in only.events
                 if e.what == Did.SEND and flows[e.number].kind == FlowKind.SEND]  # fmt: skip
        return max(map(order.count, set(order)), default=0), order


def test_messages_to_several_peers_take_turns() -> None:
    """The rank of an island of one sends to both ranks of the pair. Each gets its chunks at the link's pace, so that
    neither's own link idles; a few chunks of lead are what a peer's wake-up takes."""
    got = run(sends_of_a_single, "host@a:2,host@b:1,host@c:1", timeout=100,
              env={**RATE, "HETCCL_TRACE_STEPS": "20000"})  # fmt: skip
    for chunks, order in got[2:]:
        assert chunks >= 8 and set(order) >= {0, 1}, order
        in_turn = sum(a != b for a, b in pairwise(p for p in order if p in (0, 1)))
        assert in_turn >= 0.8 * (2 * chunks - 1), order
