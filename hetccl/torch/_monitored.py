# SPDX-License-Identifier: Apache-2.0
"""The barrier that says who did not come. It goes over the store, so that its failure leaves the group alive.

`torch.distributed.monitored_barrier` takes groups of Gloo only; the group's own method `monitored_barrier` works.
"""

from __future__ import annotations

import time
from typing import Any

from hetccl.errors import TimedOutError
from hetccl.torch._errors import for_torch

__all__ = ["monitored_barrier"]

PAUSE_S = 0.002  # between two looks at the store


def monitored_barrier(store: Any, rank: int, size: int, turn: int, seconds: float, wait_all_ranks: bool) -> None:
    """Returns once all ranks are here. `turn` counts this rank's calls from 1.

    Rank 0 raises TimedOutError, which names the first rank (or with `wait_all_ranks` all) that has not come after
    `seconds`; the others raise it then too, or when they have not heard from rank 0 by their own deadline.
    """
    deadline = time.monotonic() + seconds
    store.add(f"monitored/{rank}", 1)
    if rank == 0:
        _collect(store, size, turn, seconds, deadline, wait_all_ranks)
        return
    while True:
        if store.add("monitored/passed", 0) >= turn:
            return
        failed = store.add("monitored/failed", 0) >= turn
        if failed or time.monotonic() > deadline:
            why = "rank 0 gave up" if failed else f"rank 0 did not answer within {_ms(seconds)}"
            raise for_torch(
                TimedOutError(
                    f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: {why}. Its own message names the ranks that did not come",
                    phase="barrier",
                    missing=() if failed else (0,),
                )
            )
        time.sleep(PAUSE_S)


def _collect(store: Any, size: int, turn: int, seconds: float, deadline: float, wait_all_ranks: bool) -> None:
    missing: list[int] = []
    if size > 1 and seconds <= 0:
        _give_up(store, turn)
        raise for_torch(
            TimedOutError(
                f"Rank 0 timed out in monitoredBarrier after {_ms(seconds)}: it has waited for nobody; pass a timeout",
                phase="barrier",
                missing=tuple(range(1, size)),
            )
        )
    for other in range(1, size):
        while store.add(f"monitored/{other}", 0) < turn:
            if time.monotonic() > deadline:
                missing.append(other)
                break
            time.sleep(PAUSE_S)
        if missing and not wait_all_ranks:
            break
    if not missing:
        store.add("monitored/passed", turn - store.add("monitored/passed", 0))
        return
    _give_up(store, turn)
    noun = "Rank" if len(missing) == 1 else "Ranks"
    names = ", ".join(map(str, missing))
    raise for_torch(
        TimedOutError(
            f"{noun} {names} failed to pass monitoredBarrier in {_ms(seconds)}", phase="barrier", missing=tuple(missing)
        )
    )


def _give_up(store: Any, turn: int) -> None:
    store.add("monitored/failed", turn - store.add("monitored/failed", 0))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
