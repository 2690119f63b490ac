# SPDX-License-Identifier: Apache-2.0
from typing import Any

__all__ = ["ccl_table"]

def ccl_table() -> Any: ...
