# SPDX-License-Identifier: Apache-2.0
"""The vendor communicators of one rank: its island's, and those of the groups of island ranks that it belongs to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from hetccl.core._parting import Parting
from hetccl.core.groups import groups_of
from hetccl.core.store import StoreView
from hetccl.core.topology import Topology
from hetccl.errors import HetcclError
from hetccl.tables import CclTable, DeviceTable
from hetccl.vendors.base import Vendor

__all__ = ["PARTING_SECONDS", "VendorComms", "forget_partings", "still_parting"]

log = logging.getLogger("hetccl")

ABORT = 2  # HETCCL_CCL_ABORT
CAUSE_SECONDS = 1.5  # how long the true cause of a failure is waited for
PARTING_SECONDS = 5.0  # how long the vendor's library may take to leave the other ranks

_parting: list[Parting] = []  # those of this process that took longer


class VendorComms:
    """Handles of the vendor's library. `island` is 0 in an island of one rank, which needs none."""

    def __init__(self, ccl: CclTable, device: DeviceTable) -> None:
        self._ccl, self._device = ccl, device
        self.island = 0
        self.groups: list[tuple[int, tuple[int, ...]]] = []  # handle (0: not in it) and island ranks, but the island

    def join(
        self, view: StoreView, vendor: Vendor, topology: Topology, rank: int, deadline: float, groups: bool,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        """Blocks until all ranks of the island have joined; `groups`: also the communicators of its parts, in one order
        on all ranks. What has been joined is destroyed if a later one fails. `check` raises once waiting is vain: it is
        called now and then, for the library itself would wait for ranks that will not come until the deadline."""
        island = topology.island_of(rank)
        me = island.ranks.index(rank)
        if island.size == 1:
            return
        vendor.local_ranks = topology.host_ids.count(topology.host_ids[rank])
        wanted = (
            groups_of(island.size, len(topology.islands)) if groups and island.splits else ((*range(island.size),),)
        )
        try:
            for number, members in enumerate(wanted):
                handle = 0
                if me in members:
                    ranks = [island.ranks[m] for m in members]
                    handle = _join_one(view, vendor, f"island/{island.index}/{number}", ranks, rank, deadline, check)
                if number:
                    self.groups.append((handle, members))
                else:
                    self.island = handle
        except BaseException:
            self.destroy()
            raise

    def abort(self) -> None:
        """Ends running calls, where the library can. Never blocks."""
        if self._ccl.caps & ABORT:
            for handle in self._handles():
                self._ccl.abort(handle)

    def destroy(self, patience: float = PARTING_SECONDS) -> None:
        """After the last call has ended. Idempotent; what the library complains of then is of no interest any more.

        The library may wait until the other ranks leave as well: at most `patience` seconds pass here for all handles
        together, and what has not ended then goes on by itself.
        """
        handles = self._handles()
        self.island, self.groups = 0, []
        until = time.monotonic() + patience
        for handle in reversed(handles):
            try:
                parting = Parting(self._ccl, self._device, handle)
            except MemoryError as error:
                log.warning("a communicator of the vendor's library stays behind: %s", error)
                continue
            if not parting.wait(until - time.monotonic()):
                log.info("the vendor's library waits for other ranks to leave a communicator that this one has left")
                _parting.append(parting)

    def _handles(self) -> list[int]:
        return [h for h in (self.island, *(handle for handle, _ in self.groups)) if h]


def still_parting(patience: float) -> list[Parting]:
    """What this process has begun to destroy and has not destroyed when `patience` seconds have passed."""
    until = time.monotonic() + patience
    _parting[:] = [parting for parting in _parting if not parting.wait(until - time.monotonic())]
    return list(_parting)


def forget_partings() -> None:
    """In a forked child, which has not the threads."""
    _parting.clear()


def _join_one(
    view: StoreView, vendor: Vendor, key: str, ranks: Sequence[int], rank: int, deadline: float,
    check: Callable[[], None],
) -> int:  # fmt: skip
    if rank == ranks[0]:
        unique_id = vendor.new_id()
        view.put(key, unique_id)
    else:
        unique_id = view.take(key, "island", ranks[0], check)
    try:
        return vendor.create_comm(
            ranks.index(rank), len(ranks), unique_id, max(1.0, deadline - time.monotonic()), check
        )  # fmt: skip
    except HetcclError:
        _say_the_cause(check)
        raise


def _say_the_cause(check: Callable[[], None]) -> None:
    """Raises what `check` does if it does so soon. A library that fails, or a mate that leaves, is often only the
    consequence of another rank's end, which the control plane knows of a moment later."""
    until = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < until:
        check()
        time.sleep(0.05)
