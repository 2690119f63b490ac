# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from typing import Any, final

from hetccl.vendors.sim.conditions import Conditions

__all__ = ["SimDevice", "open_device"]

@final
class SimDevice:
    name: str
    index: int
    pid: int
    deadline: float
    @property
    def device_table(self) -> Any: ...
    @property
    def ccl_table(self) -> Any: ...
    def create_comm(
        self, rank: int, size: int, island_id: bytes, timeout: float, check: Callable[[], None] | None = None
    ) -> int: ...
    def stop(self, timeout: float = 5.0) -> bool: ...

def open_device(
    name: str, index: int, reduce_masks: Sequence[int], conditions: Conditions | None = None
) -> SimDevice: ...
