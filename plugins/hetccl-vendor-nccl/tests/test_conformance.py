# SPDX-License-Identifier: Apache-2.0
"""What every vendor must do, on stand-ins."""

from hetccl.testing.ccl_suite import CclSuite
from hetccl.testing.device_suite import DeviceSuite


class TestDevice(DeviceSuite):
    vendor = "nccl"


class TestCcl(CclSuite):
    vendor = "nccl"
