# SPDX-License-Identifier: Apache-2.0
"""What a transport driver is: the Python half of the plug-in boundary (the other half is `include/hetccl/spi.h`).

Set-up (addresses, dialling, the authenticated handshake) is Python, once a pair; moving data is the C table.
One `Transport` object belongs to one communicator on one rank. A link is one connected pair of ranks; the rank that
dials it is its initiator. Two ranks may share several links with different purposes.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from hetccl.vendors.base import Availability, Option

__all__ = ["Availability", "Link", "Option", "Transport", "TransportDriver", "TransportRequest"]


@dataclass(frozen=True)
class TransportRequest:
    """What a transport is told when a communicator opens it."""

    rank: int
    size: int
    job: str  # equal on all ranks of this communicator, different for every communicator
    host_id: str  # equal on ranks that may share a host
    secret: bytes  # key of the handshake
    store_host: str = ""  # host name or address of the store, "" if unknown: the route to it is the default interface


class Link(NamedTuple):
    """One connected pair."""

    peer: int
    endpoint: int  # address of the C endpoint, first argument `ep` of transport_ops
    purpose: str  # as given to dial: "collective" or "p2p"


class TransportDriver(abc.ABC):
    """Entry object of a transport plug-in (entry-point group `hetccl.transports`)."""

    name: ClassVar[str]
    preference: ClassVar[int] = 0  # where HETCCL_TRANSPORTS does not say, higher is tried first
    options: ClassVar[tuple[Option, ...]] = ()

    @abc.abstractmethod
    def probe(self) -> Availability:
        """Looks for interfaces and permissions. Never raises, sends nothing."""

    @abc.abstractmethod
    def open(self, request: TransportRequest) -> Transport:
        """Binds a listener. Raises `PluginLoadError` or `ConfigError` with reason and remedy."""


class Transport(abc.ABC):
    """A transport, opened for one communicator on one rank."""

    name: str
    table: Any  # PyCapsule HETCCL_TRANSPORT_CAPSULE -> hetccl_table

    @abc.abstractmethod
    def address(self) -> dict[str, Any]:
        """What others need to dial this rank; travels as JSON."""

    @abc.abstractmethod
    def reachable(self, address: dict[str, Any]) -> bool:
        """Whether it is worth dialling that address (pure; same answer at both ends)."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """Listening descriptor: readable means that `accept` has something to do."""

    @abc.abstractmethod
    def accept(self, timeout: float) -> Link | None:
        """Takes one incoming connection through its handshake. None if it was refused (logged) or gone.

        Called from a thread of its own, so it may block up to `timeout` seconds.
        """

    @abc.abstractmethod
    def dial(self, peer: int, address: dict[str, Any], purpose: str, timeout: float) -> Link:
        """Connects to `peer`. Blocks up to `timeout`; any thread. Raises `TransportError`."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for `explain` and doctor, e.g. 'tcp eth0 10.0.0.5'."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the listener and all endpoints. Idempotent."""
