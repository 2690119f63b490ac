# SPDX-License-Identifier: Apache-2.0
"""One rank's side of a transport under test: opens it, accepts in a thread, dials, and moves whole messages."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hetccl.core import registry
from hetccl.tables import TransportTable
from hetccl.testing.meeting import Meeting
from hetccl.transports.base import Link, TransportRequest

__all__ = ["Peer"]

SECRET = bytes(range(32))


class Peer:
    """A transport, opened for this rank. The higher rank of a pair dials the lower one."""

    def __init__(
        self, rank: int, size: int, name: str, secret: bytes = SECRET, listen: bool = True, turn: str = ""
    ) -> None:
        self.rank, self.size, self.turn = rank, size, turn
        self.meeting = Meeting()
        job = f"conformance{os.environ['MASTER_PORT']}{turn}"
        request = TransportRequest(rank, size, job, socket.gethostname(), secret, "127.0.0.1")
        self.transport = registry.transport(name).open(request)
        self.table = TransportTable(self.transport.table)
        self._links: list[int] = []
        self._accepted: dict[tuple[int, str], Link] = {}
        self._changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        if listen:
            self.meeting.put(f"address{turn}-{rank}", json.dumps(self.transport.address()).encode())
            self._thread.start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        if self._thread.is_alive():
            self._thread.join(10)
        self.transport.close()

    def address_of(self, other: int) -> dict[str, Any]:
        """What `other` published."""
        address: dict[str, Any] = json.loads(self.meeting.get(f"address{self.turn}-{other}"))
        assert self.transport.reachable(address), f"rank {other} on the same host is said to be out of reach"
        return address

    def connect(self, other: int, purpose: str = "collective", timeout: float = 20.0) -> int:
        """The endpoint of the link with `other`."""
        if self.rank > other:
            link = self.transport.dial(other, self.address_of(other), purpose, timeout)
        else:
            with self._changed:
                came = self._changed.wait_for(lambda: (other, purpose) in self._accepted, timeout)
            assert came, f"rank {other} did not connect within {timeout:g} s"
            link = self._accepted[other, purpose]
        assert link.peer == other and link.purpose == purpose and link.endpoint
        self._links.append(link.endpoint)
        return link.endpoint

    def send(self, link: int, data: np.ndarray[Any, Any], channel: int = 0, fingerprint: int = 0) -> None:
        """Blocks until the whole message is handed over."""
        self.until(lambda: self.table.send(link, data, channel, fingerprint) or None, "send", link)

    def recv(
        self, link: int, nbytes: int, channel: int = 0, fingerprint: int = 0, timeout: float = 20.0
    ) -> np.ndarray[Any, Any]:
        """The next message of the channel, which must have this length and fingerprint."""
        buffer = np.zeros(nbytes, np.uint8)
        self.until(lambda: self.table.recv(link, buffer, channel, fingerprint) or None, "recv", link, timeout)
        return buffer

    def exchange(
        self, link: int, mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], fingerprint: int = 0
    ) -> None:
        """Sends and receives at the same time: neither side may wait for the other to receive first."""
        sent = received = False
        deadline = time.monotonic() + 20
        while not (sent and received):
            sent = sent or self.table.send(link, mine, 0, fingerprint)
            received = received or self.table.recv(link, theirs, 0, fingerprint)
            self.table.progress(link)
            assert time.monotonic() < deadline, f"exchange: sent {sent}, received {received} after 20 s"

    def until(self, attempt: Callable[[], Any], what: str, link: int, timeout: float = 20.0) -> Any:
        """Calls `attempt` until it gives something, pushing the link along meanwhile. Raises the link's own error."""
        deadline = time.monotonic() + timeout
        while True:
            found = attempt()
            if found is not None:
                return found
            self.table.progress(link)
            self.table.ep_error(link)
            assert time.monotonic() < deadline, f"{what} has not succeeded within {timeout:g} s"
            time.sleep(0)  # let the peer run where cores are few

    def close(self, link: int) -> None:
        """Closes one link: nothing pushes it along any more."""
        self._links.remove(link)
        self.table.ep_close(link)

    def finish(self) -> None:
        """Waits for all ranks, so that no one closes a link that another still reads."""
        self.barrier(f"finish{self.turn}")

    def barrier(self, name: str) -> None:
        """Waits for all ranks, pushing along what is unsent meanwhile."""
        self.meeting.put(f"{name}-{self.rank}", b"")
        for other in range(self.size):
            self.wait(f"{name}-{other}")

    def wait(self, name: str, timeout: float = 30.0) -> bytes:
        """What some rank puts under `name`; pushes along what is unsent meanwhile."""
        deadline = time.monotonic() + timeout
        while (value := self.meeting.look(name)) is None:
            for link in self._links:
                self.table.progress(link)
            assert time.monotonic() < deadline, f"no rank has put {name!r} within {timeout:g} s"
            time.sleep(0.001)
        return value

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self.transport.fileno(), select.POLLIN)
        while not self._stop:
            if not poller.poll(50):
                continue
            link = self.transport.accept(5.0)
            if link is not None:
                with self._changed:
                    self._accepted[link.peer, link.purpose] = link
                    self._changed.notify_all()
