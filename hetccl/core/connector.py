# SPDX-License-Identifier: Apache-2.0
"""Links of one communicator: dials border pairs when it is made, other pairs when they first meet, and takes
incoming ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from hetccl.core.reactor import reactor, spawn
from hetccl.core.topology import Record
from hetccl.errors import TimedOutError, TransportError
from hetccl.tables import TransportTable
from hetccl.transports.base import Link, Transport

__all__ = ["COLLECTIVE", "P2P", "Connector"]

log = logging.getLogger("hetccl.connector")

COLLECTIVE, P2P = "collective", "p2p"
DIAL_TIMEOUT = 10.0


class Connector:
    """`arrived(link, transport)` is called for every link, dialled or taken, with the transport's name and table."""

    def __init__(
        self,
        rank: int,
        transports: Sequence[Transport],
        tables: dict[str, TransportTable],
        arrived: Callable[[Link, Transport, bool], None],
    ) -> None:
        self._rank = rank
        self._transports = list(transports)
        self.tables = tables
        self._arrived = arrived
        self._changed = threading.Condition()
        self._linked: dict[tuple[int, str], str] = {}  # (peer, purpose) -> description
        self._dialling = threading.Lock()
        self._closed = False
        self.records: Sequence[Record] = ()

    def start(self, records: Sequence[Record]) -> None:
        self.records = records
        for transport in self._transports:
            self._watch(transport)

    def connect_border(
        self, pairs: Sequence[tuple[int, int]], deadline: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Connects this rank's pairs; the lower rank of a pair dials. Blocks until all are linked.

        `check` is called every half second and raises if waiting has become vain.
        """
        waiting = set()
        for low, high in pairs:
            if low == self._rank:
                self._dial(high, COLLECTIVE, deadline)
            elif high == self._rank:
                waiting.add(low)
        with self._changed:
            while missing := {p for p in waiting if (p, COLLECTIVE) not in self._linked}:
                left = deadline - time.monotonic()
                if left <= 0:
                    ranks = tuple(sorted(missing))
                    raise TimedOutError(
                        f"phase connect: ranks {list(ranks)} did not connect to rank {self._rank} "
                        f"({', '.join(self._place(r) for r in ranks)})",
                        phase="connect",
                        missing=ranks,
                    )
                check()
                self._changed.wait(min(left, 0.5))

    def connect_p2p(self, peer: int) -> None:
        """Dials the link for messages to `peer`, once."""
        with self._dialling:
            self._dial(peer, P2P, time.monotonic() + DIAL_TIMEOUT)

    def path(self, peer: int) -> str | None:
        """How this rank reaches a peer: 'shm', 'tcp eth0', or None if they are not linked."""
        return self._linked.get((peer, COLLECTIVE)) or self._linked.get((peer, P2P))

    def close(self) -> None:
        self._closed = True
        for transport in self._transports:
            if transport.fileno() >= 0:
                reactor().unwatch(transport.fileno())
            transport.close()

    def _dial(self, peer: int, purpose: str, deadline: float) -> None:
        reasons = []
        theirs = self.records[peer].transports
        for transport in self._transports:
            if transport.name not in theirs:
                reasons.append(f"{transport.name}: rank {peer} does not offer it")
                continue
            if not transport.reachable(theirs[transport.name]):
                reasons.append(f"{transport.name}: not on the same host or network")
                continue
            try:
                left = max(0.1, min(DIAL_TIMEOUT, deadline - time.monotonic()))
                link = transport.dial(peer, theirs[transport.name], purpose, left)
            except (TransportError, TimedOutError) as error:
                reasons.append(f"{transport.name}: {error}")
                log.warning("rank %d cannot reach rank %d by %s: %s", self._rank, peer, transport.name, error)
                continue
            self._take(link, transport, True)
            return
        raise TransportError(
            f"no path from rank {self._rank} ({self._place(self._rank)}) to rank {peer} ({self._place(peer)}). "
            + "; ".join(reasons or ["no transport is in use"])
            + ". HETCCL_TRANSPORTS names the paths that may be used; `hetccl doctor` shows which work here",
            peer=peer,
            transport="",
        )

    def _place(self, rank: int) -> str:
        return f"{self.records[rank].vendor} on {self.records[rank].host}"

    def _take(self, link: Link, transport: Transport, dialled: bool) -> None:
        self._arrived(link, transport, dialled)
        with self._changed:
            self._linked[(link.peer, link.purpose)] = transport.describe()
            self._changed.notify_all()

    def _watch(self, transport: Transport) -> None:
        fd = transport.fileno()

        def readable() -> None:
            # The handshake with whoever knocks may take seconds: not on the reactor's thread, and one at a time.
            reactor().unwatch(fd)
            spawn(lambda: self._accept(transport, readable, fd), f"accept-{transport.name}")

        reactor().watch(fd, readable)

    def _accept(self, transport: Transport, again: Callable[[], None], fd: int) -> None:
        try:
            if not self._closed:
                link = transport.accept(5.0)
                if link is not None:
                    self._take(link, transport, False)
        except Exception as error:  # a stranger must not end the listening
            if not self._closed:
                log.warning("a connection over %s failed: %s", transport.name, error)
        finally:
            if not self._closed:
                reactor().watch(fd, again)
