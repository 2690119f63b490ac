# SPDX-License-Identifier: Apache-2.0
"""Several point-to-point messages in one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetccl.core.arguments import message_tag
from hetccl.core.work import Work
from hetccl.errors import UsageError
from hetccl.types import Op

__all__ = ["Batch", "Recv", "Send", "post_all"]


@dataclass(frozen=True)
class Send:
    """One message to `peer`."""

    buffer: Any
    peer: int
    tag: int = 0


@dataclass(frozen=True)
class Recv:
    """One message from `peer` (None: whoever sends first)."""

    buffer: Any
    peer: int | None = None
    tag: int = 0


class Batch:
    """The works of a batch, in the order of its messages, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = tuple(works)

    def wait(self, timeout: float | None = None) -> None:
        """As `Work.wait`, for all of them; raises what the first failed one died of."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self.works:
            work.wait(None if deadline is None else max(deadline - time.monotonic(), 1e-6))

    def is_done(self) -> bool:
        return all(work.is_done() for work in self.works)

    def exception(self) -> BaseException | None:
        """What the first failed message died of; None while all is well."""
        return next((e for e in (work.exception() for work in self.works) if e is not None), None)

    def add_done_callback(self, fn: Callable[[Batch], Any]) -> None:
        """Calls fn(batch) once all messages have ended, on the completion thread or at once."""
        lock, left = threading.Lock(), len(self.works)
        if not left:
            fn(self)

        def one_less(_: Work) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                fn(self)

        for work in self.works:
            work.add_done_callback(one_less)


def post_all(comm: Any, messages: Sequence[Send | Recv], timeout: float) -> Batch:
    """Receives go first, so that what arrives finds its place. Nothing is posted if one message is not valid."""
    buffers = []
    for i, m in enumerate(messages):
        if not isinstance(m, Send | Recv):
            raise UsageError(f"message {i} of a batch is a {type(m).__name__}; pass Send or Recv")
        if m.peer is not None and (m.peer == comm.rank or not 0 <= m.peer < comm.size):
            raise UsageError(f"message {i} of a batch: peer {m.peer} is not another rank of this communicator")
        message_tag(m.tag)
        buffers.append(comm._take(m.buffer, isinstance(m, Recv), f"buffer of message {i}"))
    works: dict[int, Work] = {}
    for sending in (False, True):
        for i, (m, b) in enumerate(zip(messages, buffers, strict=True)):
            if isinstance(m, Send) != sending:
                continue
            peer = -1 if m.peer is None else m.peer
            ends = (Op.SEND, b.ptr, 0) if sending else (Op.RECV, 0, b.ptr)
            finish = None if sending else b.finish
            works[i] = comm.post(*ends, b.count, b.dtype, 0, peer, m.tag, timeout, b, finish)
    return Batch([works[i] for i in range(len(buffers))])
