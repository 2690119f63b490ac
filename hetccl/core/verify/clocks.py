# SPDX-License-Identifier: Apache-2.0
"""Vector clocks, packed into one integer each: a field a thread, whose top bit stays free. To join two is then a
handful of operations on whole integers, however many threads there are."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["joiner", "known", "tick"]

WIDTH = 24  # bits a thread: up to 8 million accesses
FIELD = (1 << (WIDTH - 1)) - 1


def known(clock: int, thread: int) -> int:
    """The time of a thread that a clock knows of."""
    return (clock >> (WIDTH * thread)) & FIELD


def tick(clock: int, thread: int) -> int:
    """One later for the thread itself."""
    return clock + (1 << (WIDTH * thread))


def joiner(threads: int) -> Callable[[int, int], int]:
    """A function that gives what two clocks of so many threads know together: the greater of each field."""
    top = sum(1 << (WIDTH * (t + 1) - 1) for t in range(threads))

    def join(a: int, b: int) -> int:
        if a == b:
            return a
        at_least = ((a | top) - b) & top  # set where a's field is not less than b's
        mask = at_least - (at_least >> (WIDTH - 1))
        return b ^ ((a ^ b) & mask)

    return join
