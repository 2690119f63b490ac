# SPDX-License-Identifier: Apache-2.0
"""The accepting side: listeners, connections in their handshake, and links of which some channels are still missing."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from dataclasses import dataclass

from hetccl.errors import PluginLoadError
from hetccl.native.handshake import Acceptor, HandshakeError, Session
from hetccl.native.interfaces import Address
from hetccl.transports.base import TransportRequest
from hetccl_transport_tcp._tcp import MOST_SOCKETS, link_sockets

log = logging.getLogger("hetccl.transports.tcp")

BACKLOG = 1024
MOST_PENDING = 64  # connections in their handshake at a time; the oldest goes first
ASSEMBLY_TIMEOUT = 10.0  # seconds from the first channel of a link to the last


@dataclass
class _Pending:
    sock: socket.socket
    where: str
    acceptor: Acceptor


@dataclass
class _Half:
    deadline: float
    count: int  # sockets of the link
    socks: dict[int, socket.socket]


class Listener:
    """Listens at one address a family. One epoll descriptor stands for all: it is readable when `accept` has work."""

    def __init__(self, request: TransportRequest, chosen: list[Address]) -> None:
        self.bound: list[tuple[Address, int]] = []
        self._request = request
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held by the one thread in accept
        self._closed = False
        self._socks: dict[int, socket.socket] = {}
        self._pending: dict[int, _Pending] = {}
        self._half: dict[tuple[int, str, str], _Half] = {}
        failures = []
        for family in (socket.AF_INET, socket.AF_INET6):
            for address in (a for a in chosen if a.family == family):
                try:
                    sock = _listen(address)
                except OSError as error:
                    failures.append(f"{address}: {error}")
                    continue
                self._socks[sock.fileno()] = sock
                self.bound.append((address, sock.getsockname()[1]))
                break
        if not self.bound:
            raise PluginLoadError(
                f"tcp cannot listen at any address of the chosen interface ({'; '.join(failures)}). "
                "Name another interface in HETCCL_SOCKET_IFNAME"
            )
        for failure in failures:
            log.info("not listening at %s", failure)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        for fd in (self._wake, *self._socks):
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def accept(self, timeout: float) -> tuple[int, str, list[socket.socket]] | None:
        """(peer, purpose, its sockets, those of the channels first) of the next complete link, or None at the end of
        `timeout` seconds.

        Takes one event at a time, so that whatever is left keeps the descriptor readable.
        """
        until = time.monotonic() + timeout
        with self._lock:
            while not self._closed:
                self._expire()
                left = until - time.monotonic()
                for fd, _ in self._epoll.poll(min(max(0.0, left), self._next_expiry()), 1):
                    if fd == self._wake:
                        continue
                    if fd in self._socks:
                        self._greet(fd)
                    elif (link := self._step(fd)) is not None:
                        return link
                if left <= 0:
                    break
        return None

    def close(self) -> None:
        """Closes everything that has not become a link. Idempotent; a thread in `accept` returns None."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():  # the parent's lock may be held by a thread that does not exist here
            self._close_all()
            return
        os.eventfd_write(self._wake, 1)
        with self._lock:
            self._close_all()

    # ------------------------------------------------------------------------------------------------ helpers

    def _greet(self, fd: int) -> None:
        """Takes a connection from a listener and sends the challenge."""
        try:
            sock, peername = self._socks[fd].accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, or the connection is gone: neither is a reason to stop
            log.warning("a connection could not be accepted: %s", error)
            time.sleep(0.02)
            return
        where = _where(peername)
        if len(self._pending) >= MOST_PENDING:
            self._refuse(next(iter(self._pending)), "too many connections are in their handshake")
        request = self._request
        try:
            acceptor = Acceptor(sock, secret=request.secret, job=request.job, rank=request.rank)
        except HandshakeError as error:
            log.warning("refused a connection from %s: %s", where, error)
            sock.close()
            return
        self._pending[sock.fileno()] = _Pending(sock, where, acceptor)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _step(self, fd: int) -> tuple[int, str, list[socket.socket]] | None:
        """Takes a connection one step on; when it is through, adds it to its link."""
        entry = self._pending.get(fd)
        if entry is None:
            return None
        try:
            session = entry.acceptor.step()
            if session is None:
                return None
            purpose, channel, count, nonce = self._parse(session)
        except HandshakeError as error:
            self._refuse(fd, str(error))
            return None
        del self._pending[fd]
        self._epoll.unregister(fd)
        key = (session.peer, purpose, nonce)
        half = self._half.setdefault(key, _Half(time.monotonic() + ASSEMBLY_TIMEOUT, count, {}))
        half.socks[channel] = entry.sock
        if len(half.socks) < count:
            return None
        del self._half[key]
        return session.peer, purpose, [half.socks[i] for i in range(count)]

    def _parse(self, session: Session) -> tuple[str, int, int, str]:
        """Purpose, number of the socket, how many the link has, and its nonce, as dial packs them."""
        parts = session.purpose.rsplit("|", 2)
        numbers = parts[1].split(":") if len(parts) == 3 else []
        count = channel = 0
        if len(numbers) == 2 and all(n.isascii() and n.isdigit() and len(n) < 4 for n in numbers):
            channel, bulk = map(int, numbers)
            count = link_sockets(bulk) if bulk <= MOST_SOCKETS else 0
        if channel >= count:
            raise HandshakeError(
                f"rank {session.peer} asks for {session.purpose!r}, which is no channel of a link", reason="format"
            )
        if not 0 <= session.peer < self._request.size:
            raise HandshakeError(
                f"rank {session.peer} is not one of the {self._request.size} ranks of this job", reason="rank"
            )
        purpose, nonce = parts[0], parts[2]
        half = self._half.get((session.peer, purpose, nonce))
        if half is not None and (channel in half.socks or count != half.count):
            raise HandshakeError(f"rank {session.peer} connected channel {channel} of one link twice", reason="format")
        return purpose, channel, count, nonce

    def _refuse(self, fd: int, why: str) -> None:
        entry = self._pending.pop(fd)
        log.warning("refused a connection from %s: %s", entry.where, why)
        self._epoll.unregister(fd)
        entry.sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, entry in self._pending.items() if now >= entry.acceptor.deadline]:
            self._refuse(fd, "it did not finish the handshake in time")
        for key in [key for key, half in self._half.items() if now >= half.deadline]:
            half = self._half.pop(key)
            came = sorted(half.socks)
            log.warning("dropped a link of rank %d: only channels %s of %d came", key[0], came, half.count)
            for sock in half.socks.values():
                sock.close()

    def _next_expiry(self) -> float:
        deadlines = [e.acceptor.deadline for e in self._pending.values()] + [h.deadline for h in self._half.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else 1e6

    def _close_all(self) -> None:
        for sock in (*self._socks.values(), *(e.sock for e in self._pending.values())):
            sock.close()
        for half in self._half.values():
            for sock in half.socks.values():
                sock.close()
        self._pending.clear()
        self._half.clear()
        self._epoll.close()
        os.close(self._wake)


def _listen(address: Address) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        if address.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address.sockaddr(0))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _where(peername: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host, port = peername[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
