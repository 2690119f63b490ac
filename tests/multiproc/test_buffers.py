# SPDX-License-Identifier: Apache-2.0
"""What callers pass: strided results are there when an operation says it is done; memory out of reach is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

import hetccl
from hetccl.errors import HetcclError, TimedOutError, UnsupportedError, UsageError
from hetccl.testing.launch import run

MIXES = ["host:2", "host:1,sim-a:1"]


@pytest.mark.parametrize("mix", MIXES)
def test_strided_output_is_there_when_the_work_is_done(mix: str) -> None:
    run(strided, mix, timeout=60)


def test_a_copy_back_that_fails_is_the_works_error() -> None:
    run(copy_back_fails, "host:2", timeout=40)


def test_wait_for_no_time_at_all() -> None:
    run(waits_briefly, "host:2", timeout=40)


@pytest.mark.parametrize("mix", MIXES)
def test_foreign_memory_and_shared_elements_are_refused(mix: str) -> None:
    pytest.importorskip("torch")
    run(refused, mix, timeout=60)


@pytest.mark.parametrize("mix", MIXES)
def test_pending_conjugates_and_negations_are_sent_as_they_read(mix: str) -> None:
    pytest.importorskip("torch")
    run(views_of_torch, mix, timeout=60)


def strided(rank: int, size: int) -> None:
    """Asks three ways: by is_done, by a callback, by wait."""
    import numpy as np

    with hetccl.init() as comm:
        for turn in range(60):
            x = np.full((300, 300), rank + 1, np.float32)
            view = x[:, ::3]
            work = comm.all_reduce(view, async_op=True)
            seen: list[bool] = []
            if turn % 3 == 0:
                while not work.is_done():
                    time.sleep(0)
            elif turn % 3 == 1:
                work.add_done_callback(lambda _, view=view, seen=seen: seen.append(bool((view == 3).all())))
                while not seen:
                    time.sleep(0.0005)
                assert seen == [True]
            else:
                work.wait()
            assert (view == 3).all() and (x[:, 1] == rank + 1).all()


def copy_back_fails(rank: int, size: int) -> None:
    """The thread that completes operations survives it."""
    import numpy as np

    from hetccl.types import DType, Op

    def fails() -> None:
        raise RuntimeError("no way back")

    with hetccl.init() as comm:
        x = np.ones(4, np.float32)
        work = comm.post(Op.ALL_REDUCE, x.ctypes.data, x.ctypes.data, 4, DType.FLOAT32, keep=x, finish=fails)
        with pytest.raises(RuntimeError, match="no way back"):
            work.wait()
        assert isinstance(work.exception(), RuntimeError)
        called: list[Any] = []
        comm.all_reduce(x, async_op=True).add_done_callback(called.append)
        deadline = time.monotonic() + 10
        while not called and time.monotonic() < deadline:
            time.sleep(0.01)
        assert called


def waits_briefly(rank: int, size: int) -> None:
    import numpy as np

    with hetccl.init() as comm:
        x = np.ones(4, np.float32)
        comm.all_reduce(np.ones(4, np.float32))  # the first of its kind is chosen, planned and proved, which takes time
        word = np.ones(1)
        if rank == 1:
            comm.recv(word, 0)  # not before rank 0 has waited in vain
        work = comm.all_reduce(x, async_op=True)
        if rank == 0:
            for brief in (0, 0.05, -1):
                started = time.monotonic()
                with pytest.raises(TimedOutError, match="it goes on"):
                    work.wait(brief)
                assert time.monotonic() - started < 0.5
            comm.send(word, 1)
        work.wait(float("inf"))
        assert (x == 2).all()


class Elsewhere:
    """Claims memory of a device that no driver here knows."""

    def __init__(self) -> None:
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (1 << 20, False), "version": 3}

    def __setitem__(self, *_: object) -> None: ...


def refused(rank: int, size: int) -> None:
    import numpy as np
    import torch

    one = torch.ones(1)
    cases: list[tuple[Any, type[HetcclError], str]] = [
        (Elsewhere(), UsageError, "memory of a device|another device"),
        (torch.empty(4, device="meta"), UnsupportedError, "meta device"),
        (one.expand(4), UsageError, "expanded view"),
        (np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,)), UsageError, "expanded view"),
        (np.float32(1), UsageError, "read-only"),
    ]
    with hetccl.init() as comm:
        for array, kind, text in cases:
            for asynchronous in (False, True):
                with pytest.raises(kind, match=text):
                    comm.all_reduce(array, async_op=asynchronous)
        comm.barrier()  # nobody has sent anything, and all live on


def views_of_torch(rank: int, size: int) -> None:
    import torch

    with hetccl.init() as comm:
        number = torch.full((4,), 1 + 2j, dtype=torch.complex64)
        x = number.conj() if rank == 0 else torch.zeros(4, dtype=torch.complex64)
        comm.broadcast(x, 0)
        assert x.resolve_conj().tolist() == [1 - 2j] * 4
        y = number.conj().imag if rank == 0 else torch.full((4,), 5.0)  # -2 at rank 0, as a negation that is pending
        comm.all_reduce(y)
        assert y.tolist() == [3.0] * 4
        if rank == 0:
            assert number.tolist() == [1 - 3j] * 4  # written through both views
