# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of this host, and which of them a job should use."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

from hetccl.errors import ConfigError

__all__ = ["Address", "Interface", "choose", "interfaces", "is_loopback"]

VARIABLE = "HETCCL_SOCKET_IFNAME"
# Bridges and tunnels of containers and virtual machines: up, with an address, but seldom a way to another host.
_LOCAL_ONLY = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "lxd", "podman", "vnet", "tap")


class Address(NamedTuple):
    """One address of one interface."""

    family: int  # socket.AF_INET or socket.AF_INET6
    host: str  # without scope
    scope: int  # interface number for link-local IPv6, else 0
    interface: str

    @property
    def link_local(self) -> bool:
        return self.family == socket.AF_INET6 and ipaddress.ip_address(self.host).is_link_local

    def sockaddr(self, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
        """As bind and connect take it."""
        return (self.host, port) if self.family == socket.AF_INET else (self.host, port, 0, self.scope)

    def __str__(self) -> str:
        return f"{self.host}%{self.interface}" if self.scope else self.host


@dataclass(frozen=True)
class Interface:
    """A network interface. Speed is in Mbit/s, 0 if the system does not say."""

    name: str
    index: int
    up: bool
    loopback: bool
    speed: int
    addresses: tuple[Address, ...]


def choose(name: str, store_host: str, loopback_ok: bool) -> list[Address]:
    """Addresses that a rank should listen at, best first.

    `name` is the value of HETCCL_SOCKET_IFNAME: names or prefixes of names, separated by commas, best first. Without
    it: the interface on the route to `store_host`, else the fastest one that is up and not loopback, else loopback.
    Loopback is only chosen where it was named, where the store's own address is a loopback one, or where nothing else
    is up, and in the last two cases only with `loopback_ok`. Sends no packet (a name is looked up). Raises
    `ConfigError`.
    """
    found = interfaces()
    if name.strip():
        return _by_name(name, found)
    if store_host and _names_loopback(store_host) and loopback_ok:
        chosen = [a for i in found if i.loopback and i.up for a in _usable(i)]
        if chosen:
            return chosen
    for local in _route_sources(store_host):
        for interface in found:
            if interface.up and not interface.loopback and any(a.host == local for a in interface.addresses):
                return _usable(interface, first=local)
    for interface in sorted(found, key=_desirability):
        if interface.up and not interface.loopback and interface.addresses:
            return _usable(interface)
    chosen = [a for i in found if i.loopback and i.up for a in _usable(i)]
    if chosen and loopback_ok:
        return chosen
    raise ConfigError(
        f"no network interface that other hosts could reach is up. Interfaces: {_listing(found)}. "
        f"Bring one up, or set {VARIABLE} to the one to use",
        variable=VARIABLE,
        value=name,
    )


def interfaces() -> list[Interface]:
    """All interfaces in the kernel's order, also those that are down or have no address."""
    rows: dict[str, tuple[int, list[Address]]] = {}
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"getifaddrs: {os.strerror(code)}")
    try:
        node = head
        while node:
            entry = node.contents
            name = os.fsdecode(entry.name)
            _, addresses = rows.setdefault(name, (entry.flags, []))
            address = _decode(entry.addr, name)
            if address is not None and address not in addresses:
                addresses.append(address)
            node = entry.next
    finally:
        libc.freeifaddrs(head)
    return sorted(
        (
            Interface(name, _index(name), bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK), _speed(name), tuple(a))
            for name, (flags, a) in rows.items()
        ),
        key=lambda i: i.index,
    )


def is_loopback(host: str) -> bool:
    """Whether an address in digits can only be reached from its own host."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


# ---------------------------------------------------------------------------------------------------- helpers

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def _decode(pointer: int | None, name: str) -> Address | None:
    if not pointer:
        return None
    family = struct.unpack("=H", ctypes.string_at(pointer, 2))[0]
    if family == socket.AF_INET:
        return Address(family, socket.inet_ntop(family, ctypes.string_at(pointer + 4, 4)), 0, name)
    if family == socket.AF_INET6:
        host = socket.inet_ntop(family, ctypes.string_at(pointer + 8, 16))
        scope = struct.unpack("=I", ctypes.string_at(pointer + 24, 4))[0]
        return Address(family, host, scope if ipaddress.ip_address(host).is_link_local else 0, name)
    return None


def _by_name(value: str, found: list[Interface]) -> list[Address]:
    chosen: list[Interface] = []
    for wanted in filter(None, (part.strip() for part in value.split(","))):
        exact = [i for i in found if i.name == wanted]
        chosen += [i for i in exact or found if i.name.startswith(wanted) and i not in chosen]
    if not chosen:
        raise ConfigError(
            f"{VARIABLE}={value} names no interface of host {socket.gethostname()}. Interfaces: {_listing(found)}. "
            f"Set {VARIABLE} to one of these names, a prefix, or a comma-separated list",
            variable=VARIABLE,
            value=value,
            interfaces=[i.name for i in found],
        )
    addresses = [address for i in chosen if i.up for address in _usable(i)]
    if not addresses:
        raise ConfigError(
            f"{VARIABLE}={value} names {', '.join(i.name for i in chosen)} on host {socket.gethostname()}, but nothing "
            f"of that is up and has an address. Interfaces: {_listing(found)}. Bring it up or name another",
            variable=VARIABLE,
            value=value,
            interfaces=[i.name for i in found],
        )
    return addresses


def _usable(interface: Interface, first: str = "") -> list[Address]:
    """Addresses in the order to try: the one on the route, IPv4, IPv6, link-local IPv6."""
    return sorted(interface.addresses, key=lambda a: (a.host != first, a.link_local, a.family != socket.AF_INET))


def _desirability(interface: Interface) -> tuple[bool, int, int]:
    return interface.name.startswith(_LOCAL_ONLY), -interface.speed, interface.index


def _names_loopback(host: str) -> bool:
    """Whether this spelling means loopback on every host. A host's own name that resolves to 127.0.1.1 does not."""
    return host == "localhost" or is_loopback(host.strip("[]"))


def _route_sources(host: str) -> list[str]:
    """Local addresses from which packets to `host` would leave."""
    host = host.strip("[]")
    if not host or _is_wildcard(host):
        return []
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    sources = []
    for family, _, _, _, target in targets:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # a datagram socket only looks up the route
                sources.append(str(probe.getsockname()[0]).partition("%")[0])
        except OSError:
            continue
    return [source for source in sources if not is_loopback(source) and not _is_wildcard(source)]


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 1 << 30  # an alias, or gone since


def _speed(name: str) -> int:
    try:
        with open(f"/sys/class/net/{name}/speed", encoding="ascii") as file:
            return max(0, int(file.read()))
    except (OSError, ValueError):
        return 0


def _listing(found: list[Interface]) -> str:
    return (
        ", ".join(f"{i.name} ({'up' if i.up else 'down'}{''.join(f', {a}' for a in i.addresses)})" for i in found)
        or "none"
    )
