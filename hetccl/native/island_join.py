# SPDX-License-Identifier: Apache-2.0
"""How the ranks of an island come to map one region: rank 0 makes it and hands the others its descriptor.

The island's id holds the random name of rank 0's listener and a token that a rank must show. Nothing outlives the call:
no thread, no socket, no name.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import struct
import time
from collections.abc import Callable
from typing import NoReturn

from hetccl.errors import PeerLostError, TimedOutError, UsageError
from hetccl.native import fdpass

__all__ = ["new_id", "shared_region"]

MAGIC = b"island1\0"
SECRET = 16  # bytes of the name, and of the token
HELLO = struct.Struct(f"!{SECRET}sII")  # token, rank, size
HELLO_SECONDS = 1.0  # a connection that has begun its few bytes must end them; a silent one delays nobody
LOOK_SECONDS = 0.5  # between two looks at whether waiting has become vain
GRACE_SECONDS = 2.0  # the others wait a little longer than rank 0, who knows who is missing


def new_id() -> bytes:
    """Id of a new island: made on one rank, carried to all, used once."""
    return MAGIC + secrets.token_bytes(2 * SECRET)


def shared_region(
    island_id: bytes, rank: int, size: int, nbytes: int, timeout: float, check: Callable[[], None] | None = None
) -> int:
    """Descriptor of one zeroed region of `nbytes`, the same on all `size` ranks; the caller closes it.

    Blocks up to `timeout` seconds until all ranks have called; meanwhile `check` is called twice a second, and what it
    raises ends the wait. Raises `TimedOutError` with the missing ranks,
    `PeerLostError` if rank 0 leaves meanwhile, `UsageError` for an id that is none or ranks that do not fit together.
    """
    if len(island_id) != len(MAGIC) + 2 * SECRET or not island_id.startswith(MAGIC):
        raise UsageError(
            f"an island's id has {len(MAGIC) + 2 * SECRET} bytes from new_id(); these {len(island_id)} are none"
        )
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not in an island of {size} ranks")
    name, token = island_id[len(MAGIC) : len(MAGIC) + SECRET], island_id[len(MAGIC) + SECRET :]
    deadline = time.monotonic() + timeout
    look = _Look(check)
    if rank == 0:
        return _serve(name, token, size, nbytes, timeout, deadline, look)
    return _fetch(name, HELLO.pack(token, rank, size), rank, size, nbytes, timeout, deadline, look)


class _Look:
    """Calls `check` now and then."""

    def __init__(self, check: Callable[[], None] | None) -> None:
        self._check, self._due = check, time.monotonic() + LOOK_SECONDS

    def __call__(self) -> None:
        if self._check is not None and time.monotonic() >= self._due:
            self._check()
            self._due = time.monotonic() + LOOK_SECONDS


def _serve(name: bytes, token: bytes, size: int, nbytes: int, timeout: float, deadline: float, look: _Look) -> int:
    present: dict[int, fdpass.Peer] = {}
    with contextlib.ExitStack() as held:
        if size > 1:
            listener = held.enter_context(fdpass.FdListener(name))
            held.callback(_close_all, present)
            _gather(listener, token, size, present, deadline, look)
            missing = [rank for rank in range(1, size) if rank not in present]
            if missing:
                for peer in present.values():
                    _tell(peer, b"M" + ",".join(map(str, missing)).encode())
                _raise_missing(missing, size, timeout)
        region = fdpass.create_region(nbytes, "island")
        try:
            for rank, peer in present.items():
                try:
                    fdpass.send(peer.socket, b"R", [region], timeout=max(deadline - time.monotonic(), HELLO_SECONDS))
                except (OSError, TimeoutError) as error:
                    raise PeerLostError(
                        f"rank {rank} left while the island was made: {error}", ranks=(rank,)
                    ) from error
        except BaseException:
            os.close(region)
            raise
        return region


def _gather(
    listener: fdpass.FdListener, token: bytes, size: int, present: dict[int, fdpass.Peer], deadline: float, look: _Look
) -> None:
    """Fills `present` until all ranks but 0 are there or time is up.

    Strangers are sent away; a rank that leaves is missing again.
    """
    silent: dict[int, fdpass.Peer] = {}  # connected, nothing said yet
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    try:
        while len(present) < size - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            look()
            for fd, _ in poll.poll(min(left, LOOK_SECONDS) * 1000):
                if fd == listener.fileno():
                    with contextlib.suppress(OSError):  # gone again, or of another user
                        peer = listener.accept(0)
                        silent[peer.socket.fileno()] = peer
                        poll.register(peer.socket.fileno(), select.POLLIN)
                elif fd in silent:
                    peer = silent.pop(fd)
                    rank = _hello(peer, token, size, present)
                    if rank is None:
                        poll.unregister(fd)
                        peer.socket.close()
                    else:
                        present[rank] = peer
                else:  # a rank that waits says nothing: it has left
                    poll.unregister(fd)
                    rank = next(r for r, peer in present.items() if peer.socket.fileno() == fd)
                    present.pop(rank).socket.close()
    finally:
        for peer in silent.values():
            peer.socket.close()


def _hello(peer: fdpass.Peer, token: bytes, size: int, present: dict[int, fdpass.Peer]) -> int | None:
    try:
        shown, rank, its_size = HELLO.unpack(fdpass.recv(peer.socket, 0, HELLO_SECONDS, HELLO.size)[0])
    except (OSError, struct.error):
        return None
    if not hmac.compare_digest(shown, token):
        return None
    if its_size != size or not 0 < rank < size or rank in present:
        _tell(
            peer,
            f"Ethe island has {size} ranks; one came as rank {rank} of {its_size}"
            f"{' a second time' if rank in present else ''}".encode(),
        )
        return None
    return int(rank)


def _tell(peer: fdpass.Peer, message: bytes) -> None:
    with contextlib.suppress(OSError):  # whoever has left needs no word
        fdpass.send(peer.socket, message, timeout=HELLO_SECONDS)


def _close_all(peers: dict[int, fdpass.Peer]) -> None:
    for peer in peers.values():
        peer.socket.close()


def _fetch(
    name: bytes, hello: bytes, rank: int, size: int, nbytes: int, timeout: float, deadline: float, look: _Look
) -> int:
    peer = _connect(name, size, timeout, deadline, look)
    try:
        fdpass.send(peer.socket, hello, timeout=max(deadline - time.monotonic(), HELLO_SECONDS))
        poll = select.poll()
        poll.register(peer.socket.fileno(), select.POLLIN)
        while time.monotonic() < deadline and not poll.poll(LOOK_SECONDS * 1000):
            look()
        message, fds = fdpass.recv(peer.socket, 1, max(deadline - time.monotonic(), 0) + GRACE_SECONDS)
    except TimeoutError as error:
        raise TimedOutError(
            f"island of {size} ranks: rank 0 did not answer rank {rank} within {timeout:g} s; it may wait for others",
            phase="island",
            missing=(),
        ) from error
    except OSError as error:
        raise PeerLostError(f"island of {size} ranks: rank 0 left before all had come: {error}", ranks=(0,)) from error
    finally:
        peer.socket.close()
    if message[:1] == b"R" and len(fds) == 1:
        if os.fstat(fds[0]).st_size < nbytes or not _sealed(fds[0]):
            fdpass.close_all(fds)
            raise UsageError(
                f"rank 0 of the island sent a region that can shrink or lacks {nbytes} bytes: another version?"
            )
        return fds[0]
    fdpass.close_all(fds)
    if message[:1] == b"M":
        _raise_missing([int(r) for r in message[1:].split(b",")], size, timeout)
    raise UsageError(message[1:].decode(errors="replace"))


def _connect(name: bytes, size: int, timeout: float, deadline: float, look: _Look) -> fdpass.Peer:
    pause = 0.0005
    while True:
        try:
            return fdpass.connect(name, min(max(deadline - time.monotonic(), 0.01), LOOK_SECONDS))
        except (fdpass.FdPassError, TimeoutError) as error:
            cause = error.__cause__
            early = isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED
            if not early and not isinstance(error, TimeoutError):
                raise
            if time.monotonic() + pause >= deadline:
                _raise_missing([0], size, timeout)
        look()
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _sealed(fd: int) -> bool:
    import fcntl

    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _raise_missing(missing: list[int], size: int, timeout: float) -> NoReturn:
    ranks = ", ".join(map(str, missing))
    raise TimedOutError(
        f"island of {size} ranks: rank{'s' if len(missing) > 1 else ''} {ranks} did not come within {timeout:g} s; "
        "look whether they have started, failed, or run on another host or in another network namespace",
        phase="island",
        missing=tuple(missing),
    )
