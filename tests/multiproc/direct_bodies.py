# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the direct path."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import hetccl
from hetccl.types import DType, Op, RedOp

SMALL, LARGE = 1000, 1_500_000  # elements: an exchange of words; several chunks


def sums(rank: int, size: int) -> dict[str, Any]:
    """all_reduce of sizes around the seams; what went which way."""
    import numpy as np

    wrong = []
    with hetccl.init() as comm:
        for n in (1, SMALL, 131072, 131073, LARGE, 2 * LARGE + 1):
            x = [np.resize((np.arange(4099) % 97 + 10 * r).astype(np.float32), n) for r in range(size)]
            comm.all_reduce(x[rank])
            rest = [y for r, y in enumerate(x) if r != rank]
            own = np.resize((np.arange(4099) % 97 + 10 * rank).astype(np.float32), n)
            if not np.array_equal(x[rank], sum(rest, own)):
                wrong.append(n)
        paths = set(comm.paths().values())
        trace = comm.explain("all_reduce", 4).trace
        return {"wrong": wrong, "paths": paths, "stats": comm.stats(), "trace": trace}


def past_the_caches(rank: int, size: int) -> list[str]:
    """Sums of so much that a CPU rank's result goes past the caches; several operators, in place and not."""
    import numpy as np

    wrong = []
    with hetccl.init() as comm:
        device, host = comm._joined.device, comm._joined.topology.island_of(rank).host_memory
        for kind, op, n in (("f4", "sum", 5_000_003), ("f8", "avg", 2_500_001), ("i4", "max", 4_300_000)):
            x = [np.resize((np.arange(4099) * 7 % 113 + 11 * r).astype(kind), n) for r in range(size)]
            want = {"sum": x[0] + x[1], "avg": (x[0] + x[1]) / 2, "max": np.maximum(x[0], x[1])}[op].astype(kind)
            y = np.full(n, 77, kind)
            dtype, redop = (
                DType[{"f4": "FLOAT32", "f8": "FLOAT64", "i4": "INT32"}[kind]],
                RedOp[op.upper()],
            )
            if host:
                comm.run(Op.ALL_REDUCE, x[rank].ctypes.data, y.ctypes.data, n, dtype, redop)
            else:
                device.bind_thread()
                source, target = device.alloc(y.nbytes), device.alloc(y.nbytes)
                device.copy(source, x[rank].ctypes.data, y.nbytes)
                device.stream_sync()
                comm.run(Op.ALL_REDUCE, source, target, n, dtype, redop)
                device.copy(y.ctypes.data, target, y.nbytes)
                device.stream_sync()
                device.free(source)
                device.free(target)
            if not np.array_equal(y, want):
                wrong.append(f"{kind} {op}: {int((y != want).sum())} wrong, first at {int((y != want).argmax())}")
            own = x[rank].copy()
            comm.all_reduce(own, op=op)
            if not np.array_equal(own, want):
                wrong.append(f"{kind} {op} in place")
        if host != (comm.stats()["past_bytes"] > 0):
            wrong.append(f"{comm.stats()['past_bytes']} bytes went past the caches")
    return wrong


def star(rank: int, size: int) -> dict[str, Any]:
    """all_reduce with each operator that plans treat differently; how often the library was called."""
    import numpy as np

    wrong = []
    with hetccl.init() as comm:
        for op, kind, n in (
            ("sum", "f4", 1), ("sum", "f4", 9_000_001), ("avg", "f4", LARGE), ("avg", "f2", LARGE),
            ("max", "i8", LARGE),
        ):  # fmt: skip
            scale = size if op == "avg" else 1  # halves are divided before they are added
            x = [np.resize((np.arange(97) + 16 * (r % 4)).astype(kind) * scale, n) for r in range(size)]
            want = np.maximum.reduce(x) if op == "max" else sum(y.astype("f8") for y in x) / scale
            comm.all_reduce(x[rank], op=op)
            if not np.array_equal(x[rank], want.astype(kind)):
                wrong.append(f"{op} {kind} {n}")
        explained = comm.explain("all_reduce", 64 << 20)
        return {"wrong": wrong, "calls": sum(comm.stats()["vendor_calls"].values()), "algorithm": explained.algorithm,
                "share": explained.border_bytes / explained.border_bound, "past": comm.stats()["past_bytes"],
                "vendor": comm.vendor}  # fmt: skip


