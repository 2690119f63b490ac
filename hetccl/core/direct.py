# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of a communicator take the direct path between their devices (docs/design/device-path.md).

A plan of one rank fits only the plans of the others, so it is all or none. Every rank tries to open its half and says
whether it could: on the arrival board where all are on one host, else through the store, where rank 0 gathers the
answers and publishes them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from hetccl.core import _board
from hetccl.core._engine import Core
from hetccl.core.bootstrap import Joined
from hetccl.core.topology import Record
from hetccl.errors import TimedOutError

__all__ = ["agree"]

log = logging.getLogger("hetccl.direct")

YES, NO, SPINS = 1, 2, 4  # bits of an answer
HOW = {"auto": 0, "resident": 1, "kernel": 2, "host": 3}  # HX_HOW_* of direct.h


def agree(core: Core, joined: Joined, wanted: str, threads: int) -> bool:
    """True if every rank has opened its half. Blocks until all have answered, at most until the deadline for joining;
    raises as joining does.

    `wanted` is HETCCL_DEVICE_PATH, `threads` HETCCL_CPU_THREADS. A forced HETCCL_COMBINE is about the staged path.
    """
    topology, control = joined.topology, joined.control
    devices = any(not i.host_memory for i in topology.islands)
    if len(topology.islands) == 1 or not devices or joined.combine != "auto":
        return False
    many = len(set(topology.host_ids)) > 1
    said = "HETCCL_DEVICE_PATH=staged" if wanted == "staged" else ""
    if not said:
        hosts = sum(i.size for i in topology.islands if i.host_memory)
        said = core.open_direct(HOW[wanted], not shares_device(joined.records, control.rank), hosts, threads)
    answer = NO if said else YES | SPINS * core.spins
    answers = _stored(joined, answer) if many else _on_board(joined, answer)
    if any(a & NO for a in answers):
        core.agree_direct(None)
        if said and wanted != "staged":
            # Between hosts staging may be all that a transport offers: with RDMA it is nearly as fast.
            log.log(
                logging.INFO if many else logging.WARNING,
                "rank %d cannot take the direct path between devices, so all ranks stage what crosses islands, which "
                "is several times slower: %s",
                control.rank,
                said,
            )
        return False
    core.agree_direct(bytes(bool(a & SPINS) for a in answers))
    return True


def shares_device(records: list[Record], rank: int) -> bool:
    """Whether kernels of this rank that wait for another rank's could keep those from running: they share a device, or
    might."""
    mine = records[rank]
    places = Counter((r.host_id, r.place) for r in records)
    return not mine.place or places[(mine.host_id, mine.place)] > 1


def _stored(joined: Joined, answer: int) -> list[int]:
    """One put a rank, one published by rank 0."""
    view, rank, size = joined.view, joined.control.rank, joined.control.size
    view.put(f"direct/{rank}", bytes([answer]))
    if rank == 0:
        found = view.take_all({r: f"direct/{r}" for r in range(size)}, "connect")
        view.put("direct", b"".join(found[r] for r in range(size)))
    return list(view.take("direct", "connect", 0))


def _on_board(joined: Joined, answer: int) -> list[int]:
    control = joined.control
    _board.set_direct(control.address, control.rank, answer)
    checked = time.monotonic()
    while True:
        answers = [_board.direct(control.address, r) for r in range(control.size)]
        missing = tuple(r for r, a in enumerate(answers) if not a)
        if not missing:
            return answers
        now = time.monotonic()
        if now > joined.deadline:
            raise TimedOutError(
                f"phase connect: ranks {list(missing)} did not say whether they can share memory with their devices",
                phase="connect",
                missing=missing,
            )
        if now - checked > 0.5:
            checked = now
            joined.check()
        time.sleep(0.001)
