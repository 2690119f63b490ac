# SPDX-License-Identifier: Apache-2.0
"""Turns a status of the engine into the error that a user reads: what was asked, what was found, what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from hetccl import errors
from hetccl.core.topology import Topology
from hetccl.types import DType, Op, RedOp

__all__ = ["Failures"]

UNSUPPORTED, INVALID, PEER_LOST, TIMED_OUT, ABORTED, MISMATCH, NO_MEMORY, SYSTEM, VENDOR = range(2, 11)

BoardCall = tuple[int, int, int, int, int, int, int]  # rank, op, dtype, redop, root, count, sequence
BY_US = ("abort() was called", "it was closed", "interrupted")  # how texts begin when this rank itself gave up
REBUILD = "This communicator is dead: close it and create a new one without the lost ranks."


class Failures:
    """Knows who is where, so that it can name them. `calls` reads the arrival board, `aborted_by` who aborted."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        calls: Callable[[], Sequence[BoardCall]],
        aborted_by: Callable[[], int],
        states: Callable[[int], int],
    ) -> None:
        self._topology = topology
        self._rank = rank
        self._calls = calls
        self._aborted_by = aborted_by
        self._states = states

    def __call__(self, status: int, said: str, ranks: tuple[int, ...]) -> errors.HetcclError:
        by = self._aborted_by()
        if status in (PEER_LOST, SYSTEM) and by >= 0 and by in ranks:
            status = ABORTED  # it aborted, then left
        if status == ABORTED and by < 0 and said and not said.startswith(BY_US) and self._someone_died():
            status, said = PEER_LOST, ""  # an island mate noticed first and aborted the vendor's call
        if status in (PEER_LOST, SYSTEM):
            # a connection that broke usually means that its other end has died
            return self._lost(said, ranks)
        if status == TIMED_OUT:
            return self._timed_out(said, ranks)
        if status == MISMATCH or (status == ABORTED and self._mismatch()):
            return errors.MismatchError(
                f"ranks called different operations. {self._mismatch() or said}. "
                "Every rank must call the same operations in "
                "the same order with the same dtype, operator, root and number of elements",
                ranks=ranks,
            )
        if status == ABORTED:
            if by >= 0 and by != self._rank:
                return errors.AbortedError(
                    f"rank {by} ({self._where(by)}) aborted the communicator. {REBUILD}", ranks=(by,)
                )
            return errors.AbortedError(
                f"the communicator was aborted{f': {said}' if said else ''}. {REBUILD}", ranks=(self._rank,)
            )
        if status == UNSUPPORTED:
            return errors.UnsupportedError(said or "this combination is not supported")
        if status == NO_MEMORY:
            return errors.VendorError(said or "out of memory", vendor=self._vendor(), call="", code=status)
        if status == INVALID:
            return errors.UsageError(said or "invalid argument")
        return errors.VendorError(
            f"the library of vendor {self._vendor()} failed on rank {self._rank}: {said}. {REBUILD}",
            vendor=self._vendor(),
            call="",
            code=status,
        )

    def _someone_died(self) -> bool:
        """Waits a moment for the news: the control plane may be slower than the vendor's library."""
        for _ in range(100):
            if any(self._states(r) == 2 for r in range(self._topology.size)):
                return True
            time.sleep(0.01)
        return False

    def _lost(self, said: str, ranks: tuple[int, ...]) -> errors.HetcclError:
        dead = tuple(r for r in range(self._topology.size) if self._states(r) == 2) or ranks
        left = tuple(r for r in dead if self._states(r) == 1)
        if left:
            return errors.PeerLostError(
                f"{self._names(left)} closed the communicator while rank {self._rank} still waited for it. "
                "All ranks must call "
                f"the same operations before they close. {REBUILD}",
                ranks=left,
            )
        if not dead:
            return errors.TransportError(
                f"a connection of rank {self._rank} failed: {said}. {REBUILD}", peer=None, transport=""
            )
        detail = f" ({said})" if said else ""
        return errors.PeerLostError(
            f"lost {self._names(dead)}{detail}: the process has died or its host is unreachable. {REBUILD}", ranks=dead
        )

    def _timed_out(self, phase: str, ranks: tuple[int, ...]) -> errors.HetcclError:
        behind = self._behind()
        missing = behind or tuple(r for r in ranks if r >= 0)
        text = f"rank {self._rank} waited until the timeout in phase {phase or 'island'}"
        text += f"; missing: {self._names(missing)}" if missing else "; no rank is known to be missing"
        calls = [self._call_text(c) for c in self._calls() if c[0] in missing and c[6]]
        if calls:
            text += f" (last called: {'; '.join(calls)})"
        return errors.TimedOutError(
            text + f". Look at what these ranks do, or raise HETCCL_TIMEOUT. {REBUILD}", phase=phase, missing=missing
        )

    def _behind(self) -> tuple[int, ...]:
        """Ranks of this host that have not begun the operation that this rank is in."""
        calls = {
            c[0]: c[6] for c in self._calls() if self._topology.host_ids[c[0]] == self._topology.host_ids[self._rank]
        }
        mine = calls.get(self._rank, 0)
        return tuple(r for r, sequence in sorted(calls.items()) if sequence < mine)

    def _mismatch(self) -> str:
        """What the ranks of this host called, where it differs at the same place in their sequence."""
        calls = [c for c in self._calls() if c[6]]
        if not calls:
            return ""
        at = min(c[6] for c in calls)
        here = [c for c in calls if c[6] == at]
        if len({c[1:6] for c in here}) < 2:
            return ""
        return "; ".join(self._call_text(c) for c in here)

    def _call_text(self, call: BoardCall) -> str:
        rank, op, dtype, redop, root, count, sequence = call
        detail = f"{count} x {DType(dtype).label}"
        if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE):
            detail += f", {RedOp(redop).label}"
        if op in (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER):
            detail += f", root {root}"
        return f"rank {rank}: {Op(op).label}({detail}) as operation {sequence}"

    def _vendor(self) -> str:
        return self._topology.island_of(self._rank).name

    def _where(self, rank: int) -> str:
        return f"{self._topology.island_of(rank).name} on {self._topology.hosts[rank]}"

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {r} ({self._where(r)})" for r in ranks)
