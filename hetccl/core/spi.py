# SPDX-License-Identifier: Apache-2.0
"""The abstract interfaces of plug-ins in one place, for the core. Plug-ins import the `base` modules."""

from __future__ import annotations

from hetccl.tables import CclTable, DeviceTable, TransportTable
from hetccl.transports.base import Link, Transport, TransportDriver, TransportRequest
from hetccl.vendors.base import Availability, IslandKey, Option, Vendor, VendorDriver, VendorRequest

__all__ = [
    "Availability",
    "CclTable",
    "DeviceTable",
    "IslandKey",
    "Link",
    "Option",
    "Transport",
    "TransportDriver",
    "TransportRequest",
    "TransportTable",
    "Vendor",
    "VendorDriver",
    "VendorRequest",
]
