# SPDX-License-Identifier: Apache-2.0
from typing import Any

__all__ = ["ccl_table", "device_table"]

def device_table() -> Any: ...
def ccl_table() -> Any: ...
