# SPDX-License-Identifier: Apache-2.0
"""An operation in flight, and the thread that tells its owner when it has ended."""

from __future__ import annotations

import os
import threading

from hetccl.core._engine import Work, complete_some

__all__ = ["Work", "ensure_completion_thread", "stop_completion_thread"]

_lock = threading.Lock()
_thread: threading.Thread | None = None
_stop = False


def ensure_completion_thread() -> None:
    """The one thread that runs callbacks and drops references of completed works; started with the first
    communicator."""
    global _thread
    with _lock:
        if _thread is None and not _stop:
            _thread = threading.Thread(target=_run, name="hetccl-completion", daemon=True)
            _thread.start()


def stop_completion_thread() -> None:
    """At interpreter exit: hands out what has completed and joins."""
    global _stop
    _stop = True
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(5)


def _run() -> None:
    while not _stop:
        complete_some(0.2)
    complete_some(0.0)


def _forget() -> None:
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
