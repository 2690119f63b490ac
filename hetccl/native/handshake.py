# SPDX-License-Identifier: Apache-2.0
"""The authenticated handshake of every socket that hetccl opens: both ends prove that they hold the job's secret.

Three frames of fixed size, so no length is ever taken from a stranger:

    acceptor -> dialer   challenge: 32 random bytes
    dialer -> acceptor   hello:     wire versions, ranks, purpose, host name, 32 random bytes; then a MAC
    acceptor -> dialer   welcome:   chosen version, wire versions, rank, host name; then a MAC

Each MAC is HMAC-SHA256 under a key made from secret and job, over a label of the sender's role, both nonces and the
frames so far. So a recorded hello is worthless (fresh challenge), a reflected one too (role, ranks), and the acceptor
looks into a hello only after its MAC has been found right. A stranger gets 32 random bytes and then a closed socket.

The handshake says who the peer is. It neither encrypts nor signs what follows.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from hetccl.errors import TransportError

__all__ = ["ACCEPT_TIMEOUT", "WIRE_VERSIONS", "Acceptor", "HandshakeError", "Session", "Versions", "accept", "dial"]

ACCEPT_TIMEOUT = 5.0  # seconds that a stranger can hold a connection
NONCE_BYTES = 32
MAC_BYTES = 32
PURPOSE_BYTES = 96
HOST_BYTES = 64


class Versions(NamedTuple):
    """Lowest and highest wire version that one end speaks."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest} to {self.highest}"


WIRE_VERSIONS = Versions(1, 1)


class HandshakeError(TransportError):
    """The other end was refused, or refused us.

    Attributes: reason, one of "secret" (also a replay), "version", "rank", "format", "oversized", "truncated",
    "timeout", "network"; peer, where it is known.
    """


@dataclass(frozen=True)
class Session:
    """What both ends know after the handshake."""

    peer: int  # rank of the other end
    purpose: str  # as given to dial
    version: int  # wire version to use
    host: str  # name of the other end's host, for messages
    key: bytes = field(repr=False)  # 32 bytes, fresh for this connection and equal at both ends


def dial(
    sock: socket.socket,
    *,
    secret: bytes,
    job: str,
    rank: int,
    peer: int,
    purpose: str,
    timeout: float,
    versions: Versions = WIRE_VERSIONS,
) -> Session:
    """Takes a connected socket through the handshake as its initiator.

    Blocks up to `timeout` seconds in all. Raises `HandshakeError`; the caller then closes the socket. The socket is
    left as blocking as it was.
    """
    deadline = time.monotonic() + timeout
    before = sock.gettimeout()
    sock.setblocking(False)
    try:
        key = _job_key(secret, job)
        challenge = _read(sock, NONCE_BYTES, deadline, peer)
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = _HELLO.pack(
            _HELLO_MAGIC, *versions, rank, peer, *_padded(purpose, PURPOSE_BYTES, "purpose"), *_host_field(), nonce
        )
        _write(sock, hello + _mac(key, _DIALER, challenge, hello), deadline, peer)
        welcome = _read(sock, _WELCOME.size + MAC_BYTES, deadline, peer)
        body, mac = welcome[: _WELCOME.size], welcome[_WELCOME.size :]
        if not hmac.compare_digest(mac, _mac(key, _ACCEPTOR, challenge, hello, body)):
            raise HandshakeError(
                f"rank {peer} could not prove that it holds this job's secret: either its secret or job differs from "
                "ours, or something else listens at that address",
                peer=peer,
                reason="secret",
            )
        return _finish_dial(key, challenge, nonce, body, peer, purpose, versions)
    finally:
        sock.settimeout(before)


def accept(
    sock: socket.socket,
    *,
    secret: bytes,
    job: str,
    rank: int,
    timeout: float = ACCEPT_TIMEOUT,
    versions: Versions = WIRE_VERSIONS,
) -> Session:
    """Takes an accepted socket through the handshake.

    Blocks up to `timeout` seconds in all, however slowly bytes drip in. Raises `HandshakeError`; the caller then logs
    it, closes the socket and goes on. The socket is left as blocking as it was.
    """
    before = sock.gettimeout()
    try:
        acceptor = Acceptor(sock, secret=secret, job=job, rank=rank, timeout=timeout, versions=versions)
        while True:
            session = acceptor.step()
            if session is not None:
                return session
            _wait(sock, select.POLLIN, acceptor.deadline, None)
    finally:
        sock.settimeout(before)


