# SPDX-License-Identifier: Apache-2.0
"""The built-in transport between ranks of one host: shared-memory rings.

Two ranks meet over a Unix socket in the abstract namespace and prove to each other that they hold the job's secret.
They exchange doorbells (eventfds), and the dialer hands over a sealed memory file with the rings. After that the socket
is closed; the rings (`ring.h`) need no system call but to wake a sleeper.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from hetccl.errors import ClosedError, ConfigError, PluginLoadError, TimedOutError, TransportError
from hetccl.native import fdpass, handshake
from hetccl.transports.base import Availability, Link, Option, Transport, TransportDriver, TransportRequest

__all__ = ["ShmDriver", "ShmTransport"]

log = logging.getLogger("hetccl.transports.shm")

SLOTS = Option(
    "HETCCL_SHM_SLOTS", "Messages that one shared-memory ring holds: a power of two, equal on all ranks.", "4"
)
SLOT_BYTES = Option(
    "HETCCL_SHM_SLOT_BYTES",
    "Bytes of one message of a shared-memory ring: a power of two from 4096, equal on all ranks. A pair of ranks "
    "shares about 5 times slots times slot bytes.",
    "65536",
)


class ShmDriver(TransportDriver):
    """Finds out whether this host can share memory, and opens it for a communicator."""

    name = "shm"
    preference = 100
    options = (SLOTS, SLOT_BYTES)

    def probe(self) -> Availability:
        try:
            os.close(fdpass.create_region(4096, "probe"))
        except (OSError, AttributeError) as error:
            return Availability(
                False,
                f"the kernel gives no sealed memory file (memfd_create): {error}",
                "allow memfd_create and fcntl(F_ADD_SEALS) in the container's seccomp profile",
            )
        try:
            fdpass.FdListener().close()
        except OSError as error:
            return Availability(
                False,
                f"no abstract Unix socket can be opened: {error}",
                "allow AF_UNIX sockets in the container's seccomp or AppArmor profile",
            )
        try:
            os.close(_doorbell())
        except OSError as error:
            return Availability(False, f"the kernel gives no eventfd: {error}", "raise the open-file limit (ulimit -n)")
        try:
            slots, slot_bytes = _sizes()
        except ConfigError as error:
            return Availability(False, str(error), "correct or unset the variable")
        return Availability(True, details={"slots": str(slots), "slot_bytes": str(slot_bytes)})

    def open(self, request: TransportRequest) -> ShmTransport:
        slots, slot_bytes = _sizes()
        try:
            return ShmTransport(request, slots, slot_bytes)
        except OSError as error:
            found = self.probe()
            raise PluginLoadError(
                f"the shared-memory transport cannot be opened: {error}. {found.reason} {found.remedy}".strip()
            ) from error


class ShmTransport(Transport):
    """Shared-memory links of one rank in one communicator."""

    name = "shm"

    def __init__(self, request: TransportRequest, slots: int, slot_bytes: int) -> None:
        from hetccl.transports.shm._shm import Rings

        self._request = request
        self._sizes = (slots, slot_bytes)
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()  # close() against an attach in another thread
        self._doorbell = _doorbell()
        try:
            self._rings = Rings(request.rank, slots, slot_bytes, self._doorbell)
            self._listener = fdpass.FdListener()
        except BaseException:
            os.close(self._doorbell)
            raise
        self.table = self._rings.table()

    def address(self) -> dict[str, Any]:
        return {"socket": self._listener.name.hex(), "host": self._request.host_id}

    def reachable(self, address: dict[str, Any]) -> bool:
        """True on the same host id. Whether the memory can really be shared, dialling shows."""
        return address.get("host") == self._request.host_id

    def fileno(self) -> int:
        return self._listener.fileno()

    def dial(self, peer: int, address: dict[str, Any], purpose: str, timeout: float) -> Link:
        self._check_open()
        deadline = time.monotonic() + timeout
        with self._named(peer, timeout, f"dialling rank {peer}"), contextlib.ExitStack() as undo:
            sock, _ = fdpass.connect(bytes.fromhex(address["socket"]), timeout)
            undo.callback(sock.close)
            handshake.dial(
                sock,
                secret=self._request.secret,
                job=self._request.job,
                rank=self._request.rank,
                peer=peer,
                purpose=purpose,
                timeout=_left(deadline),
            )
            region = fdpass.create_region(self._rings.region_bytes, f"shm-{self._request.rank}-{peer}")
            undo.callback(os.close, region)
            endpoint = self._offer(sock, peer, region, deadline)
        log.debug("rank %d: link to rank %d (%s)", self._request.rank, peer, purpose)
        return Link(peer, endpoint, purpose)

    def accept(self, timeout: float) -> Link | None:
        self._check_open()
        deadline = time.monotonic() + timeout
        try:
            sock, pid = self._listener.accept(timeout)
        except TimeoutError:
            return None
        except OSError as error:  # a stranger, or no descriptors left
            if not self._closed:
                log.warning("rank %d refused a connection: %s", self._request.rank, error)
            return None
        try:
            with sock:
                patience = min(_left(deadline, least=0.1), handshake.ACCEPT_TIMEOUT)
                session = handshake.accept(
                    sock, secret=self._request.secret, job=self._request.job, rank=self._request.rank, timeout=patience
                )
                endpoint = self._take(sock, session.peer, time.monotonic() + handshake.ACCEPT_TIMEOUT)
        except (OSError, TransportError, ClosedError) as error:
            log.warning("rank %d refused a connection of process %d: %s", self._request.rank, pid, error)
            return None
        log.debug("rank %d: link from rank %d (%s)", self._request.rank, session.peer, session.purpose)
        return Link(session.peer, endpoint, session.purpose)

    def describe(self) -> str:
        return "shm"

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._listener.close()
            self._rings.close()
            os.close(self._doorbell)

    def _offer(self, sock: socket.socket, peer: int, region: int, deadline: float) -> int:
        """The dialer's half: our doorbell and the region go out, the peer's doorbell and its consent come back.

        The peer's doorbell is needed to attach, so it comes first, and the region last: when the peer maps it, it is
        laid out. The peer's last word makes a failure there an error here, not a link that only one rank believes in.
        """
        fdpass.send(sock, _sizes_text(self._sizes), [self._doorbell], _left(deadline))
        answer, fds = fdpass.recv(sock, 1, _left(deadline), 1024)  # agreed, or why not
        if answer != _AGREED or len(fds) != 1:
            fdpass.close_all(fds)
            raise self._refused(peer, answer)
        endpoint = self._attach(peer, True, region, fds[0])
        try:
            fdpass.send(sock, _AGREED, [region], _left(deadline))
            answer, _ = fdpass.recv(sock, 0, _left(deadline), 1024)
            if answer != _AGREED:
                raise self._refused(peer, answer)
        except BaseException:
            self._drop(endpoint)
            raise
        return endpoint

    def _take(self, sock: socket.socket, peer: int, deadline: float) -> int:
        """The acceptor's half of `_offer`."""
        theirs, fds = fdpass.recv(sock, 1, _left(deadline), 1024)
        try:
            if theirs != _sizes_text(self._sizes) or len(fds) != 1:
                text = (
                    f"rank {peer} has {theirs.decode(errors='replace')}, rank {self._request.rank} has "
                    f"{_sizes_text(self._sizes).decode()}: set {SLOTS.name} and {SLOT_BYTES.name} alike on all ranks"
                )
                fdpass.send(sock, text.encode(), (), _left(deadline))
                raise TransportError(text, peer=peer, transport="shm")
            fdpass.send(sock, _AGREED, [self._doorbell], _left(deadline))
            _, regions = fdpass.recv(sock, 1, _left(deadline), 1024)
            try:
                if len(regions) != 1:
                    raise TransportError(f"rank {peer} sent no memory", peer=peer, transport="shm")
                endpoint = self._attach(peer, False, regions[0], fds.pop())
            finally:
                fdpass.close_all(regions)
        except BaseException:
            fdpass.close_all(fds)
            raise
        try:
            fdpass.send(sock, _AGREED, (), _left(deadline))
        except BaseException:
            self._drop(endpoint)
            raise
        return endpoint

    def _attach(self, peer: int, dialer: bool, region: int, doorbell: int) -> int:
        """Address of the endpoint, which owns `doorbell` then; on failure `doorbell` is closed."""
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError("the shared-memory transport was closed while a link was being made")
                return int(self._rings.attach(peer, dialer, region, doorbell))
        except BaseException:
            os.close(doorbell)
            raise

    def _drop(self, endpoint: int) -> None:
        with self._lock:
            if not self._closed:
                self._rings.drop(endpoint)

    def _refused(self, peer: int, answer: bytes) -> TransportError:
        return TransportError(
            f"rank {peer} refused the shared-memory link: {answer.decode(errors='replace')}", peer=peer, transport="shm"
        )

    @contextlib.contextmanager
    def _named(self, peer: int, timeout: float, what: str) -> Iterator[None]:
        """Turns the errors of sockets into ours, with the rank in them."""
        try:
            yield
        except TimeoutError as error:
            raise TimedOutError(
                f"{what} over shared memory took longer than {timeout:g} s: {error}", phase="bootstrap", missing=[peer]
            ) from error
        except TransportError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise TransportError(f"{what} over shared memory failed: {error}", peer=peer, transport="shm") from error

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this shared-memory transport is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this shared-memory transport belongs to process {self._pid}; a forked child ({os.getpid()}) must "
                "make its own communicator"
            )


# ---------------------------------------------------------------------------------------------------- helpers

_AGREED = b"agreed"


def _doorbell() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def _sizes_text(sizes: tuple[int, int]) -> bytes:
    return b"%d slots of %d bytes" % sizes


def _left(deadline: float, least: float = 0.0) -> float:
    left = deadline - time.monotonic()
    if left <= 0 and not least:
        raise TimeoutError("no time left")
    return max(left, least)


def _sizes() -> tuple[int, int]:
    """Slots and slot bytes as configured. `ConfigError` names the variable."""
    found = []
    for option in (SLOTS, SLOT_BYTES):
        text = os.environ.get(option.name, "") or option.default
        try:
            found.append(int(text, 0))
        except ValueError:
            raise ConfigError(f"{option.name}={text!r} is no number; {option.text}") from None
    from hetccl.transports.shm._shm import check_sizes

    check_sizes(*found)
    return found[0], found[1]
