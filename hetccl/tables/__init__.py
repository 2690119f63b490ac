# SPDX-License-Identifier: Apache-2.0
"""The three C tables of a plug-in, wrapped: checked, normalised, callable from C (fast) and Python (set-up, tests).

A status other than OK and IN_PROGRESS becomes an exception in one place, `raise_for_status`.
"""

from hetccl.tables.ccl import CclTable
from hetccl.tables.common import capsule, raise_for_status
from hetccl.tables.device import DeviceTable
from hetccl.tables.transport import TransportTable

__all__ = ["CclTable", "DeviceTable", "TransportTable", "capsule", "raise_for_status"]
