# SPDX-License-Identifier: Apache-2.0
from typing import Any

__all__ = ["device_table"]

def device_table() -> Any: ...
