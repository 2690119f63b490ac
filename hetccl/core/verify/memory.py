# SPDX-License-Identifier: Apache-2.0
"""Memory as intervals: what each holds, who wrote it and who has read it since. Finds races and unwritten memory.

An access is stamped with the thread that made it and that thread's time when it ended. An earlier access is ordered
before a later one if the later one's clock, when it begins, knows that time (vector clocks).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from hetccl.core.verify.clocks import known
from hetccl.core.verify.values import Content

__all__ = ["Access", "Fault", "Region"]


class Fault(Exception):
    """What is wrong with an access. The machine adds rank and step."""


@dataclass(slots=True)
class Access:
    """Who accesses memory: `clock` is what was known when it began, `time` the thread's own time when it has ended."""

    thread: int
    time: int
    clock: int
    label: object  # str() says who it is


class _Piece:
    __slots__ = ("hi", "index", "lo", "node", "reads", "writer")

    def __init__(
        self, lo: int, hi: int, node: int, index: int, writer: tuple[int, int, object] | None,
        reads: dict[int, tuple[int, object]],
    ) -> None:  # fmt: skip
        self.lo, self.hi, self.node, self.index, self.writer, self.reads = lo, hi, node, index, writer, reads


class Region:
    """Memory of one rank. Positions are elements. `frozen` is a range that nobody may write ... unless it is the
    output."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []

    def fill(self, lo: int, hi: int, node: int, index: int) -> None:
        """What is there before anything runs."""
        if hi > lo:
            first, last = self._cut(lo), self._cut(hi)
            self._starts[first:last] = [lo]
            self._pieces[first:last] = [_Piece(lo, hi, node, index, None, {})]

    def read(self, lo: int, hi: int, access: Access | None) -> Content:
        """The content of [lo, hi). Raises `Fault` where it is unwritten, undefined or being written. Without `access`
        nothing is checked or noted but that it is written."""
        first, last = self._cut(lo), self._cut(hi)
        content: Content = []
        at = lo
        for piece in self._pieces[first:last]:
            if piece.lo != at:
                break
            if piece.node < 0:
                raise Fault(f"reads {self.name}[{piece.lo}:{piece.hi}], which a vendor call may have scribbled on")
            if access:
                self._ordered(piece, access, "reads", writes=False)
                piece.reads[access.thread] = (access.time, access.label)
            if content and content[-1][1] == piece.node and content[-1][2] + content[-1][0] == piece.index:
                length, node, index = content[-1]
                content[-1] = (length + piece.hi - piece.lo, node, index)
            else:
                content.append((piece.hi - piece.lo, piece.node, piece.index))
            at = piece.hi
        if at != hi:
            end = next((p.lo for p in self._pieces[first:last] if p.lo > at), hi)
            raise Fault(f"reads {self.name}[{at}:{end}], which nothing has written")
        return content

    def write(self, lo: int, content: Content, access: Access) -> None:
        """Stores content at lo. Raises `Fault` if another access is not ordered before."""
        hi = lo + sum(length for length, _, _ in content)
        if hi == lo:
            return
        first, last = self._cut(lo), self._cut(hi)
        for piece in self._pieces[first:last]:
            self._ordered(piece, access, "writes", writes=True)
        writer = (access.thread, access.time, access.label)
        fresh, at = [], lo
        for length, node, index in content:
            fresh.append(_Piece(at, at + length, node, index, writer, {}))
            at += length
        self._starts[first:last] = [p.lo for p in fresh]
        self._pieces[first:last] = fresh

    def _ordered(self, piece: _Piece, access: Access, does: str, writes: bool) -> None:
        clock, me = access.clock, access.thread
        if piece.writer:
            thread, time, label = piece.writer
            if known(clock, thread) < time and not (thread == me and time == access.time):
                raise Fault(f"race: {does} {self.name}[{piece.lo}:{piece.hi}] while {label} may still write it")
        if writes:
            for thread, (time, label) in piece.reads.items():
                if known(clock, thread) < time and not (thread == me and time == access.time):
                    raise Fault(f"race: {does} {self.name}[{piece.lo}:{piece.hi}] while {label} may still read it")

    def _cut(self, at: int) -> int:
        """Makes `at` a boundary; returns the number of the first piece that begins there or later."""
        i = bisect_left(self._starts, at)
        if i and self._pieces[i - 1].hi > at:
            p = self._pieces[i - 1]
            self._pieces.insert(i, _Piece(at, p.hi, p.node, p.index + at - p.lo, p.writer, dict(p.reads)))
            self._starts.insert(i, at)
            p.hi = at
        return i
