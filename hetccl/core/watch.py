# SPDX-License-Identifier: Apache-2.0
"""Ends what the driving thread cannot end itself: it may sit in a call of a BLOCKING vendor library.

Twice a second: a loss or an abort that is old enough for the driver to have seen it, or a deadline that has passed,
fails the communicator, which aborts the library's call. In a library without abort the call stays; then the process
says why and ends (design D7), for nothing else would.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from hetccl.core._engine import Core
from hetccl.core.failures import ABORTED, PEER_LOST, TIMED_OUT

__all__ = ["EXIT_STUCK", "Watch"]

EXIT_STUCK = 70
PATIENCE = 0.4  # seconds that the driver gets to see news itself
STUCK_AFTER = 3.0
STUCK_AFTER_ABORT = 15.0  # nobody has died, so a call that all have begun returns, on a busy machine late


class Watch:
    """One communicator's; `tick` is called by the reactor. `aborted_by` tells which rank aborted, -1 if none did;
    `explain` turns the failure into text."""

    def __init__(
        self, core: Core, size: int, state: Callable[[int], int], aborted_by: Callable[[], int], can_abort: bool,
        explain: Callable[[], str],
    ) -> None:  # fmt: skip
        self._core = core
        self._size = size
        self._state, self._aborted_by = state, aborted_by
        self._can_abort = can_abort
        self._explain = explain
        self._noticed: float | None = None
        self._stuck: float | None = None

    def tick(self) -> None:
        core = self._core
        now = time.monotonic()
        if core.failed:
            self._end_stuck_call(now)
            return
        if not core.pending:
            return
        late = core.in_call
        if late is not None and late > PATIENCE:
            core.fail(TIMED_OUT, "island")
            return
        lost = tuple(r for r in range(self._size) if self._state(r) == 2)
        if not lost and self._aborted_by() < 0:
            self._noticed = None
            return
        self._noticed = self._noticed or now
        if late is not None and now - self._noticed >= PATIENCE:
            core.fail(PEER_LOST if lost else ABORTED, "", lost)

    def _end_stuck_call(self, now: float) -> None:
        if self._can_abort or self._core.in_call is None:
            self._stuck = None
            return
        self._stuck = self._stuck or now
        if now - self._stuck > (STUCK_AFTER_ABORT if self._core.failed == ABORTED else STUCK_AFTER):
            print(f"hetccl: {self._explain()}\nhetccl: the vendor's library cannot be aborted "
                  f"and its call does not return; "
                  f"this process ends with code {EXIT_STUCK}", file=sys.stderr, flush=True)  # fmt: skip
            os._exit(EXIT_STUCK)
