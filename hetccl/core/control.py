# SPDX-License-Identifier: Apache-2.0
"""The control plane of one communicator: the arrival board of each host, and sockets that carry losses and aborts.

The lowest rank of a host leads it: it makes the board (a sealed memory file) and keeps one Unix socket to every
other rank of
the host. The leaders of further hosts keep one authenticated TCP socket to rank 0. A socket that ends without a
farewell means
that its rank has died; the news is written on every host's board, where all waiting threads read it. (One level of
sockets to rank 0 for now; a tree follows.)
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence

from hetccl.core import _board
from hetccl.core.reactor import reactor
from hetccl.errors import TimedOutError, TransportError
from hetccl.native import fdpass, handshake
from hetccl.native.interfaces import choose

__all__ = ["Control", "ControlListener"]

log = logging.getLogger("hetccl.control")

LEFT, LOST, ABORT, ADOPT, MOVED = 1, 2, 3, 4, 5
_NEWS = struct.Struct("!BxxxI")  # what, rank
JOIN_PURPOSE = "control"


class ControlListener:
    """Where ranks of this host, or leaders of other hosts, connect. Opened before anybody knows who leads."""

    def __init__(self) -> None:
        self.local = fdpass.FdListener()
        self.remote: socket.socket | None = None

    def listen_remote(self, ifname: str, store_host: str) -> list[list[object]]:
        """Rank 0 of a job on several hosts: [[family, host, port, scope]] to publish."""
        address = choose(ifname, store_host, loopback_ok=False)[0]
        self.remote = socket.create_server(address.sockaddr(0), family=address.family, backlog=128)
        port = self.remote.getsockname()[1]
        return [[int(address.family), address.host, port, address.scope]]

    def close(self) -> None:
        self.local.close()
        if self.remote is not None:
            self.remote.close()


class Control:
    """This rank's part of the control plane."""

    def __init__(self, rank: int, host_ids: Sequence[str], secret: bytes, job: str) -> None:
        self.rank, self.size = rank, len(host_ids)
        self._host_ids = host_ids
        self._secret, self._job = secret, job
        self.local_ranks = [r for r in range(self.size) if host_ids[r] == host_ids[rank]]
        self.leader = self.local_ranks[0]
        self._leaders = sorted({min(r for r in range(self.size) if host_ids[r] == h) for h in set(host_ids)})
        self._sockets: dict[int, socket.socket] = {}  # by the rank at the other end
        self._names: dict[socket.socket, int] = {}  # the same the other way round
        self._left: set[int] = set()
        self._abort_told = False
        self._closed = self._leaving = False
        self._map: mmap.mmap | None = None
        self.address = 0

    def join(self, listener: ControlListener, leader_socket: str, rank0: list[list[object]], deadline: float) -> None:
        """Connects everybody that this rank must be connected to. Blocks until then; raises `TimedOutError` naming
        ranks."""
        nbytes = _board.nbytes(self.size)
        if self.rank == self.leader:
            fd = fdpass.create_region(nbytes, "board")
            try:
                self._attach(fd, nbytes)
                _board.init(self.address, self.size)
                self._accept_local(listener, fd, deadline)
            finally:
                os.close(fd)
            if self.rank == 0:
                self._accept_leaders(listener, deadline)
            else:
                self._dial_rank0(rank0, deadline)
        else:
            self._dial_leader(leader_socket, nbytes, deadline)
        for peer, sock in list(self._sockets.items()):
            self._watch(peer, sock)
        reactor().every_tick(self._tick)

    def leave(self) -> None:
        """Says farewell and lets go. Idempotent."""
        if self._closed:
            return
        reactor().no_tick(self._tick)
        if self.address:  # before any socket ends, so that nobody takes that for a death
            _board.mark(self.address, self.rank, LEFT)
        self._leaving = True
        sockets: list[socket.socket] = []
        for _ in range(2):  # a callback that had begun may have adopted one
            for sock in list(self._sockets.values()):
                if sock not in sockets and sock.fileno() >= 0:
                    reactor().unwatch(sock.fileno())
                    sockets.append(sock)
        for sock in sockets:
            if sock.family == socket.AF_UNIX:
                self._drain(sock)
        self._closed = True
        self._hand_over()
        for sock in list(self._sockets.values()):
            self._send(sock, LEFT, self.rank)
            if sock.fileno() >= 0 and sock not in sockets:
                reactor().unwatch(sock.fileno())
            sock.close()

    def forget(self) -> None:
        """In a forked child: closes the sockets, so that the parent's death can still be seen by others."""
        self._closed = True
        for sock in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                sock.close()

    def abort(self) -> None:
        """Tells everybody."""
        if self.address and not self._closed:
            _board.abort(self.address, self.rank)
            self._tick()

    def state(self, rank: int) -> int:
        """0 alive, 1 left, 2 lost."""
        return _board.state(self.address, rank) if self.address else 0

    def aborted_by(self) -> int:
        """Rank that aborted, or -1."""
        return _board.aborted_by(self.address) if self.address else -1

    def calls(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """What each rank of this host called last: (rank, op, dtype, redop, root, count, sequence)."""
        return _board.calls(self.address) if self.address else []

    # ---- joining

    def _attach(self, fd: int, nbytes: int) -> None:
        self._map = mmap.mmap(fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def owner(self) -> object:
        """Keeps the board's mapping alive."""
        return self._map

    def _accept_local(self, listener: ControlListener, fd: int, deadline: float) -> None:
        missing = set(self.local_ranks) - {self.rank}
        while missing:
            self._in_time(deadline, missing)
            try:
                sock, _ = listener.local.accept(min(1.0, max(0.01, deadline - time.monotonic())))
            except TimeoutError:
                continue
            except OSError as error:
                log.warning("refused a control connection: %s", error)
                continue
            peer = self._admit(sock, missing)
            if peer is not None:
                fdpass.send(sock, b"board", [fd])
                missing.discard(peer)

    def _accept_leaders(self, listener: ControlListener, deadline: float) -> None:
        missing = set(self._leaders) - {0}
        while missing and listener.remote is not None:
            self._in_time(deadline, missing)
            listener.remote.settimeout(min(1.0, max(0.01, deadline - time.monotonic())))
            try:
                sock, _ = listener.remote.accept()
            except TimeoutError:
                continue
            _keepalive(sock)
            peer = self._admit(sock, missing)
            missing.discard(-1 if peer is None else peer)

    def _admit(self, sock: socket.socket, expected: set[int]) -> int | None:
        try:
            session = handshake.accept(sock, secret=self._secret, job=self._job, rank=self.rank)
            if session.peer not in expected or session.purpose != JOIN_PURPOSE:
                raise TransportError(f"rank {session.peer} is not expected here")
        except OSError as error:
            log.warning("refused a control connection: %s", error)
            sock.close()
            return None
        self._sockets[session.peer] = sock
        return session.peer

    def _dial_leader(self, name: str, nbytes: int, deadline: float) -> None:
        left = max(0.1, deadline - time.monotonic())
        try:
            sock, _ = fdpass.connect(bytes.fromhex(name), left)
            self._introduce(sock, self.leader, left)
            _, fds = fdpass.recv(sock, 1, left)
        except TimeoutError as error:
            raise TimedOutError(
                f"phase bootstrap: rank {self.leader}, which leads this host, did not hand over the arrival board",
                phase="bootstrap",
                missing=(self.leader,),
            ) from error
        try:
            self._attach(fds[0], nbytes)
        finally:
            fdpass.close_all(fds)

    def _dial_rank0(self, addresses: list[list[object]], deadline: float) -> None:
        errors = []
        for family, host, port, scope in addresses:
            sock = socket.socket(family, socket.SOCK_STREAM)  # type: ignore[arg-type]
            try:
                sock.settimeout(max(0.1, deadline - time.monotonic()))
                sock.connect((host, port) if family == socket.AF_INET else (host, port, 0, scope))
                _keepalive(sock)
                self._introduce(sock, 0, max(0.1, deadline - time.monotonic()))
                return
            except OSError as error:
                sock.close()
                errors.append(f"{host} port {port}: {error}")
        raise TransportError(
            "cannot reach rank 0's control socket ("
            + "; ".join(errors)
            + "). Name the interface that reaches the other "
            "hosts with HETCCL_SOCKET_IFNAME",
            peer=0,
            transport="control",
        )

    def _introduce(self, sock: socket.socket, peer: int, timeout: float) -> None:
        handshake.dial(
            sock, secret=self._secret, job=self._job, rank=self.rank, peer=peer, purpose=JOIN_PURPOSE, timeout=timeout
        )
        self._sockets[peer] = sock

    def _in_time(self, deadline: float, missing: set[int]) -> None:
        if time.monotonic() >= deadline:
            ranks = tuple(sorted(missing))
            raise TimedOutError(
                f"phase bootstrap: ranks {list(ranks)} did not connect to the control plane of rank {self.rank}",
                phase="bootstrap",
                missing=ranks,
            )

    # ---- news

    def _watch(self, peer: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._names[sock] = peer
        if self._leaving:  # what is adopted now is handed on: news that were read here would be lost to the next heir
            return
        reactor().watch(sock.fileno(), lambda: self._readable(sock))

    def _readable(self, sock: socket.socket) -> None:
        fds: list[int] = []
        try:
            data, fds = self._receive(sock)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            peer = self._names.pop(sock, -1)
            reactor().unwatch(sock.fileno())
            sock.close()
            if self._sockets.get(peer) is sock:
                del self._sockets[peer]
            if peer >= 0 and peer not in self._left and self.state(peer) != LEFT and not self._closed:
                self._learn(LOST, peer, None)
            return
        self._take_news(sock, data, fds)

    def _take_news(self, sock: socket.socket, data: bytes, fds: list[int]) -> None:
        for at in range(0, len(data) - len(data) % _NEWS.size, _NEWS.size):  # 8 bytes: never split on a local socket
            what, rank = _NEWS.unpack_from(data, at)
            if not 0 <= rank < self.size:
                continue
            if what == ADOPT:
                self._adopt(rank, fds.pop(0) if fds else -1)
            elif what == MOVED:
                self._moved(sock, rank)
            else:
                self._learn(what, rank, self._names.get(sock))
        fdpass.close_all(fds)

    @staticmethod
    def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
        if sock.family != socket.AF_UNIX:
            return sock.recv(4096), []
        data, fds, _, _ = socket.recv_fds(sock, 4096, 16)
        return data, list(fds)

    # ---- a leader that leaves is replaced, so that losses are still learnt

    def _hand_over(self) -> None:
        """The lowest other rank of this host takes the leader's place: it gets a socket to every other one, and those
        to other hosts. What is given waits for whoever has not read yet.

        An heir that leaves at the same time has said so on the board before it looks for gifts a last time. So either
        it finds this one, and hands it on, or we see that it leaves, and try the next.
        """
        if self.rank != self.leader or not self.address:
            return
        for heir in self.local_ranks:
            if heir not in self._sockets or self.state(heir):
                continue
            for peer in self.local_ranks:
                if peer > heir and peer in self._sockets and not self.state(peer):
                    one, other = socket.socketpair()
                    with one, other:
                        self._give(heir, peer, one)
                        self._give(peer, heir, other)
            for peer, sock in list(self._sockets.items()):
                if peer not in self.local_ranks:
                    self._send(sock, MOVED, heir)
                    self._give(heir, peer, sock)
            self._give(heir, heir, None)  # even if it has nobody to watch, it leads
            if not self.state(heir):
                return
            for peer, sock in list(self._sockets.items()):
                if peer not in self.local_ranks:
                    self._send(sock, LEFT, heir)

    def _drain(self, sock: socket.socket) -> None:
        """Takes what was given to this rank at the last moment."""
        with contextlib.suppress(OSError):
            while True:
                data, fds = self._receive(sock)
                if not data:
                    return
                self._take_news(sock, data, fds)

    def _give(self, to: int, peer: int, sock: socket.socket | None) -> None:
        road = self._sockets.get(to)
        if road is None:  # it has left meanwhile: the reactor's thread took its socket away
            return
        with contextlib.suppress(OSError):
            fds = [] if sock is None else [sock.fileno()]
            socket.send_fds(road, [_NEWS.pack(ADOPT, peer)], fds, socket.MSG_NOSIGNAL)

    def _adopt(self, peer: int, fd: int) -> None:
        """A socket to `peer` from the leader that leaves. Whoever gets one to a rank below itself follows that one."""
        if peer in self.local_ranks and peer < self.rank:
            self.leader = peer
        else:
            self._leaders = sorted({*self._leaders, self.rank} - {self.leader})
            self.leader = self.rank
        if peer not in self.local_ranks:
            self._leaders = sorted({*self._leaders, peer})
        if fd < 0:
            return
        sock = socket.socket(fileno=fd)
        self._sockets[peer] = sock
        self._watch(peer, sock)

    def _moved(self, sock: socket.socket, heir: int) -> None:
        """Another rank of that host now holds the other end."""
        before = self._names.get(sock, -1)
        if self._sockets.get(before) is sock:
            del self._sockets[before]
        self._names[sock], self._sockets[heir] = heir, sock
        self._leaders = sorted({*self._leaders, heir} - {before})

    def _learn(self, what: int, rank: int, source: int | None) -> None:
        """Writes news on this host's board and passes it on to everybody but its source."""
        if self._closed:
            return
        if what == ABORT:
            _board.abort(self.address, rank)
        elif what == LEFT:
            self._left.add(rank)
            _board.mark(self.address, rank, LEFT)
        else:
            log.info("rank %d is lost", rank)
            _board.mark(self.address, rank, LOST)
        for peer, sock in list(self._sockets.items()):
            if peer not in (source, rank) and peer in self._leaders:
                self._send(sock, what, rank)

    def _tick(self) -> None:
        """An abort that C code of this host wrote on the board is told to the other hosts."""
        by = _board.aborted_by(self.address)
        if by >= 0 and not self._abort_told and self.rank == self.leader:
            self._abort_told = True
            for peer, sock in list(self._sockets.items()):
                if peer in self._leaders:
                    self._send(sock, ABORT, by)

    def _send(self, sock: socket.socket, what: int, rank: int) -> None:
        with contextlib.suppress(OSError):
            sock.send(_NEWS.pack(what, rank), socket.MSG_NOSIGNAL)


def _keepalive(sock: socket.socket) -> None:
    """A host that vanishes without a word is noticed within some ten seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
