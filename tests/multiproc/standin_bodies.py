# SPDX-License-Identifier: Apache-2.0
"""What ranks do on stand-ins of NCCL and RCCL: errors that a test asks for, deaths, captured streams."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import hetccl
from hetccl.types import DType, Op, RedOp

COUNT = 5000


class Runtime:
    """The runtime's stand-in, as a program would use it: device memory and streams of this rank."""

    def __init__(self, vendor: str) -> None:
        name, self.prefix = {"nccl": ("libcudart.so.13", "cuda"), "rccl": ("libamdhip64.so.7", "hip")}[vendor]
        self.library = ctypes.CDLL(name)
        self.kept: list[Any] = []  # streams are deferred: a copy reads its source later

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, self.prefix + name)(*arguments)
        if code:
            raise RuntimeError(f"{name} answers {code}")

    def pointer(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_void_p()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value or 0

    def memory(self, values: Any, stream: int = 0) -> int:
        address = self.pointer("Malloc", ctypes.c_size_t(values.nbytes))
        self.write(address, values, stream)
        return address

    def write(self, address: int, values: Any, stream: int = 0) -> None:
        self.kept.append(values)
        self.copy(address, values.ctypes.data, values.nbytes, stream)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        words = (ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), 4, ctypes.c_void_p(stream))
        self.call("MemcpyAsync", *words)

    def read(self, address: int, like: Any, stream: int = 0) -> Any:
        found = like.copy()
        self.copy(found.ctypes.data, address, found.nbytes, stream)
        self.call("StreamSynchronize", ctypes.c_void_p(stream))
        return found


def row(rank: int, k: int = 0) -> Any:
    import numpy as np

    return (np.arange(COUNT) % 91 + 10 * rank + k).astype(np.float32)


def on_stream(comm: Any, runtime: Runtime, stream: int, x: int, asynchronous: bool = False) -> Any:
    call = (Op.ALL_REDUCE, x, x, COUNT, int(DType.FLOAT32), int(RedOp.SUM))
    return comm.post(*call, stream=stream) if asynchronous else comm.run(*call, stream=stream)


def failing(rank: int, size: int, vendor: str, who: int, variables: dict[str, str], timeout: float) -> tuple[Any, ...]:
    """Rank `who` (-1: all) gets the variables. Calls until one fails: (rounds that went well, error, text, s)."""
    import numpy as np

    if who in (-1, rank):
        os.environ.update(variables)
    well, started = 0, 0.0
    with hetccl.init(timeout=timeout) as comm:
        runtime = Runtime(vendor)
        stream = runtime.pointer("StreamCreateWithFlags", 1)
        x = runtime.memory(row(rank), stream)
        try:
            for k in range(6):
                started = time.monotonic()
                runtime.write(x, row(rank, k), stream)
                on_stream(comm, runtime, stream, x)
                work = on_stream(comm, runtime, stream, x, asynchronous=True)
                work.wait()
                want = sum(row(r, k) for r in range(size)) * size
                if not np.array_equal(runtime.read(x, want, stream), want):
                    return (well, "", f"wrong in round {k}", 0.0)
                well += 1
        except hetccl.HetcclError as error:
            return (well, type(error).__name__, str(error), time.monotonic() - started)
    return (well, "", "", 0.0)


def bereaved(rank: int, size: int, vendor: str) -> tuple[str, str, float]:
    """The last rank dies in the middle: what the others hear, and after how many seconds."""
    comm = hetccl.init(timeout=40)
    runtime = Runtime(vendor)
    stream = runtime.pointer("StreamCreateWithFlags", 1)
    x = runtime.memory(row(rank), stream)
    on_stream(comm, runtime, stream, x)
    runtime.call("StreamSynchronize", ctypes.c_void_p(stream))
    if rank == size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(2):
            on_stream(comm, runtime, stream, x, asynchronous=True).wait()
        return ("", "nobody noticed", 0.0)
    except hetccl.HetcclError as error:
        return (type(error).__name__, str(error), time.monotonic() - started)
    finally:
        comm.close()


def joined_twice(rank: int, size: int) -> tuple[str, str]:
    """All ranks use one device."""
    os.environ["HETCCL_DEVICE"] = "0"
    try:
        hetccl.init(timeout=20).close()
    except hetccl.HetcclError as error:
        return (type(error).__name__, str(error))
    return ("", "")


def captured(rank: int, size: int, vendor: str) -> list[str]:
    """Sync and async calls captured into a graph; replays between ordinary calls."""
    import numpy as np

    faults = []
    with hetccl.init() as comm:
        runtime = Runtime(vendor)
        stream = runtime.pointer("StreamCreateWithFlags", 1)
        x, y = runtime.memory(row(rank), stream), runtime.memory(row(rank), stream)
        gathered = runtime.memory(np.zeros(COUNT * size, np.float32), stream)
        on_stream(comm, runtime, stream, x)
        runtime.call("StreamSynchronize", ctypes.c_void_p(stream))
        runtime.call("StreamBeginCapture", ctypes.c_void_p(stream), 0)
        on_stream(comm, runtime, stream, x)
        work = on_stream(comm, runtime, stream, y, asynchronous=True)
        work.wait(stream=stream)
        comm.run(Op.ALL_GATHER, y, gathered, COUNT, int(DType.FLOAT32), stream=stream)
        time.sleep(0.1)  # the progress thread may look at anything meanwhile, but must not spoil the capture
        graph = ctypes.c_void_p()
        runtime.call("StreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        exec_ = runtime.pointer("GraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        for k in range(6):
            runtime.write(x, row(rank, k), stream)
            runtime.write(y, row(rank, 2 * k), stream)
            runtime.call("GraphLaunch", ctypes.c_void_p(exec_), ctypes.c_void_p(stream))
            if k & 1:
                on_stream(comm, runtime, stream, x)
            want = sum(row(r, k) for r in range(size)) * (size if k & 1 else 1)
            other = sum(row(r, 2 * k) for r in range(size))
            if not np.array_equal(runtime.read(x, want, stream), want):
                faults.append(f"replay {k}: the synchronous call")
            if not np.array_equal(runtime.read(y, other, stream), other):
                faults.append(f"replay {k}: the asynchronous call")
            many = np.concatenate([other] * size)
            if not np.array_equal(runtime.read(gathered, many, stream), many):
                faults.append(f"replay {k}: the gathered rows")
    return faults


def refused(rank: int, size: int, vendor: str) -> list[tuple[str, str]]:
    """Capturing what needs the host: synchronous, asynchronous, a message; then an ordinary call. GPUs only."""
    import numpy as np

    found = []
    with hetccl.init() as comm:
        if comm.vendor != vendor:
            values = row(rank)
            comm.all_reduce(values)
            return []
        runtime = Runtime(vendor)
        stream = runtime.pointer("StreamCreateWithFlags", 1)
        x = runtime.memory(row(rank), stream)
        runtime.call("StreamSynchronize", ctypes.c_void_p(stream))
        runtime.call("StreamBeginCapture", ctypes.c_void_p(stream), 0)
        for asynchronous in (False, True):
            try:
                on_stream(comm, runtime, stream, x, asynchronous)
                found.append(("", "nothing was raised"))
            except hetccl.HetcclError as error:
                found.append((type(error).__name__, str(error)))
        graph = ctypes.c_void_p()
        runtime.call("StreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        on_stream(comm, runtime, stream, x)
        want = sum(row(r) for r in range(size))
        if not np.array_equal(runtime.read(x, want, stream), want):
            found.append(("", "the call after the capture is wrong"))
    return found
