# SPDX-License-Identifier: Apache-2.0
"""A folder as meeting place: jobs one after another may use the same one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hetccl.core.store import DirectoryStore, open_store
from hetccl.errors import TimedOutError


def meet(folder: Path, size: int, job: str, delays: tuple[float, ...] = ()) -> list[bytes]:
    """What each rank reads of rank 0's key, where every rank opens the folder in a thread of its own."""
    found: dict[int, bytes] = {}

    def rank(r: int) -> None:
        time.sleep(delays[r] if delays else 0)
        store = open_store(f"file://{folder}", r, size, 20)
        if r == 0:
            time.sleep(0.05)
            store.set("hello", job.encode())
        while not store.check(["hello"]):
            time.sleep(0.001)
        found[r] = store.get("hello")

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return [found[r] for r in range(size)]


def test_a_second_job_is_not_misled_by_the_first(tmp_path: Path) -> None:
    for number, delays in enumerate(((0.0, 0.0, 0.0), (0.2, 0.0, 0.1), (0.0, 0.2, 0.1), (0.1, 0.1, 0.0))):
        assert meet(tmp_path, 3, f"job {number}", delays) == [f"job {number}".encode()] * 3
    assert meet(tmp_path, 1, "alone") == [b"alone"]
    assert meet(tmp_path, 4, "more ranks") == [b"more ranks"] * 4


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(TimedOutError, match=r"ranks \[1, 2\]") as caught:
        DirectoryStore(str(tmp_path)).enter(0, 3, 0.2)
    assert caught.value.facts["missing"] == (1, 2)
    with pytest.raises(TimedOutError, match=r"ranks \[0\]"):
        DirectoryStore(str(tmp_path)).enter(1, 3, 0.2)  # rank 0's answer of before is not for this one
