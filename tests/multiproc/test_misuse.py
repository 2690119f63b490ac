# SPDX-License-Identifier: Apache-2.0
"""Numbers that mean nothing are refused with a typed error before anything is dialled or sent."""

from __future__ import annotations

import numpy as np
import pytest

import hetccl
from hetccl.errors import HetcclError, UnsupportedError, UsageError
from hetccl.testing.launch import run
from hetccl.types import DType, Op


def body(rank: int, size: int) -> bool:
    x = np.ones(4, np.float32)
    at = x.ctypes.data
    with hetccl.init() as comm:
        other = 1 - rank
        for tag in (1 << 31, 1 << 40, -1, 1.5):
            for call in (
                lambda tag=tag: comm.send(x, other, tag),
                lambda tag=tag: comm.recv(x, other, tag),
                lambda tag=tag: comm.recv(x, None, tag),
                lambda tag=tag: comm.batch([hetccl.Recv(x, other, 1), hetccl.Send(x, other, tag)]),
            ):
                with pytest.raises(UsageError, match="tag"):
                    call()
        assert not comm._core.has_p2p_link(other)  # nothing was dialled
        for nbytes in (-5, 2.5):
            with pytest.raises(UsageError, match="bytes"):
                comm.explain("all_reduce", nbytes)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            comm.explain("all_gather", 0, counts=(3, -1))
        for op in (42, -1, 256, 11, Op.SEND):
            with pytest.raises(HetcclError):
                comm.run(op, at, at, 4, DType.FLOAT32)
        for op in (42, -1, 256, 11):
            with pytest.raises(UsageError):
                comm.post(op, at, at, 4, DType.FLOAT32)
        for dtype, redop in ((99, 0), (256, 0), (-1, 0), (7, 99), (7, 300)):
            with pytest.raises(UsageError):
                comm.run(Op.ALL_REDUCE, at, at, 4, dtype, redop)
        with pytest.raises(UsageError):
            comm.post(Op.SEND, at, 0, 4, 99, 0, other)
        for root in (size, -1, 1 << 20):
            for call in (
                lambda root=root: comm.post(Op.BROADCAST, at, at, 4, DType.FLOAT32, root=root),
                lambda root=root: comm.run(Op.BROADCAST, at, at, 4, DType.FLOAT32, root=root),
                lambda root=root: comm.explain("broadcast", 4, root=root),
            ):
                with pytest.raises(UsageError, match="root"):
                    call()
        for peer in (size, -2, rank):
            with pytest.raises(UsageError):
                comm.post(Op.RECV, 0, at, 4, DType.FLOAT32, 0, peer)
        with pytest.raises(UnsupportedError):
            comm.explain("reduce_all", 4)
        comm.barrier()  # and it lives on
        comm.all_reduce(x)
        return bool((x == size).all())


def test_what_does_not_exist_is_refused() -> None:
    assert run(body, "host@a:1,host@b:1", timeout=40) == [True, True]
