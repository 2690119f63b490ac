# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one conformance test exchange a few bytes: files in the job's own folder, no store of the core."""

from __future__ import annotations

import os
import time

__all__ = ["Meeting"]


class Meeting:
    """Named bytes that one rank puts and others get. Works in ranks started by `hetccl.testing.launch`."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder or os.environ["HETCCL_STORE"].removeprefix("file://")

    def put(self, name: str, value: bytes) -> None:
        path = os.path.join(self.folder, f"meet-{name}")
        with open(f"{path}.{os.getpid()}", "wb") as file:
            file.write(value)
        os.replace(file.name, path)

    def get(self, name: str, timeout: float = 30.0) -> bytes:
        """Blocks until it is there. Raises `TimeoutError` that names what is missing."""
        deadline = time.monotonic() + timeout
        while True:
            value = self.look(name)
            if value is not None:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rank has put {name!r} within {timeout:g} s")
            time.sleep(0.002)

    def look(self, name: str) -> bytes | None:
        """The bytes, or None if they are not there yet."""
        try:
            with open(os.path.join(self.folder, f"meet-{name}"), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def barrier(self, name: str, rank: int, size: int, timeout: float = 30.0) -> None:
        """Blocks until all `size` ranks have called with this `name`."""
        self.put(f"{name}-{rank}", b"")
        for other in range(size):
            self.get(f"{name}-{other}", timeout)
