# SPDX-License-Identifier: Apache-2.0
"""The process's end and forks: every live communicator is told, whatever the program forgot."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetccl.core import _engine
from hetccl.core.reactor import reactor, stop_reactor
from hetccl.core.vendor_comms import PARTING_SECONDS, forget_partings, still_parting
from hetccl.core.watch import EXIT_STUCK
from hetccl.core.work import stop_completion_thread

if TYPE_CHECKING:
    from hetccl.core.communicator import Communicator

__all__ = ["forget", "remember"]

TURN_SECONDS = 1.0  # after so long, the next communicator is left beside one that has not been left yet
EXIT_SECONDS = 60.0  # after so long, what keeps the process from ending is not going to end itself

_live: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()  # and which one of this process it is
_numbers = itertools.count()
_abandoned = False
_leftovers: list[Callable[[list[int]], object]] = []  # of vendors whose call was left behind
_kept: list[Communicator] = []  # whose device may still use what they hold
_registered = False


def remember(comm: Communicator) -> None:
    """Registered with the first communicator, so that our exit runs before the exit functions of libraries loaded
    earlier."""
    global _registered
    _live[comm] = next(_numbers)
    if not _registered:
        _registered = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)


def forget(comm: Communicator, abandoned: bool, kept: bool) -> None:
    """`abandoned`: a vendor's call was left behind, so this process must not run that library's own exit code. `kept`:
    what the communicator holds must stay as long as the process."""
    global _abandoned
    if kept:
        _kept.append(comm)
    _abandoned = _abandoned or abandoned
    remove = getattr(comm._joined.vendor, "remove_leftovers", None)
    if abandoned and remove is not None:
        _leftovers.append(remove)
    _live.pop(comm, None)


def _at_exit() -> None:
    _leave_all()
    stop_completion_thread()
    _engine.stop_engine()
    stuck = [parting for parting in still_parting(0.0) if parting.stuck_for_good]
    stop_reactor()
    if _abandoned or stuck:
        # Its thread sits in a library that can neither be aborted nor unloaded.
        logging.getLogger("hetccl").warning(
            "leaving at once: a call of a vendor's library, or what its device does, could not be ended"
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for remove in _leftovers:
            with contextlib.suppress(Exception):
                remove([os.getpid()])
        os._exit(1)


def _leave_all() -> None:
    """The other ranks hear of it at once. Then the vendors' communicators go, the newest first: a library may wait in
    one until its other ranks leave it, so all ranks must take them in one order, and programs make them in one. Where
    one keeps us all the same, the others go beside it."""
    # A forked child shares the parent's memory: it must say nothing.
    comms = [comm for comm in sorted(_live, key=_live.__getitem__, reverse=True) if not (comm._closed or comm._forked)]
    if comms:
        _end_in(EXIT_SECONDS)
    for comm in comms:
        with contextlib.suppress(Exception):
            comm._leave_at_exit()
    until = time.monotonic() + PARTING_SECONDS
    for comm in comms:
        with contextlib.suppress(Exception):
            comm._part(min(TURN_SECONDS, until - time.monotonic()))
    still_parting(until - time.monotonic())


def _end_in(seconds: float) -> None:
    """Ends the process if the reactor still ticks then: something waits without a deadline, a device's driver for
    one, and nobody would ever know for what."""
    until = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() < until:
            return
        with contextlib.suppress(Exception):
            print(f"hetccl: leaving has taken more than {seconds:.0f} s; this process ends with code {EXIT_STUCK}. "
                  "Its threads are in:", file=sys.stderr, flush=True)  # fmt: skip
            faulthandler.dump_traceback(sys.stderr)
        os._exit(EXIT_STUCK)

    reactor().every_tick(look)


def _after_fork() -> None:
    _engine.after_fork()
    forget_partings()
    for comm in list(_live):
        comm._after_fork()
