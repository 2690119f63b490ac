# SPDX-License-Identifier: Apache-2.0
"""The pretend accelerator keeps the contract."""

from hetccl.testing.ccl_suite import CclSuite
from hetccl.testing.device_suite import DeviceSuite


class TestDevice(DeviceSuite):
    vendor = "sim-a"


class TestCcl(CclSuite):
    vendor = "sim-a"
