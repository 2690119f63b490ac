# SPDX-License-Identifier: Apache-2.0
"""The driver: which addresses to listen at, dialling, accepting. The bytes themselves are moved by stream.c."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from typing import Any

from hetccl.errors import ClosedError, ConfigError, PluginLoadError, TransportError
from hetccl.native.handshake import HandshakeError, dial
from hetccl.native.interfaces import Address, choose, interfaces, is_loopback
from hetccl.transports.base import Availability, Link, Option, Transport, TransportDriver, TransportRequest

__all__ = ["TcpDriver", "TcpTransport"]

log = logging.getLogger("hetccl.transports.tcp")

CHUNK_BYTES = 256 << 10
CHUNK_LIMITS = (4 << 10, 16 << 20)
SOCKETS = 1
SOCKET_LIMITS = (1, 16)
DEAD_ADDRESS = 2.0  # seconds that one address may stay silent while there is another to try


class TcpDriver(TransportDriver):
    """Entry object of the plug-in."""

    name = "tcp"
    preference = 10
    options = (
        Option(
            "HETCCL_TCP_CHUNK_BYTES",
            f"Longest message in bytes, {CHUNK_LIMITS[0]} to {CHUNK_LIMITS[1]}. Must be equal on all ranks. "
            "Large data of devices is cut into 1048576, with more than four sockets 524288, unless this is set.",
            str(CHUNK_BYTES),
        ),
        Option(
            "HETCCL_TCP_SOCKETS",
            f"Sockets, {SOCKET_LIMITS[0]} to {SOCKET_LIMITS[1]} for each direction, that carry large data of devices "
            "between two ranks, each served by a thread at either end. Must be equal on all ranks.",
            str(SOCKETS),
        ),
    )

    def probe(self) -> Availability:
        try:
            from hetccl_transport_tcp import _tcp  # noqa: F401

            found = [i for i in interfaces() if i.up and i.addresses]
        except ImportError as error:
            return Availability(
                False,
                f"its compiled module cannot be loaded: {error}",
                "pip install --force-reinstall hetccl-transport-tcp",
            )
        except OSError as error:
            return Availability(
                False, f"the network interfaces cannot be listed: {error}", "look at the kernel's network set-up"
            )
        if not found:
            return Availability(False, "no network interface is up", "ip link set lo up")
        details = {}
        for i in found:
            details[i.name] = ", ".join(map(str, i.addresses)) + (f" ({i.speed} Mbit/s)" if i.speed else "")
        return Availability(True, details=details)

    def open(self, request: TransportRequest) -> TcpTransport:
        return TcpTransport(
            request,
            _number("HETCCL_TCP_CHUNK_BYTES", CHUNK_BYTES, CHUNK_LIMITS, "bytes"),
            _number("HETCCL_TCP_SOCKETS", SOCKETS, SOCKET_LIMITS, "sockets"),
            _number("HETCCL_TCP_CHUNK_BYTES", 0, CHUNK_LIMITS, "bytes"),
        )


class TcpTransport(Transport):
    """Listeners and endpoints of one communicator on one rank."""

    name = "tcp"

    def __init__(
        self, request: TransportRequest, chunk_bytes: int = CHUNK_BYTES, sockets: int = SOCKETS, part_bytes: int = 0
    ) -> None:
        """`part_bytes`: at most so much of a window's data goes over one socket at a time; 0: by their number."""
        try:
            from hetccl_transport_tcp._tcp import Streams
            from hetccl_transport_tcp.listener import Listener
        except ImportError as error:
            raise PluginLoadError(
                f"the compiled module of hetccl-transport-tcp cannot be loaded: {error}. "
                "Install it again: pip install --force-reinstall hetccl-transport-tcp"
            ) from error
        self._request = request
        self._pid = os.getpid()
        self._closed = False
        self._chunk_bytes = chunk_bytes
        self._sockets = sockets
        chosen = choose(os.environ.get("HETCCL_SOCKET_IFNAME", ""), request.store_host, True)
        self._listener = Listener(request, chosen)
        self._streams = Streams(chunk_bytes, part_bytes)
        self.table = self._streams.capsule()
        log.debug("rank %d listens at %s", request.rank, ", ".join(f"{a}:{p}" for a, p in self._listener.bound))

    def address(self) -> dict[str, Any]:
        bound = self._listener.bound
        return {
            "addrs": [[_FAMILY_NAMES[a.family], a.host, port, a.scope] for a, port in bound],
            "host": self._request.host_id,
            "loopback": _only_loopback(a.host for a, _ in bound),
            "chunk": self._chunk_bytes,
            "sockets": self._sockets,
        }

    def reachable(self, address: dict[str, Any]) -> bool:
        mine = self.address()
        if address.get("host") != mine["host"] and (address.get("loopback") or mine["loopback"]):
            return False
        return bool({a[0] for a in address.get("addrs", ())} & {a[0] for a in mine["addrs"]})

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self, timeout: float) -> Link | None:
        """See the base class. Waits for no single stranger. The Link comes with its last channel."""
        self._check_open()
        accepted = self._listener.accept(timeout)
        if accepted is None:
            return None
        peer, purpose, socks = accepted
        return self._link(peer, purpose, socks, False)

    def dial(self, peer: int, address: dict[str, Any], purpose: str, timeout: float) -> Link:
        """See the base class. Tries the peer's addresses in turn; a silent one costs two seconds if others are left."""
        self._check_open()
        deadline = time.monotonic() + timeout
        for key, variable, mine in (
            ("chunk", "HETCCL_TCP_CHUNK_BYTES", self._chunk_bytes),
            ("sockets", "HETCCL_TCP_SOCKETS", self._sockets),
        ):
            if address.get(key, mine) != mine:
                raise ConfigError(
                    f"{variable} is {mine} on rank {self._request.rank} and {address[key]} on rank {peer}: "
                    "set it alike on all ranks",
                    variable=variable,
                )
        # Data of devices takes the links of collectives; a peer that does not say how many sockets knows no windows.
        bulk = int(address.get("sockets", 0)) if purpose == "collective" else 0
        targets = self._targets(address)
        failures: list[str] = []
        for number, target in enumerate(targets, 1):
            left = deadline - time.monotonic()
            if left <= 0:
                failures.append(f"no time was left for {_spell(target)}")
                break
            limit = left if number == len(targets) else min(DEAD_ADDRESS, left)
            try:
                socks = self._dial_channels(peer, target, purpose, bulk, limit, deadline)
            except HandshakeError as error:
                if getattr(error, "reason", "") == "version":
                    raise
                failures.append(f"{_spell(target)}: {error}")
            except OSError as error:
                failures.append(f"{_spell(target)}: {error}")
            else:
                return self._link(peer, purpose, socks, True)
            log.warning("rank %d: address %s", peer, failures[-1])
        raise TransportError(
            f"rank {self._request.rank} cannot connect to rank {peer} over tcp from {self.describe()[4:]}: "
            + ("; ".join(failures) or f"none of its addresses {address.get('addrs')} is of a family that this host has")
            + ". Check that this network reaches that host (firewall, routes), or name another interface in "
            "HETCCL_SOCKET_IFNAME",
            peer=peer,
            transport="tcp",
        )

    def describe(self) -> str:
        first = self._listener.bound[0][0]
        more = f", {self._sockets} sockets" if self._sockets > 1 else ""
        return f"tcp {first.interface} {first.host}{more}"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        self._streams.close()

    # ------------------------------------------------------------------------------------------------ helpers

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("this tcp transport belongs to the parent process: open a new one after a fork")
        if self._closed:
            raise ClosedError("this tcp transport is closed")

    def _link(self, peer: int, purpose: str, socks: list[socket.socket], dialled: bool) -> Link:
        for sock in socks:
            _tune(sock)
        endpoint = self._streams.open(peer, [sock.fileno() for sock in socks], dialled)
        for sock in socks:
            sock.detach()
        if self._closed:  # closed meanwhile by another thread
            self._streams.close()
            raise ClosedError("this tcp transport is closed")
        return Link(peer, endpoint, purpose)

    def _targets(self, address: dict[str, Any]) -> list[tuple[Address, int]]:
        """The peer's addresses that this host can dial, in the peer's order."""
        same_host = address.get("host") == self._request.host_id
        own = [a for a, _ in self._listener.bound]
        targets = []
        for family_name, host, port, scope in address.get("addrs", ()):
            family = _FAMILIES.get(family_name)
            if family is None or (family == socket.AF_INET6 and not _has_ipv6()):
                continue
            if is_loopback(host) and not same_host:
                continue
            target = Address(family, host, int(scope), "")
            if target.link_local and not same_host:  # a scope is the number of an interface of one's own
                target = target._replace(scope=socket.if_nametoindex(own[0].interface))
            targets.append((target, int(port)))
        return targets

    def _dial_channels(
        self, peer: int, target: tuple[Address, int], purpose: str, bulk: int, limit: float, deadline: float
    ) -> list[socket.socket]:
        """All sockets of a link, each through its handshake; `bulk` of them a direction for data of devices. The nonce
        tells the peer which of them belong together."""
        from hetccl_transport_tcp._tcp import link_sockets

        request, nonce = self._request, secrets.token_hex(8)
        until = time.monotonic() + limit
        count = link_sockets(bulk)
        socks: list[socket.socket] = []
        try:
            for channel in range(count):
                sock = socket.socket(target[0].family, socket.SOCK_STREAM)
                socks.append(sock)
                self._bind_source(sock, target[0])
                sock.settimeout(max(0.01, until - time.monotonic()))
                sock.connect(target[0].sockaddr(target[1]))
                until = deadline  # it is alive
                dial(
                    sock,
                    secret=request.secret,
                    job=request.job,
                    rank=request.rank,
                    peer=peer,
                    purpose=f"{purpose}|{channel}:{bulk}|{nonce}",
                    timeout=max(0.01, deadline - time.monotonic()),
                )
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        return socks

    def _bind_source(self, sock: socket.socket, target: Address) -> None:
        """Leaves by the chosen interface, unless the target is on the other side of the loopback line."""
        for own, _ in self._listener.bound:
            if own.family == target.family and is_loopback(own.host) == is_loopback(target.host):
                if own.link_local == target.link_local:
                    sock.bind(own.sockaddr(0))
                return


_FAMILIES: dict[str, int] = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_FAMILY_NAMES = {number: name for name, number in _FAMILIES.items()}


def _number(variable: str, default: int, limits: tuple[int, int], what: str) -> int:
    text = os.environ.get(variable, "")
    if not text.strip():
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not limits[0] <= value <= limits[1]:
        raise ConfigError(
            f"{variable}={text} is not a number of {what} from {limits[0]} to {limits[1]}. "
            f"Unset it for the default of {default}",
            variable=variable,
            value=text,
        )
    return value


def _tune(sock: socket.socket) -> None:
    """Options of a data socket. A host that vanishes while nothing is under way is noticed after some 22 seconds."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        try:  # a pacing algorithm only costs time inside one host
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError:
            log.debug("congestion control cubic was refused; the host's default stays")


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def _only_loopback(hosts: Any) -> bool:
    return all(is_loopback(host) for host in hosts)


def _spell(target: tuple[Address, int]) -> str:
    address, port = target
    if address.family == socket.AF_INET:
        return f"{address.host}:{port}"
    return f"[{address.host}{f'%{address.scope}' if address.scope else ''}]:{port}"
