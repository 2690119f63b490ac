# SPDX-License-Identifier: Apache-2.0
"""The process's end and forks: every live communicator is told, whatever the program forgot."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetccl.core import _engine
from hetccl.core.reactor import stop_reactor
from hetccl.core.work import stop_completion_thread

if TYPE_CHECKING:
    from hetccl.core.communicator import Communicator

__all__ = ["forget", "remember"]

_live: weakref.WeakSet[Communicator] = weakref.WeakSet()
_abandoned = False
_leftovers: list[Callable[[list[int]], object]] = []  # of vendors whose call was left behind
_registered = False


def remember(comm: Communicator) -> None:
    """Registered with the first communicator, so that our exit runs before the exit functions of libraries loaded
    earlier."""
    global _registered
    _live.add(comm)
    if not _registered:
        _registered = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)


def forget(comm: Communicator, abandoned: bool) -> None:
    """`abandoned`: a vendor's call was left behind, so this process must not run that library's own exit code."""
    global _abandoned
    _abandoned = _abandoned or abandoned
    remove = getattr(comm._joined.vendor, "remove_leftovers", None)
    if abandoned and remove is not None:
        _leftovers.append(remove)
    _live.discard(comm)


def _at_exit() -> None:
    for comm in list(_live):
        with contextlib.suppress(Exception):
            comm._leave_at_exit()
    stop_completion_thread()
    _engine.stop_engine()
    stop_reactor()
    if _abandoned:
        # Its thread sits in a library that can neither be aborted nor unloaded.
        logging.getLogger("hetccl").warning("leaving at once: a call of a vendor's library could not be ended")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for remove in _leftovers:
            with contextlib.suppress(Exception):
                remove([os.getpid()])
        os._exit(1)


def _after_fork() -> None:
    _engine.after_fork()
    for comm in list(_live):
        comm._after_fork()
