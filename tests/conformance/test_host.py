# SPDX-License-Identifier: Apache-2.0
"""The host vendor keeps the contract."""

from hetccl.testing.ccl_suite import CclSuite
from hetccl.testing.device_suite import DeviceSuite


class TestDevice(DeviceSuite):
    vendor = "host"


class TestCcl(CclSuite):
    vendor = "host"
