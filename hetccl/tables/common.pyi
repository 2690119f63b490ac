# SPDX-License-Identifier: Apache-2.0
from typing import Any

__all__ = ["capsule", "raise_for_status"]

def raise_for_status(status: int, call: str, text: str = "", layer: str = "") -> None: ...
def capsule(address: int, name: str, owner: object = None) -> Any: ...
