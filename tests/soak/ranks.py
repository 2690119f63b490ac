# SPDX-License-Identifier: Apache-2.0
"""What each rank of the soak does: runs the draws on one make-up until its time is over, and checks every bit."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import cache
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import draws

import hetccl
from hetccl.core.store import open_store
from hetccl.testing import oracle
from hetccl.types import DType, Op, RedOp

PERIOD = 4099  # data repeat with a prime period: no shard, chunk or segment boundary falls together with it
GUARD = 64  # bytes on both sides of every buffer that nobody may touch
AGREE = 10  # draws between two looks at the clock
SPOIL = "SOAK_SPOIL"  # variable with the number of a draw that is to fail: for the soak's own test


def body(rank: int, size: int, seed: int, number: int, seconds: float, only: tuple[int, int] | None) -> dict[str, int]:
    """Draws 0, 1, ... for `seconds`, or those from only[0] to only[1]. Returns how many draws and jobs were run."""
    done = {"draws": 0, "jobs": 0}
    spec = os.environ["HETCCL_RANKS"].split(",")
    until = time.monotonic() + seconds
    comms: Comms | None = None
    n = only[0] if only else 0
    draw = None
    try:
        with hetccl.init() as world:
            comms = Comms(world, rank, size, spec)
            while (only is None and _go_on(world, n, until)) or (only is not None and n <= only[1]):
                comms.turn(seed, number, n // draws.EPOCH)
                draw = draws.draw(seed, number, n, size)
                print(f"draw {n}", flush=True)
                done["jobs"] += run_draw(comms, draw)
                if rank == 0 and os.environ.get(SPOIL) == str(n):
                    compare(
                        "an answer spoiled on purpose", world, Memory(world, 4, 4, 0, False), bits(DType.INT32, 0)[:1]
                    )
                done["draws"] += 1
                n += 1
            comms.close()
        return done
    except Exception as error:
        error.add_note(f"rank {rank}: seed {seed}, topology {number}, {draw.describe() if draw else 'before draw 0'}")
        raise


def _go_on(world: Any, n: int, until: float) -> bool:
    """Rank 0's clock decides for all."""
    if n % AGREE:
        return True
    word = bytearray([time.monotonic() < until])
    world.broadcast(word, 0)
    return bool(word[0])


