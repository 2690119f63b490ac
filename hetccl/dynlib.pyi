# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import final

__all__ = ["Library", "open_library"]

@final
class Library:
    name: str
    path: str
    shared: bool
    def symbol(self, name: str) -> int | None: ...

def open_library(names: str | Sequence[str], deepbind: bool = False, remedy: str = "", what: str = "") -> Library: ...
