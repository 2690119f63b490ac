# SPDX-License-Identifier: Apache-2.0
"""What every vendor must do."""

import pytest

from hetccl.testing.ccl_suite import CclSuite
from hetccl.testing.device_suite import DeviceSuite

pytestmark = pytest.mark.oneccl


class TestDevice(DeviceSuite):
    vendor = "oneccl"


class TestCcl(CclSuite):
    vendor = "oneccl"
