# SPDX-License-Identifier: Apache-2.0
"""The foo vendor keeps the contract."""

from hetccl.testing.ccl_suite import CclSuite
from hetccl.testing.device_suite import DeviceSuite


class TestDevice(DeviceSuite):
    vendor = "foo"


class TestCcl(CclSuite):
    vendor = "foo"
