# SPDX-License-Identifier: Apache-2.0
"""Times one operation in several ways by turns, so that whatever else the machine does hits all of them: one
communicator for each way, over the same ranks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hetccl.core.communicator import Communicator
from hetccl.core.store import Store
from hetccl.types import DType, Op, RedOp

__all__ = ["Rivals", "environment", "interleaved"]

ROUNDS = 5
Buffers = tuple[int, int]  # addresses of input and output


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Sets variables (None: unsets) while communicators are made."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            _put(name, value)
        yield
    finally:
        for name, value in before.items():
            _put(name, value)


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


class Rivals:
    """Communicators of all ranks of a job, one for each label. `ways` maps labels to the algorithm that is forced for
    `op` ("" for none). Leave them by `close`."""

    def __init__(self, store: Store, rank: int, size: int, op: Op, ways: Mapping[str, str], **options: Any) -> None:
        self.op = op
        self.comms: dict[str, Communicator] = {}
        try:
            for label, algorithm in ways.items():
                forced = f"{op.label}={algorithm}" if algorithm else None
                with environment(HETCCL_ALGORITHM=forced):
                    self.comms[label] = Communicator(store, rank, size, name=f"{op.label}-{label}", **options)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Rivals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def times(
        self, control: Communicator, buffers: Buffers, count: int, dtype: DType, redop: RedOp, budget: float
    ) -> dict[str, float]:
        """Median seconds of a call on the slowest rank, by label. `budget`: about how long each may be timed."""

        def call_of(comm: Communicator) -> Callable[[], None]:
            return lambda: comm.run(self.op, *buffers, count, dtype, redop, 0)

        return interleaved(control, {label: call_of(comm) for label, comm in self.comms.items()}, budget)

    def close(self) -> None:
        for comm in self.comms.values():
            comm.close()


def interleaved(
    control: Communicator, calls: Mapping[str, Callable[[], Any]], budget: float, rounds: int = ROUNDS,
    slowest: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Median seconds of each call, on the slowest rank or (not `slowest`) on this one. All ranks of `control` call it
    alike; `budget` is seconds for each call, all its repetitions together."""
    once = 0.0
    for call in calls.values():
        control.barrier()
        call()  # the first call plans
        start = time.perf_counter()
        call()
        once = max(once, time.perf_counter() - start)
    a_round = int(agreed(control, [max(1.0, min(200.0, budget / max(once, 1e-7) / rounds))])[0])
    turns = rounds if once * rounds <= 4 * budget else 2
    turns = int(agreed(control, [turns])[0])
    taken: dict[str, list[float]] = {label: [] for label in calls}
    for number in range(turns):
        order = list(calls.items())
        for label, call in order if number % 2 == 0 else reversed(order):
            control.barrier()
            for _ in range(a_round):
                start = time.perf_counter()
                call()
                taken[label].append(time.perf_counter() - start)
    box = np.array([statistics.median(times) for times in taken.values()], np.float64)
    if slowest:
        control.all_reduce(box, op="max")
    return dict(zip(calls, map(float, box), strict=True))


def agreed(control: Communicator, values: Sequence[float]) -> list[float]:
    """Rank 0's values, on all ranks."""
    box = np.array(values, np.float64)
    control.broadcast(box, 0)
    return [float(v) for v in box]
