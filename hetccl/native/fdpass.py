# SPDX-License-Identifier: Apache-2.0
"""Hands file descriptors from one process to another on the same host, and makes the memory that is shared so.

The Unix sockets live in the abstract namespace under random names: nothing on disk, nothing left after a kill, not to
be guessed. The kernel's word on the peer's user id is checked at both ends; who the peer is beyond that is for a
handshake to say. Every wait has a deadline. Sockets and descriptors are close-on-exec. Standard library only.

    a: listener = FdListener()              b: sock, pid = connect(name, timeout=5)
       sock, pid = listener.accept(5)
       send(sock, b"payload", [fd])            payload, fds = recv(sock, max_fds=1, timeout=5)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "FdListener",
    "FdPassError",
    "Peer",
    "StrangerError",
    "close_all",
    "connect",
    "create_region",
    "recv",
    "send",
]

MAX_PAYLOAD = 1 << 16  # bytes of one message, unless the receiver asks for less
MAX_FDS = 253  # the kernel's limit for one message


class FdPassError(ConnectionError):
    """The other end is gone, or sent what it must not. A deadline that passes is a `TimeoutError`."""


class StrangerError(FdPassError):
    """The other end runs under another user id. Attributes: uid, pid."""

    def __init__(self, message: str, uid: int = -1, pid: int = 0) -> None:
        super().__init__(message)
        self.uid = uid
        self.pid = pid


class Peer(NamedTuple):
    """A connected socket, and the process that the kernel says is behind it (0 if it lies in another pid namespace)."""

    socket: socket.socket
    pid: int


class FdListener:
    """Listens under `name`, by default a random one of 16 bytes. Raises `FdPassError` if the name is taken."""

    def __init__(self, name: bytes | None = None, backlog: int = 128) -> None:
        self.name = secrets.token_bytes(16) if name is None else name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(b"\0" + self.name)
            self._socket.listen(backlog)
        except OSError as error:
            self._socket.close()
            raise FdPassError(f"cannot listen on abstract socket {self.name.hex()}: {error}") from error

    def fileno(self) -> int:
        """Readable when `accept` has something to take; -1 after `close`."""
        return self._socket.fileno()

    def accept(self, timeout: float) -> Peer:
        """The next connection of this user's; blocks up to `timeout` seconds.

        Raises `TimeoutError`, `StrangerError` (the connection is closed then) or `FdPassError`.
        """
        try:
            self._socket.settimeout(max(timeout, 0.0))
            sock, _ = self._socket.accept()
        except TimeoutError:
            raise
        except BlockingIOError as error:  # timeout 0
            raise TimeoutError("nobody has connected") from error
        except OSError as error:
            raise FdPassError(f"accept failed: {error}") from error
        return _checked(sock)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def __enter__(self) -> FdListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(name: bytes, timeout: float) -> Peer:
    """Connects to a listener of this host; blocks up to `timeout` seconds.

    Raises `FdPassError` (nobody listens there: gone, another host, or another network namespace), `StrangerError`,
    `TimeoutError`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _connect(sock, b"\0" + name, time.monotonic() + timeout)
    except BaseException:
        sock.close()
        raise
    return _checked(sock)


def send(sock: socket.socket, payload: bytes, fds: Sequence[int] = (), timeout: float = 10.0) -> None:
    """Sends one message; blocks up to `timeout` seconds. The descriptors stay the caller's.

    Raises `TimeoutError` or `FdPassError`; the connection is of no further use then.
    """
    if len(payload) > MAX_PAYLOAD or len(fds) > MAX_FDS:
        raise ValueError(
            f"a message has at most {MAX_PAYLOAD} bytes and {MAX_FDS} descriptors, not {len(payload)} and {len(fds)}"
        )
    frame = memoryview(_HEAD.pack(len(payload), len(fds)) + payload)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    deadline = time.monotonic() + timeout
    with _deadline_kept(sock):
        while frame:
            _arm(sock, deadline, "send")
            try:
                sent = sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
            except (TimeoutError, BlockingIOError) as error:
                raise TimeoutError(f"the other end took no data for {timeout:g} s") from error
            except OSError as error:
                raise FdPassError(f"sending {len(fds)} descriptors failed: {error}") from error
            frame, rights = frame[sent:], []


