# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, final

CHANNELS: int
MOST_SOCKETS: int

@final
class Streams:
    max_message: int
    def __init__(self, max_message: int, most_part: int = ...) -> None: ...
    def capsule(self) -> Any: ...
    def open(self, peer: int, fds: Sequence[int], dialled: bool = ...) -> int: ...
    def close(self) -> None: ...
