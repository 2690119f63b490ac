# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the fault tests do. Each function is one rank's program."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import hetccl


def dies_in_all_reduce(rank: int, size: int, victim: int) -> dict[str, Any]:
    """The victim kills itself between two of many large all_reduces; the others say what they raised and when."""
    import numpy as np

    comm = hetccl.init()
    x = np.ones(4_000_000, np.float32)
    comm.all_reduce(x)
    for number in range(1000):
        if rank == victim and number == 5:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        x[:] = 1
        if rank == victim and number == 6:
            time.sleep(10)  # killed in here or in the operation before
        started = time.monotonic()
        try:
            comm.all_reduce(x)
        except hetccl.HetcclError as error:
            took = time.monotonic() - started
            again = ""
            try:
                comm.all_reduce(x)
            except hetccl.HetcclError as second:
                again = type(second).__name__
            comm.close()
            return {"error": type(error).__name__, "text": str(error), "seconds": took, "again": again}
    return {"error": "none"}


def stops(rank: int, size: int, sleeper: int, timeout: float) -> dict[str, Any]:
    """One rank never calls; the others' timeout names it."""
    import numpy as np

    comm = hetccl.init(timeout=20)
    x = np.ones(1000, np.float32)
    comm.all_reduce(x)
    if rank == sleeper:
        time.sleep(timeout + 4)
        comm.close()
        return {"error": "slept"}
    started = time.monotonic()
    try:
        comm.all_reduce(x, timeout=timeout)
    except hetccl.HetcclError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "missing": getattr(error, "missing", None),
            "seconds": time.monotonic() - started,
        }
    return {"error": "none"}


def mismatched(rank: int, size: int) -> tuple[str, str]:
    """Rank 0 calls with another count."""
    import numpy as np

    comm = hetccl.init(timeout=10)
    x = np.ones(1000 + (10 if rank == 0 else 0), np.float32)
    try:
        comm.all_reduce(x)
    except hetccl.HetcclError as error:
        return type(error).__name__, str(error)
    return "none", ""


def aborts(rank: int, size: int) -> tuple[str, str, float]:
    """Rank 0 aborts from another thread while everybody waits for rank 1, which does not come."""
    import numpy as np

    comm = hetccl.init(timeout=30)
    x = np.ones(1000, np.float32)
    comm.all_reduce(x)
    if rank == 1:
        time.sleep(3)
        return "slept", "", 0.0
    if rank == 0:
        threading.Timer(0.3, comm.abort).start()
    started = time.monotonic()
    try:
        comm.all_reduce(x)
    except hetccl.HetcclError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", 0.0


def interrupted(rank: int, size: int) -> str:
    """SIGINT during a wait for a rank that does not come."""
    import numpy as np

    comm = hetccl.init(timeout=30)
    x = np.ones(10, np.float32)
    comm.all_reduce(x)
    if rank == 1:
        time.sleep(2)
        return "slept"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        comm.all_reduce(x)
    except KeyboardInterrupt:
        comm.close()
        return "interrupted"
    return "not interrupted"


def forks(rank: int, size: int) -> tuple[int, str, bool]:
    """A forked child may not use the communicator; its exit harms nothing."""
    import numpy as np

    comm = hetccl.init()
    x = np.ones(1000, np.float32)
    comm.all_reduce(x)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(x)
            os.write(write, b"worked")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    text = os.read(read, 4096).decode()
    x[:] = rank
    comm.all_reduce(x)
    comm.close()
    return status, text, bool((x == sum(range(size))).all())


def reopens(rank: int, size: int) -> int:
    """Three communicators one after the other, and two at once."""
    import numpy as np

    from hetccl.core.store import open_store

    for _ in range(3):
        with hetccl.init() as comm:
            comm.barrier()
    store = open_store(os.environ["HETCCL_STORE"], rank, size, 30)
    with hetccl.Communicator(store, rank, size, name="a") as a, hetccl.Communicator(store, rank, size, name="b") as b:
        x, y = np.full(10, 1.0), np.full(10, 2.0)
        one, two = a.all_reduce(x, async_op=True), b.all_reduce(y, async_op=True)
        two.wait()
        one.wait()
        assert (x == size).all() and (y == 2 * size).all()
    return len(os.listdir("/proc/self/fd"))


def exits_without_close(rank: int, size: int) -> int:
    """Leaves everything open, with an operation still in flight on rank 0."""
    import numpy as np

    comm = hetccl.init()
    x = np.ones(1000, np.float32)
    comm.all_reduce(x)
    globals()["kept"] = comm
    return 1


