# SPDX-License-Identifier: Apache-2.0
"""One daemon thread a process that watches listeners and control sockets of all communicators, and ticks twice a
second."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Reactor", "reactor"]

log = logging.getLogger("hetccl")

TICK = 0.5


class Reactor:
    """Calls back when a descriptor is readable. Callbacks must be short; what may block gets a thread (see `spawn`)."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._calls: list[Callable[[], Any]] = []
        self._ticks: set[Callable[[], Any]] = set()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._selector.register(self._ours, selectors.EVENT_READ, self._drain)

    def watch(self, fd: int, readable: Callable[[], Any]) -> None:
        self._call(lambda: self._selector.register(fd, selectors.EVENT_READ, readable))

    def unwatch(self, fd: int) -> None:
        """No callback for `fd` begins after this has returned. Not from the reactor's own callbacks' locks."""
        done = threading.Event()

        def remove() -> None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
            done.set()

        if threading.current_thread() is self._thread:
            remove()
        else:
            self._call(remove)
            done.wait(5)

    def every_tick(self, fn: Callable[[], Any]) -> None:
        self._call(lambda: self._ticks.add(fn))

    def no_tick(self, fn: Callable[[], Any]) -> None:
        self._call(lambda: self._ticks.discard(fn))

    def stop(self) -> None:
        """Ends the thread; blocks until its callback in progress has returned."""
        self._stop = True
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _call(self, fn: Callable[[], Any]) -> None:
        with self._lock:
            self._calls.append(fn)
            if self._thread is None and not self._stop:
                self._thread = threading.Thread(target=self._run, name="hetccl-reactor", daemon=True)
                self._thread.start()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._theirs.send(b"x")

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            while self._ours.recv(4096):
                pass

    def _run(self) -> None:
        while not self._stop:
            for key, _ in self._selector.select(TICK):
                self._guard(key.data)
            with self._lock:
                calls, self._calls = self._calls, []
            for fn in [*calls, *self._ticks]:
                self._guard(fn)

    def _guard(self, fn: Callable[[], Any]) -> None:
        try:
            fn()
        except Exception:
            if not self._stop:
                log.exception("the control thread met an error and goes on")


def spawn(fn: Callable[[], Any], name: str) -> None:
    """Runs something that may block in a short-lived daemon thread."""
    threading.Thread(target=fn, name=f"hetccl-{name}", daemon=True).start()


_reactor: Reactor | None = None
_reactor_lock = threading.Lock()


def reactor() -> Reactor:
    """The process's own; started at first use, gone in a forked child."""
    global _reactor
    with _reactor_lock:
        if _reactor is None:
            _reactor = Reactor()
        return _reactor


def _forget() -> None:
    global _reactor, _reactor_lock
    _reactor, _reactor_lock = None, threading.Lock()


def stop_reactor() -> None:
    if _reactor is not None:
        _reactor.stop()


os.register_at_fork(after_in_child=_forget)
