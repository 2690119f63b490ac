# SPDX-License-Identifier: Apache-2.0
"""Many tensors in one: packed side by side into memory of the device, and unpacked when the operation is done."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from hetccl.core.buffers import Buffer

__all__ = ["Packing"]


class Packing:
    """Memory for packing on one device. What is free is used again; `close` gives all of it back."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []  # (bytes, address)
        self._all: list[int] = []
        self._stream = 0

    def pack(self, parts: Sequence[Buffer]) -> Buffer:
        """One buffer with the elements of all parts; its `finish` writes them back. Parts have one dtype."""
        nbytes = sum(part.nbytes for part in parts)
        room, address = self._take(max(nbytes, 1))
        self._copy([(address + at, part.ptr, part.nbytes) for at, part in _places(parts)])

        def finish() -> None:
            self._copy([(part.ptr, address + at, part.nbytes) for at, part in _places(parts)])
            for part in parts:
                if part.finish is not None:
                    part.finish()
            with self._lock:
                self._free.append((room, address))

        return Buffer(address, sum(part.count for part in parts), parts[0].dtype, parts, finish)

    def close(self) -> None:
        """After the last operation."""
        with self._lock:
            for address in self._all:
                self._device.free(address)
            if self._stream:
                self._device.stream_destroy(self._stream)
            self._all, self._free, self._stream = [], [], 0

    def _take(self, nbytes: int) -> tuple[int, int]:
        with self._lock:
            fitting = [piece for piece in self._free if nbytes <= piece[0] <= 4 * nbytes + 65536]
            if fitting:
                best = min(fitting)
                self._free.remove(best)
                return best
            room = nbytes + nbytes // 8
            address = self._device.alloc(room)
            self._all.append(address)
            return room, address

    def _copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """(to, from, bytes) each. Blocks until done."""
        if self._device.host_memory:
            for to, source, nbytes in moves:
                ctypes.memmove(to, source, nbytes)
            return
        self._device.bind_thread()
        with self._lock:
            if not self._stream:
                self._stream = self._device.stream_create()
            for to, source, nbytes in moves:
                if nbytes:
                    self._device.copy(to, source, nbytes, self._stream)
            self._device.stream_sync(self._stream)


def _places(parts: Sequence[Buffer]) -> list[tuple[int, Buffer]]:
    """(byte where it begins, part) for each."""
    found, at = [], 0
    for part in parts:
        found.append((at, part))
        at += part.nbytes
    return found