def recv(sock: socket.socket, max_fds: int, timeout: float, max_payload: int = MAX_PAYLOAD) -> tuple[bytes, list[int]]:
    """One message of `send`: payload and descriptors, which are the caller's to close. Blocks up to `timeout` seconds.

    Raises `TimeoutError`; `FdPassError` if the other end closed, or sent more than `max_fds` or `max_payload`. No
    descriptor stays open then, and the connection is of no further use.
    """
    fds: list[int] = []
    deadline = time.monotonic() + timeout
    try:
        with _deadline_kept(sock):
            n_payload, n_fds = _HEAD.unpack(_read(sock, _HEAD.size, fds, max_fds, deadline))
            if n_payload > max_payload or n_fds > max_fds:
                raise FdPassError(
                    f"a message of {n_payload} bytes and {n_fds} descriptors was announced; at most {max_payload} and "
                    f"{max_fds} are taken"
                )
            payload = _read(sock, n_payload, fds, max_fds, deadline)
            if len(fds) != n_fds:
                raise FdPassError(
                    f"{n_fds} descriptors were announced, {len(fds)} came (is this process out of descriptors?)"
                )
    except BaseException:
        close_all(fds)
        raise
    return payload, fds


def create_region(nbytes: int, label: str) -> int:
    """Descriptor of `nbytes` of zeroed shared memory whose size nobody can change any more.

    `label` shows in /proc/PID/maps. Since the file cannot shrink, a peer cannot make an access fault. `OSError`.
    """
    fd = os.memfd_create(f"hetccl-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def close_all(fds: Iterable[int]) -> None:
    """Closes descriptors, whatever state they are in."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


# ---------------------------------------------------------------------------------------------------- helpers

_HEAD = struct.Struct("!II")  # bytes of payload, number of descriptors
_CREDENTIALS = struct.Struct("3i")  # struct ucred


def _checked(sock: socket.socket) -> Peer:
    try:
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    except OSError as error:
        sock.close()
        raise FdPassError(f"the kernel does not say who is at the other end: {error}") from error
    if uid != os.geteuid():
        sock.close()
        raise StrangerError(f"process {pid} at the other end has user id {uid}, this one has {os.geteuid()}", uid, pid)
    return Peer(sock, pid)


def _connect(sock: socket.socket, address: bytes, deadline: float) -> None:
    # A Unix socket whose listener's queue is full answers EAGAIN at once and cannot be polled for room.
    sock.settimeout(0)
    pause = 0.0005
    while True:
        try:
            sock.connect(address)
        except BlockingIOError:
            if time.monotonic() + pause >= deadline:
                raise TimeoutError(f"the listener {address[1:].hex()} did not take the connection in time") from None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        except OSError as error:
            hint = ""
            if error.errno == errno.ECONNREFUSED:
                hint = "; nobody listens there: the process is gone, or on another host or in another network namespace"
            raise FdPassError(f"cannot connect to abstract socket {address[1:].hex()}: {error}{hint}") from error
        else:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            return


def _read(sock: socket.socket, nbytes: int, fds: list[int], max_fds: int, deadline: float) -> bytes:
    data = bytearray()
    room = socket.CMSG_SPACE(4 * max_fds) if max_fds else 0
    while len(data) < nbytes:
        _arm(sock, deadline, "receive")
        try:
            part, ancillary, flags, _ = sock.recvmsg(nbytes - len(data), room, socket.MSG_CMSG_CLOEXEC)
        except (TimeoutError, BlockingIOError) as error:
            raise TimeoutError(f"only {len(data)} of {nbytes} bytes came in time") from error
        except OSError as error:
            raise FdPassError(f"receiving failed: {error}") from error
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(raw) // 4
                fds.extend(struct.unpack(f"{count}i", raw[: 4 * count]))
        if flags & socket.MSG_CTRUNC or len(fds) > max_fds:
            raise FdPassError(f"more than {max_fds} descriptors came, or this process may open no more")
        if not part:
            raise FdPassError(f"the other end closed after {len(data)} of {nbytes} bytes")
        data += part
    return bytes(data)


def _arm(sock: socket.socket, deadline: float, what: str) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"no time left to {what}")
    sock.settimeout(left)


@contextlib.contextmanager
def _deadline_kept(sock: socket.socket) -> Iterator[None]:
    before = sock.gettimeout()
    try:
        yield
    finally:
        if sock.fileno() >= 0:
            sock.settimeout(before)