class Acceptor:
    """The accepting side, one step at a time, for a listener that must not wait for any single stranger.

    Make one per accepted socket (the challenge leaves at once), wait until the socket is readable or `deadline`
    (time.monotonic) is reached, call `step` again. Never blocks. Makes the socket non-blocking.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        secret: bytes,
        job: str,
        rank: int,
        timeout: float = ACCEPT_TIMEOUT,
        versions: Versions = WIRE_VERSIONS,
    ) -> None:
        self.deadline = time.monotonic() + timeout
        self._sock = sock
        self._key = _job_key(secret, job)
        self._rank = rank
        self._versions = versions
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._received = bytearray()
        sock.setblocking(False)
        self._send(self._challenge)

    def step(self) -> Session | None:
        """Reads what has come. Returns a session, or None while more is needed. Raises `HandshakeError`."""
        wanted = _HELLO.size + MAC_BYTES
        part = b"begin"
        try:
            while part and len(self._received) < wanted:
                part = self._sock.recv(wanted - len(self._received))
                self._received += part
        except (BlockingIOError, InterruptedError):
            if time.monotonic() >= self.deadline:
                raise HandshakeError(
                    f"only {len(self._received)} of {wanted} bytes of the hello came in time", reason="timeout"
                ) from None
            return None
        except OSError as error:
            raise HandshakeError(f"the connection broke during the handshake: {error}", reason="network") from error
        if len(self._received) < wanted:
            raise HandshakeError(
                f"the connection was closed after {len(self._received)} of {wanted} bytes of the hello",
                reason="truncated",
            )
        return self._finish(bytes(self._received))

    def _finish(self, frame: bytes) -> Session:
        hello, mac = frame[: _HELLO.size], frame[_HELLO.size :]
        if not hmac.compare_digest(mac, _mac(self._key, _DIALER, self._challenge, hello)):
            raise HandshakeError(
                "it did not prove that it holds this job's secret (another job, a stranger, or a replay)",
                reason="secret",
            )
        magic, lowest, highest, rank, peer, n_purpose, purpose, n_host, host, nonce = _HELLO.unpack(hello)
        theirs = Versions(lowest, highest)
        if magic != _HELLO_MAGIC or n_purpose > PURPOSE_BYTES or n_host > HOST_BYTES or lowest > highest:
            raise HandshakeError("its hello is not in the form of this protocol", reason="format")
        if _has_more(self._sock):
            raise HandshakeError("more bytes than a hello came before it was answered", reason="oversized")
        where = host[:n_host].decode("utf-8", "replace")
        version = _common(self._versions, theirs)
        status = _OK if version else _NO_COMMON_VERSION
        if peer != self._rank or rank == self._rank:
            status = _WRONG_RANK
        body = _WELCOME.pack(_WELCOME_MAGIC, *self._versions, version, status, self._rank, *_host_field())
        self._send(body + _mac(self._key, _ACCEPTOR, self._challenge, hello, body))
        if status == _WRONG_RANK:
            raise HandshakeError(
                f"rank {rank} on host {where} wanted rank {peer}, but this is rank {self._rank}",
                peer=rank,
                reason="rank",
            )
        if status == _NO_COMMON_VERSION:
            raise _version_error(self._versions, rank, where, theirs)
        session_key = _session_key(self._key, self._challenge, nonce)
        return Session(rank, purpose[:n_purpose].decode("utf-8", "replace"), version, where, session_key)

    def _send(self, frame: bytes) -> None:
        # Both frames fit any fresh socket buffer; a peer for which they do not is not waited for.
        try:
            sent = self._sock.send(frame, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise HandshakeError(f"the connection broke during the handshake: {error}", reason="network") from error
        if sent != len(frame):
            raise HandshakeError("the connection takes no data", reason="network")


# ---------------------------------------------------------------------------------------------------- helpers

_HELLO_MAGIC = b"hetccl\x01h"
_WELCOME_MAGIC = b"hetccl\x01w"
_HELLO = struct.Struct(f"!8sHHIIH{PURPOSE_BYTES}sH{HOST_BYTES}s{NONCE_BYTES}s")
_WELCOME = struct.Struct(f"!8sHHHHIH{HOST_BYTES}s")
_DIALER, _ACCEPTOR = b"hetccl dialer", b"hetccl acceptor"
_OK, _NO_COMMON_VERSION, _WRONG_RANK = 0, 1, 2


def _finish_dial(
    key: bytes, challenge: bytes, nonce: bytes, body: bytes, peer: int, purpose: str, versions: Versions
) -> Session:
    magic, lowest, highest, version, status, rank, n_host, host = _WELCOME.unpack(body)
    if magic != _WELCOME_MAGIC or n_host > HOST_BYTES:
        raise HandshakeError(
            f"the welcome of rank {peer} is not in the form of this protocol", peer=peer, reason="format"
        )
    where = host[:n_host].decode("utf-8", "replace")
    if status == _NO_COMMON_VERSION:
        raise _version_error(versions, peer, where, Versions(lowest, highest))
    if status != _OK or rank != peer:
        raise HandshakeError(
            f"rank {peer} was wanted, but rank {rank} on host {where} listens at that address", peer=peer, reason="rank"
        )
    if not versions.lowest <= version <= versions.highest:
        raise _version_error(versions, peer, where, Versions(lowest, highest))
    return Session(rank, purpose, version, where, _session_key(key, challenge, nonce))


def _common(ours: Versions, theirs: Versions) -> int:
    """Highest version that both speak, 0 if there is none."""
    highest = min(ours.highest, theirs.highest)
    return highest if highest >= max(ours.lowest, theirs.lowest) else 0


def _version_error(ours: Versions, peer: int, where: str, theirs: Versions) -> HandshakeError:
    return HandshakeError(
        f"no common wire version: host {_host_name()} (here) speaks {ours}, host {where} (rank {peer}) speaks "
        f"{theirs}. Install the same version of hetccl on both",
        peer=peer,
        reason="version",
        ours=tuple(ours),
        theirs=tuple(theirs),
    )


def _job_key(secret: bytes, job: str) -> bytes:
    if not secret:
        raise HandshakeError(
            "the job's secret is empty: without one nobody can be told from a stranger", reason="secret"
        )
    return hmac.digest(secret, b"hetccl handshake 1\0" + job.encode(), "sha256")


def _session_key(key: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return _mac(key, b"hetccl session", challenge, nonce)


def _mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    # Every part has a fixed size for its label, so that joining them is unambiguous.
    mac = hmac.new(key, label + b"\0", hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()


def _padded(text: str, limit: int, what: str) -> tuple[int, bytes]:
    raw = text.encode()
    if len(raw) > limit:
        raise HandshakeError(f"the {what} {text!r} has {len(raw)} bytes, at most {limit} fit", reason="format")
    return len(raw), raw.ljust(limit, b"\0")


def _host_field() -> tuple[int, bytes]:
    raw = _host_name().encode()[:HOST_BYTES]
    return len(raw), raw.ljust(HOST_BYTES, b"\0")


def _host_name() -> str:
    return socket.gethostname()


def _has_more(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def _read(sock: socket.socket, nbytes: int, deadline: float, peer: int) -> bytes:
    data = bytearray()
    cause: OSError | None = None
    while len(data) < nbytes:
        try:
            part = sock.recv(nbytes - len(data))
        except (BlockingIOError, InterruptedError):
            _wait(sock, select.POLLIN, deadline, peer)
            continue
        except OSError as error:
            part, cause = b"", error
        if not part:
            raise HandshakeError(
                f"rank {peer} closed the connection during the handshake{f' ({cause})' if cause else ''}: its secret "
                "or job differs from ours (HETCCL_SECRET, HETCCL_SECRET_FILE), it is shutting down, or something else "
                "listens at that address",
                peer=peer,
                reason="truncated",
            )
        data += part
    return bytes(data)


def _write(sock: socket.socket, frame: bytes, deadline: float, peer: int) -> None:
    view = memoryview(frame)
    while view:
        try:
            view = view[sock.send(view, socket.MSG_NOSIGNAL) :]
        except (BlockingIOError, InterruptedError):
            _wait(sock, select.POLLOUT, deadline, peer)
        except OSError as error:
            raise HandshakeError(f"rank {peer} cannot be reached: {error}", peer=peer, reason="network") from error


def _wait(sock: socket.socket, events: int, deadline: float, peer: int | None) -> None:
    """Waits for the socket. At the deadline: a dialer raises, an acceptor is left to find out in its next step."""
    left = deadline - time.monotonic()
    poller = select.poll()
    poller.register(sock, events)
    ready = poller.poll(max(0.0, left) * 1000 + 1) if left > 0 else []
    if not ready and peer is not None:
        raise HandshakeError(f"rank {peer} did not answer the handshake in time", peer=peer, reason="timeout")
