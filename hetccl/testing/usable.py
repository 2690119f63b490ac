# SPDX-License-Identifier: Apache-2.0
"""Skips a conformance test where a driver's own probe says that its hardware or library is absent.

A driver that cannot even be loaded is no reason to skip: that fails.
"""

from __future__ import annotations

import pytest

from hetccl.core import registry
from hetccl.transports.base import TransportDriver
from hetccl.vendors.base import VendorDriver

__all__ = ["require_transport", "require_vendor"]


def require_vendor(name: str) -> registry.NamedVendor:
    """The vendor, or a skip with its reason and remedy."""
    found = registry.vendor(name, probe=False)
    _skip_unless_usable("vendor", name, found.driver)
    return found


def require_transport(name: str) -> None:
    """A skip with reason and remedy unless the transport is usable here."""
    _skip_unless_usable("transport", name, registry.transport(name, probe=False))


def _skip_unless_usable(kind: str, name: str, driver: VendorDriver | TransportDriver) -> None:
    answer = driver.probe()
    if not answer.ok:
        pytest.skip(f"{kind} {name} is not usable here: {answer.reason}; to run this test: {answer.remedy or '-'}")
