# SPDX-License-Identifier: Apache-2.0
"""Every error that hetccl raises. All have one root, keep their facts as attributes and can be pickled.

A message says what was asked, what was found and what to do. After `VendorError`, `TransportError`, `TimedOutError`
or `AbortedError` the communicator is dead: abort it and build a new one. After any other error it lives on.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AbortedError",
    "ClosedError",
    "ConfigError",
    "HetcclError",
    "InternalError",
    "MismatchError",
    "PeerLostError",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginVersionError",
    "TimedOutError",
    "TransportError",
    "UnsupportedError",
    "UsageError",
    "VendorError",
]


class HetcclError(Exception):
    """Root of all errors of hetccl. Keyword facts become attributes."""

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> Any:
        return (_rebuild, (type(self), str(self), self.facts))


def _rebuild(cls: type[HetcclError], message: str, facts: dict[str, Any]) -> HetcclError:
    return cls(message, **facts)


class UsageError(HetcclError, ValueError):
    """The caller passed something that cannot be right (size, dtype, overlap, rank)."""


class ClosedError(UsageError):
    """Use after `close()`, after a fatal error, or in a forked child."""


class ConfigError(UsageError):
    """A variable or a file says something that cannot be used."""


class UnsupportedError(HetcclError, NotImplementedError):
    """No installed path can do this combination of operation, dtype and operator."""


class MismatchError(UsageError):
    """Ranks called different operations, or the same one with different arguments."""


class PluginError(HetcclError):
    """A driver is missing or unusable."""


class PluginNotFoundError(PluginError):
    """No installed package offers a driver of that name."""


class PluginConflictError(PluginError):
    """Two packages offer drivers of one name."""


class PluginVersionError(PluginError):
    """A driver was built for another major version of the plug-in interface."""


class PluginLoadError(PluginError):
    """The driver is installed but its library or hardware is not usable."""


class VendorError(HetcclError):
    """A vendor's library reported a failure. Attributes: vendor, call, code."""


class TransportError(HetcclError, ConnectionError):
    """A connection failed. Attributes: peer (rank), transport."""


class PeerLostError(TransportError):
    """A rank has died or left. Attributes: ranks."""


class TimedOutError(HetcclError, TimeoutError):
    """A deadline passed. Attributes: phase, missing (ranks)."""


class InternalError(HetcclError):
    """hetccl itself is wrong, e.g. a plan failed its proof. Nothing was sent; please report it with the text."""


class AbortedError(HetcclError):
    """`abort()` was called on this communicator, here or on another rank."""
