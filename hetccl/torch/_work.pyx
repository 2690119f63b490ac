# SPDX-License-Identifier: Apache-2.0
"""An operation in flight, as torch.distributed sees it."""

from threading import Lock
from time import monotonic

import torch
from torch._C import _distributed_c10d as c10d

from hetccl.torch import _streams
from hetccl.torch._errors import for_torch

__all__ = ["HetWork", "join"]


class HetWork(c10d.Work):
    """An operation in flight: one or more works of the core, then `finish` (copies to where the caller wanted it).

    `finish` runs once, in whichever of the completion thread and a waiting caller comes first. With a `device`, whose
    work is only enqueued when `wait` returns, it runs on the caller's stream: in `wait`, or for the future.
    """

    _device = _finish = _future = _lock = _error = None  # of most works: so a call sets little
    _works = ()

    def __init__(self, works, outputs, finish=None, device=None):
        c10d.Work.__init__(self)
        self._works = works
        self._outputs = outputs
        self._ended = not works and finish is None
        if device is not None:
            self._device = device
        if finish is not None:
            self._finish = finish
            self._lock = Lock()
            if device is None:
                self._watch(0)

    def wait(self, timeout=None):
        """Blocks until done. Raises the operation's error. `timeout`: timedelta, 0 or None for the group's own."""
        if self._device is not None and self._works and self._error is None:
            return self._wait_on_stream(timeout)     # each time: every stream that comes has to wait
        if not self._ended:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            deadline = monotonic() + seconds if seconds > 0.0 else None
            for work in self._works:
                try:
                    work.wait(None if deadline is None else max(deadline - monotonic(), 1e-6))
                except Exception as error:
                    raise for_torch(error)
            self._end()
        if self._error is not None:
            raise self._error
        return True

    def _wait_on_stream(self, timeout):
        """The caller's stream waits for what is enqueued; the caller waits only for what the host has to do."""
        stream = _streams.current_stream_of(self._device)()
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        for work in self._works:
            try:
                work.wait(seconds or None, stream)
            except Exception as error:
                raise for_torch(error)
        self._end()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self):
        self.wait()

    def block_current_stream(self):
        self.wait()

    def is_completed(self):
        if not self._ended and self._finish is None:
            for work in self._works:
                if not work.is_done():
                    return False
            self._end()
        return self._ended

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        return self._error if self.is_completed() else None

    def result(self):
        return self._outputs

    def source_rank(self):
        return self._works[0].source_rank

    _source_rank = source_rank

    def get_future(self):
        """A future of the outputs. Never blocks; fails as an operation fails.

        The failure is raised inside `then`: an exception that is *set* on a future reaches C++ as a value.
        """
        if self._future is None and self._device is not None and -1 not in [work.stream for work in self._works]:
            self._future = self._device_future()
        if self._future is None:
            done = torch.futures.Future()
            self._future = done.then(self._value)
            self._watch(0, done)
        return self._future

    def _device_future(self):
        """Complete at once, as torch's futures of device work are: whoever waits for it lets his stream wait."""
        done = torch.futures.Future(devices=[self._device])
        streams = {work.stream for work in self._works}
        if self._finish is None and len(streams) == 1 and -1 not in streams:  # it may have failed a moment ago
            _streams.complete_on(self._device, streams.pop(), done, self._outputs)
            return done
        side = torch.cuda.Stream(self._device) if self._works else torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(side):
            try:
                self._wait_on_stream(None)
            except Exception as error:
                return _failed_future(error)
            done.set_result(self._outputs)
        return done

    def _value(self, _):
        self._end()
        if self._device is not None and self._finish is not None:
            torch.cuda.current_stream(self._device).synchronize()
        if self._error is not None:
            raise self._error
        return self._outputs

    def _watch(self, int index, done=None):
        """Ends this work, and completes `done`, when the core's works from `index` on are done."""
        if index < len(self._works):
            self._works[index].add_done_callback(lambda _: self._watch(index + 1, done))
        elif done is None:
            self._end()
        else:
            done.set_result(None)

    def _end(self):
        """All works of the core are done: notes the error, or runs `finish`. Once; a second caller waits for the first."""
        if self._lock is None:
            self._note()
            return
        with self._lock:
            if not self._ended:
                self._note()

    def _note(self):
        if self._ended:
            return
        error = None
        for work in self._works:
            failure = work.exception()
            if failure is not None:
                error = for_torch(failure)
                break
        if error is None and self._finish is not None:
            try:
                self._finish()
            except Exception as failure:
                error = for_torch(failure)
        self._error = error
        self._ended = True


def _failed_future(error):
    """A future that fails as an operation fails."""
    start = torch.futures.Future()

    def fail(_):
        raise error

    failed = start.then(fail)
    start.set_result(None)
    return failed


def join(works, outputs, finish=None, device=None):
    """One work that is done when all `works` (HetWork; None: it has ended) are; then `finish` runs."""
    works = [work for work in works if work is not None]
    parts = tuple([part for work in works for part in work._works])
    return HetWork(parts, outputs, lambda: _finish_all(works, finish), device)


def _finish_all(works, finish):
    for work in works:
        work._end()
        if work._error is not None:
            raise work._error
    if finish is not None:
        finish()