def early(rank: int, size: int) -> list[bool]:
    """Rank 0 does its part and closes; rank 1 begins long after that; the last rank needs both."""
    import numpy as np

    n = 50_000  # few enough for what lies between ranks 0 and 2
    x, y = np.full(n, rank + 1, np.float32), np.zeros(n if rank == size - 1 else 0, np.float32)
    right = []
    with hetccl.init() as comm:
        for turn in range(2):
            began = time.monotonic()
            if turn and rank == 1:
                time.sleep(2.5)
            comm.reduce_scatter_v(x, y, [0] * (size - 1) + [n])
            right.append(bool((y == size * (size + 1) // 2).all()))
        took = time.monotonic() - began
    return [*right, took < 2.4 if rank == 0 else took > 2.4]


def large(rank: int, size: int, count: int, late: float = 0) -> bool:
    """Whether an all_reduce of so many elements is right; three of them, if rank 1 is to come so many seconds late."""
    import numpy as np

    with hetccl.init() as comm:
        inputs = [np.resize((np.arange(97) + 16 * r).astype("f4"), count) for r in range(size)]
        want, right = sum(inputs), []
        for _ in range(3 if late else 1):
            x = inputs[rank].copy()
            comm.barrier()
            if rank == 1:
                time.sleep(late)
            comm.all_reduce(x)
            right.append(np.array_equal(x, want))
        return all(right)


def messages_beside_a_sum(rank: int, size: int) -> tuple[bool, bool]:
    """Small messages of device memory come and go while a kernel waits for rank 1's part of a large sum."""
    import numpy as np

    with hetccl.init() as comm:
        device, x = comm._joined.device, np.full(LARGE, rank + 1.0, np.float32)
        device.bind_thread()
        block = device.alloc(1 << 20)
        comm.all_reduce(x.copy())
        works = [comm.all_reduce(x, async_op=True, timeout=20)] if rank == 0 else []
        began = time.monotonic()
        for n in (16, 1000, 16):
            op, peer = (Op.SEND, 1) if rank == 0 else (Op.RECV, 0)
            comm.post(op, *((block, 0) if rank == 0 else (0, block)), n, DType.FLOAT32, 0, peer).wait()
        for n in (16, 20_000, 200_000):  # from any rank: staged, in memory that grows
            op, peer = (Op.RECV, -1) if rank == 0 else (Op.SEND, 0)
            comm.post(op, *((0, block) if rank == 0 else (block, 0)), n, DType.FLOAT32, 0, peer).wait()
        took = time.monotonic() - began
        works = works or [comm.all_reduce(x, async_op=True, timeout=20)]
        works[0].wait()
        device.free(block)
        return took < 5, bool((x == 3).all())


def hangs(rank: int, size: int, pending: bool) -> float:
    """Seconds that close() takes when the last rank's device ends nothing any more, `pending`: with work under way."""
    import numpy as np

    comm, x = hetccl.init(), np.ones(LARGE, np.float32)
    comm.all_reduce(x)
    if rank == size - 1:
        os.environ["STANDIN_HANGS"] = "1"
    began = time.monotonic()
    if pending:
        comm.all_reduce(x, async_op=True, timeout=1)
    comm.close()
    del comm
    gc.collect()
    return time.monotonic() - began


def ahead(rank: int, size: int) -> list[str]:
    """Operations of several chunks, posted one behind the other: a rank that has sent its part is in the next one
    already."""
    import numpy as np

    wrong = []
    with hetccl.init() as comm:
        for turn in range(3):
            works, held = [], []
            for i, n in enumerate((2_000_000, 1_400_001, 5_100_000, 1_310_720, 1_500_003)):
                x = np.resize((np.arange(97) + 7 * rank + i + turn).astype(np.float32), n)
                want = sum(np.resize((np.arange(97) + 7 * r + i + turn).astype(np.float32), n) for r in range(size))
                if i != 2:  # a broadcast's root is done when all has left
                    want = np.resize((np.arange(97) + i + turn).astype(np.float32), n)
                    works.append(comm.broadcast(x, 0, async_op=True))
                else:
                    works.append(comm.all_reduce(x, async_op=True))
                held.append((x, want))
            for work in works:
                work.wait()
            wrong += [f"{turn}/{i}" for i, (x, want) in enumerate(held) if not np.array_equal(x, want)]
    return wrong


def messages(rank: int, size: int) -> list[str]:
    """Messages between devices, of host memory, and to whoever asks; both ways at once."""
    import numpy as np

    wrong = []
    with hetccl.init() as comm:
        device = comm._joined.device
        device.bind_thread()
        for n in (10, 70_000, 600_000, 9_000_001):
            x = np.random.default_rng(n).integers(0, 255, n, dtype=np.uint8)
            source, target = device.alloc(n), device.alloc(n)
            device.copy(source, x.ctypes.data, n)
            device.stream_sync()
            peer = -1 if n == 600_000 else 1 - rank
            works = [
                comm.post(Op.SEND, source, 0, n, DType.UINT8, 0, 1 - rank, tag=3),
                comm.post(Op.RECV, 0, target, n, DType.UINT8, 0, peer, tag=3),
            ]
            for work in works:
                work.wait()
            y = np.zeros_like(x)
            device.copy(y.ctypes.data, target, n)
            device.stream_sync()
            if not np.array_equal(x, y):
                wrong.append(f"{n} bytes of device memory")
            z = np.zeros_like(x)
            for work in (comm.send(x, 1 - rank, async_op=True), comm.recv(z, 1 - rank, async_op=True)):
                work.wait()
            if not np.array_equal(x, z):
                wrong.append(f"{n} bytes of host memory")
    return wrong


def differ(rank: int, size: int, first: int, second: int) -> str:
    """Ranks that call all_reduce with different counts: the name of the error."""
    import numpy as np

    with hetccl.init() as comm:
        comm.all_reduce(np.ones(SMALL, np.float32))
        try:
            comm.all_reduce(np.ones(second if rank else first, np.float32), timeout=20)
        except hetccl.errors.HetcclError as error:
            return type(error).__name__
    return "nothing"


def dies(rank: int, size: int, count: int) -> tuple[str, float]:
    """Rank 1 dies while rank 0 waits for it; the name of rank 0's error, and after how many seconds."""
    import numpy as np

    with hetccl.init() as comm:
        comm.all_reduce(np.ones(count, np.float32))
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            comm.all_reduce(np.ones(count, np.float32), timeout=60)
        except hetccl.errors.HetcclError as error:
            return type(error).__name__, time.monotonic() - started
    return "nothing", 0.0
