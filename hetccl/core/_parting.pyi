# SPDX-License-Identifier: Apache-2.0
from typing import final

from hetccl.tables import CclTable, DeviceTable

@final
class Parting:
    stuck_for_good: bool
    def __init__(self, ccl: CclTable, device: DeviceTable, comm: int) -> None: ...
    def wait(self, seconds: float) -> bool: ...