class Comms:
    """The communicators of an epoch that this rank belongs to."""

    def __init__(self, world: Any, rank: int, size: int, spec: list[str]) -> None:
        self.world, self.rank, self.size, self.spec = world, rank, size, spec
        self.epoch = -1
        self.found: dict[int, Any] = {}

    def turn(self, seed: int, number: int, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.close()
        self.epoch, self.found = epoch, {0: self.world}
        store = open_store(os.environ["HETCCL_STORE"], self.rank, self.size, 60)
        for index, members in enumerate(draws.communicators(seed, number, epoch, self.size)):
            if index and self.rank in members:
                self.found[index] = hetccl.Communicator(
                    store, members.index(self.rank), len(members), name=f"e{epoch}c{index}",
                    ranks=",".join(self.spec[m] for m in members),
                )  # fmt: skip

    def close(self) -> None:
        for index, comm in self.found.items():
            if index:
                comm.close()
        self.found = {}


def run_draw(comms: Comms, draw: draws.Draw) -> int:
    """Starts the jobs of this rank in order, waits, checks. Returns how many there were."""
    mine = [job for job in draw.jobs if job.comm in comms.found]
    if not draw.threads:
        run_jobs(comms, mine, draw.depth)
        return len(mine)
    failures: list[BaseException] = []

    def part(comm: int) -> None:
        try:
            run_jobs(comms, [job for job in mine if job.comm == comm], draw.depth)
        except BaseException as error:
            failures.append(error)
            comms.found[comm].abort()

    threads = [threading.Thread(target=part, args=(comm,), daemon=True) for comm in sorted({job.comm for job in mine})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return len(mine)


def run_jobs(comms: Comms, jobs: list[Any], depth: int) -> None:
    calls: dict[int, list[Call]] = {}
    messages: list[Transfer] = []
    late: list[tuple[Any, Any]] = []
    for job in jobs:
        comm = comms.found[job.comm]
        if isinstance(job, draws.Collective):
            waiting = calls.setdefault(job.comm, [])
            waiting.append(Call(comm, job))
            while len(waiting) > depth:
                waiting.pop(0).finish()
        elif comm.rank == job.source:
            messages.append(Transfer(comm, job, True))
        elif comm.rank == job.target and job.late:
            late.append((comm, job))
        elif comm.rank == job.target:
            messages.append(Transfer(comm, job, False))
    messages += [Transfer(comm, job, False) for comm, job in late]
    for waiting in calls.values():
        for call in waiting:
            call.finish()
    for message in messages:
        message.wait()
    check_messages([m for m in messages if not m.sending])


class Memory:
    """A buffer between guards, on the host or on the vendor's device."""

    def __init__(self, comm: Any, nbytes: int, itemsize: int, shift: int, device: bool) -> None:
        import numpy as np

        self.nbytes, self.start = nbytes, GUARD + shift * itemsize
        self.host = np.full(self.start + nbytes + GUARD, 0xA5, np.uint8)
        vendor = comm._joined.vendor
        self.array = None
        if device and vendor.name.startswith("sim"):
            from hetccl.vendors.sim.array import SimArray

            self.array = SimArray.from_numpy(vendor, self.host)
            self.ptr = self.array.ptr + self.start
        else:
            self.ptr = self.host.ctypes.data + self.start

    def write(self, data: Any, at: int = 0) -> None:
        raw = data.view("u1") if data.size else data[:0].view("u1")
        self.host[self.start + at : self.start + at + raw.size] = raw
        if self.array is not None:
            self.array.copy_from(self.host)

    def read(self, kind: Any) -> Any:
        raw = self._all()
        return raw[self.start : self.start + self.nbytes].copy().view(kind)

    def intact(self) -> bool:
        raw = self._all()
        return bool((raw[: self.start] == 0xA5).all() and (raw[self.start + self.nbytes :] == 0xA5).all())

    def _all(self) -> Any:
        return self.host if self.array is None else self.array.to_numpy()


class Call:
    """A collective in flight."""

    def __init__(self, comm: Any, job: draws.Collective) -> None:
        self.comm, self.job = comm, job
        self.work = None
        if job.op == Op.BARRIER:
            self.work = comm.barrier(async_op=True)
            return
        item, rank, size = job.dtype.itemsize, comm.rank, comm.size
        self.given, self.want = answer(job, rank, size)
        place = 0
        if job.op == Op.BROADCAST or (job.in_place and job.op == Op.ALL_REDUCE):
            self.out = self.inp = Memory(comm, self.want.nbytes, item, job.shift, job.device)
        elif job.in_place and job.op == Op.ALL_GATHER:
            self.out = self.inp = Memory(comm, self.want.nbytes, item, job.shift, job.device)
            place = rank * job.count * item
        else:
            self.inp = Memory(comm, self.given.nbytes, item, job.shift, job.device)
            self.out = Memory(comm, self.want.nbytes, item, job.shift, job.device)
        self.inp.write(self.given, place)
        args = (job.op, self.inp.ptr + place, self.out.ptr, job.count, job.dtype, job.redop, job.root)
        if job.blocking:
            comm.run(*args)
        else:
            self.work = comm.post(*args, keep=(self.inp, self.out))

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.job.op == Op.BARRIER:
            return
        compare(draws.describe(self.job), self.comm, self.out, self.want)
        if self.inp is not self.out:
            compare(f"input of {draws.describe(self.job)}", self.comm, self.inp, self.given)


class Transfer:
    """A message on its way out or in."""

    def __init__(self, comm: Any, job: draws.Message, sending: bool) -> None:
        self.comm, self.job, self.sending = comm, job, sending
        self.memory = Memory(comm, job.count * job.dtype.itemsize, job.dtype.itemsize, job.shift, job.device)
        if sending:
            self.memory.write(text(job))
            self.work = comm.post(Op.SEND, self.memory.ptr, 0, job.count, job.dtype, 0, job.target, job.tag,
                                  keep=self.memory)  # fmt: skip
        else:
            peer = -1 if job.anybody else job.source
            self.work = comm.post(Op.RECV, 0, self.memory.ptr, job.count, job.dtype, 0, peer, job.tag, keep=self.memory)

    def wait(self) -> None:
        self.work.wait()


def check_messages(received: list[Transfer]) -> None:
    """Those of one sender and tag in order; those from anybody by the sender that the work names."""
    for m in received:
        job = m.job
        if job.anybody:
            source = m.work.source_rank
            same = [o.job for o in received if o.job.anybody and (o.job.comm, o.job.tag) == (job.comm, job.tag)]
            found = [j for j in same if j.source == source]
            if len(found) != 1:
                raise AssertionError(f"{draws.describe(job)}: came from rank {source}, which sent {len(found)} of them")
            job = found[0]
        compare(draws.describe(job), m.comm, m.memory, text(job))


def answer(job: draws.Collective, rank: int, size: int) -> tuple[Any, Any]:
    """(input, right output) of one rank."""
    import numpy as np

    count, kind = job.count, job.dtype
    if job.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        total = count * (size if job.op == Op.REDUCE_SCATTER else 1)
        given = stretched(reduction(kind, job.redop, rank, size), total, job.salt)
        want = stretched(reduction(kind, job.redop, -1, size), total, job.salt)
        return given, want if job.op == Op.ALL_REDUCE else want[rank * count : (rank + 1) * count]
    mine = stretched(bits(kind, rank), count, job.salt)
    if job.op == Op.BROADCAST:
        return mine, stretched(bits(kind, job.root), count, job.salt)
    return mine, np.concatenate([stretched(bits(kind, r), count, job.salt) for r in range(size)])


def text(job: draws.Message) -> Any:
    return stretched(bits(job.dtype, job.source), job.count, job.salt)


def stretched(period: Any, count: int, salt: int) -> Any:
    """`count` elements of the repeated period, begun at another place for each salt: old data are never right."""
    import numpy as np

    return np.resize(np.roll(period, salt), count) if count else period[:0]


@cache
def reduction(dtype: DType, redop: RedOp, rank: int, size: int) -> Any:
    """A rank's input; rank -1: the answer."""
    return oracle.expected(dtype, redop, size, PERIOD) if rank < 0 else oracle.data(dtype, redop, rank, size, PERIOD)


@cache
def bits(dtype: DType, rank: int) -> Any:
    return oracle.moved(dtype, rank, PERIOD)


def compare(what: str, comm: Any, memory: Memory, want: Any) -> None:
    import numpy as np

    got = memory.read(want.dtype)
    if got.tobytes() != want.tobytes():
        wrong = np.nonzero(got.view("u1") != want.view("u1"))[0] // want.dtype.itemsize
        i, j = int(wrong[0]), int(wrong[-1])
        raise AssertionError(
            f"rank {comm.rank} of {comm.size} ({comm.name}): {what}: {len(set(wrong.tolist()))} of {want.size} "
            f"elements wrong, from {i} to {j}: {got[i]!r} instead of {want[i]!r} "
            f"({got[i : i + 1].tobytes().hex()} instead of {want[i : i + 1].tobytes().hex()})"
        )
    if not memory.intact():
        raise AssertionError(f"rank {comm.rank} of {comm.size} ({comm.name}): {what}: memory beside it was written")