def uses_after_close(rank: int, size: int) -> tuple[str, str]:
    import numpy as np

    comm = hetccl.init()
    comm.close()
    comm.close()
    try:
        comm.all_reduce(np.ones(3, np.float32))
    except hetccl.HetcclError as error:
        return type(error).__name__, str(error)
    return "none", ""


def bad_arguments(rank: int, size: int) -> list[tuple[str, str, str]]:
    """What a user may get wrong; nothing of it may reach the wire, so the communicator works afterwards."""
    import numpy as np

    comm = hetccl.init()
    big = np.zeros(100, np.float32)
    sealed = np.zeros(4, np.float32)
    sealed.flags.writeable = False
    tries: dict[str, Any] = {
        "wrong size": lambda: comm.all_gather(np.zeros(10, np.float32), np.zeros(10 * size + 1, np.float32)),
        "other dtype": lambda: comm.all_reduce(np.zeros(10, np.float32), np.zeros(10, np.float64)),
        "overlap": lambda: comm.all_reduce(big[:50], big[10:60]),
        "unknown dtype": lambda: comm.all_reduce(np.zeros(4, "M8[s]")),
        "unsupported": lambda: comm.all_reduce(np.zeros(4, np.complex64), op="prod"),
        "unknown operator": lambda: comm.all_reduce(big, op="median"),
        "root": lambda: comm.broadcast(big, size),
        "peer": lambda: comm.send(big, -1),
        "self": lambda: comm.send(big, rank),
        "read-only": lambda: comm.all_reduce(sealed),
        "no array": lambda: comm.all_reduce("text"),
    }
    found = []
    for name, fn in tries.items():
        try:
            fn()
            found.append((name, "none", ""))
        except Exception as error:
            found.append((name, type(error).__name__, str(error)))
    x = np.full(3, rank, np.float32)
    comm.all_reduce(x)
    assert (x == sum(range(size))).all()
    comm.close()
    return found


def strided(rank: int, size: int) -> None:
    """Non-contiguous input and output give the right answer."""
    import numpy as np

    with hetccl.init() as comm:
        base = (np.arange(60, dtype=np.float64) * (rank + 1)).reshape(6, 10)
        total = np.arange(60, dtype=np.float64).reshape(6, 10) * sum(range(1, size + 1))
        for cut in (np.s_[:, ::2], np.s_[::-1], np.s_[1:5, 3:7]):
            a, b = base.copy(), np.zeros((6, 10))
            comm.all_reduce(a[cut])
            assert (a[cut] == total[cut]).all()
            comm.all_reduce(base.copy()[cut], b[cut])
            assert (b[cut] == total[cut]).all() and b.sum() == total[cut].sum()
        t = base.copy().T
        work = comm.all_reduce(t, async_op=True)
        work.wait()
        assert (t == total.T).all()
        zero = np.array(float(rank))
        comm.all_reduce(zero)
        assert zero == sum(range(size))
        gathered = np.zeros((size * 2, 3), np.int32)[::2]
        comm.all_gather(np.full((1, 3), rank, np.int32), gathered)
        assert (gathered == np.arange(size)[:, None]).all()


def joins(rank: int, size: int) -> tuple[str, str]:
    """What joining raises."""
    try:
        with hetccl.init(timeout=20):
            return "none", ""
    except hetccl.HetcclError as error:
        return type(error).__name__, str(error)


def fails_late(rank: int, size: int, how: str) -> tuple[str, str]:
    """Rank 1 fails or dies when the control plane already stands."""
    from hetccl.core.vendor_comms import VendorComms

    if rank == 1:

        def trouble(*_: Any) -> int:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("planted")

        VendorComms.join = trouble  # type: ignore[method-assign]
    try:
        hetccl.init(timeout=20).close()
    except (hetccl.HetcclError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "none", ""


def leaves_the_island(rank: int, size: int, victim: int, how: str) -> tuple[str, str, float]:
    """All but the victim wait in the vendor's library, where it never comes: it fails, or dies, instead."""
    from hetccl.core import vendor_comms

    if rank == victim:

        def trouble(view: Any, vendor: Any, key: str, ranks: Any, *_: Any) -> int:
            if rank == ranks[0]:
                view.put(key, vendor.new_id())
            time.sleep(1.5)
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("planted")

        vendor_comms._join_one = trouble  # type: ignore[assignment]
    started = time.monotonic()
    try:
        hetccl.init(timeout=60).close()
    except (hetccl.HetcclError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", 0.0
