# SPDX-License-Identifier: Apache-2.0
"""What each rank of the soak does: runs the draws on one make-up until its time is over, and checks every bit."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import draws
from answers import Case, Memory, Part, bits, case, cut, factor, text, total

import hetccl
from hetccl.core.buffers import Buffer
from hetccl.core.store import open_store
from hetccl.errors import UnsupportedError
from hetccl.types import DType, Op

AGREE = 4  # draws between two looks at the clock
SPOIL = "SOAK_SPOIL"  # variable with the number of a draw that is to fail: for the soak's own test


def body(rank: int, size: int, seed: int, number: int, seconds: float, only: tuple[int, int] | None) -> dict[str, int]:
    """Draws 0, 1, ... for `seconds`, or those from only[0] to only[1]. Returns how many draws and jobs were run."""
    done = {"draws": 0, "jobs": 0, "refused": 0}
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
                jobs, refused = run_draw(comms, draw)
                done["jobs"] += jobs
                done["refused"] += refused
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


def run_draw(comms: Comms, draw: draws.Draw) -> tuple[int, int]:
    """Starts the jobs of this rank in order, waits, checks. Returns how many there were, and how many were refused."""
    mine = [job for job in draw.jobs if job.comm in comms.found]
    if not draw.threads:
        return len(mine), run_jobs(comms, mine, draw.depth)
    refused: list[int] = []
    failures: list[BaseException] = []

    def part(comm: int) -> None:
        try:
            refused.append(run_jobs(comms, [job for job in mine if job.comm == comm], draw.depth))
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
    return len(mine), sum(refused)


def run_jobs(comms: Comms, jobs: list[Any], depth: int) -> int:
    """Returns how many were refused."""
    refused = 0
    calls: dict[int, list[Call]] = {}
    messages: list[Transfer] = []
    late: list[tuple[Any, Any]] = []
    for job in jobs:
        comm = comms.found[job.comm]
        if isinstance(job, draws.Collective):
            waiting = calls.setdefault(job.comm, [])
            waiting.append(Call(comm, job))
            refused += waiting[-1].refused
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
    return refused


class Call:
    """A collective in flight. `refused`: the way to combine or the star that the environment forces is none for this
    job, which all ranks are told before any traffic; one that were not would wait for the others, and that is a
    fault."""

    def __init__(self, comm: Any, job: draws.Collective) -> None:
        self.comm, self.job = comm, job
        self.work: Any = None
        self.refused = False
        self.checks: list[tuple[str, Memory, Any]] = []
        try:
            self._start()
        except UnsupportedError as error:
            if not str(error).startswith(("HETCCL_COMBINE=", "all_reduce by star: ")):
                raise
            self.refused, self.checks = True, []

    def _start(self) -> None:
        comm, job = self.comm, self.job
        if job.op == Op.BARRIER:
            self.work = comm.barrier(async_op=not job.blocking)
            return
        if job.parts:
            self._coalesced()
            return
        found = case(job, comm.rank, comm.size)
        item = job.dtype.itemsize
        given, want = found.given, found.want
        inp, out = self._memory(given), self._memory(want)
        at_inp = at_out = 0  # bytes
        if given and want and found.inside >= 0 and want.image.size < given.image.size:
            out, at_out = inp, found.inside * item
        elif given and want and found.inside >= 0:
            inp, at_inp = out, found.inside * item
        if given and inp:
            inp.write(given.image, at_inp)
        if want and out and out is not inp:
            self.checks.append(("", out, want.image))
        elif want and out:  # the larger holds the smaller, and the rest of it stays
            whole = inp.read(want.image.dtype)
            whole[at_out // item : at_out // item + want.image.size] = want.image
            self.checks.append(("", out, whole))
        if given and inp and inp is not out:
            self.checks.append(("input of ", inp, given.image))
        a, b = (m.ptr + at if m else 0 for m, at in ((inp, at_inp), (out, at_out)))
        self._call(found, a, b, (inp, out))

    def _memory(self, part: Part | None) -> Memory | None:
        job = self.job
        return Memory(self.comm, part.image.nbytes, job.dtype.itemsize, job.shift, job.device) if part else None

    def _call(self, found: Case, a: int, b: int, keep: Any) -> None:
        comm, job = self.comm, self.job
        scale = factor(job, comm.rank)
        if not job.counts:
            args = (job.op, a, b, job.count, job.dtype, job.redop, job.root)
            if job.blocking:
                comm.run(*args, factor=scale)
            else:
                self.work = comm.post(*args, keep=keep, factor=scale)
            return
        inp, out = (
            Buffer(ptr, part.image.size, job.dtype, keep) if part else None
            for ptr, part in ((a, found.given), (b, found.want))
        )
        starts, ends = (part.starts if part else None for part in (found.given, found.want))
        how = {"async_op": not job.blocking}
        if job.op == Op.ALL_GATHER:
            self.work = comm.all_gather_v(inp, out, job.counts, ends, **how)
        elif job.op == Op.GATHER:
            self.work = comm.gather_v(inp, out, job.root, job.counts, ends, **how)
        elif job.op == Op.SCATTER:
            self.work = comm.scatter_v(inp, out, job.root, job.counts, starts, **how)
        elif job.op == Op.REDUCE_SCATTER:
            self.work = comm.reduce_scatter_v(inp, out, job.counts, job.redop, starts, factor=scale, **how)
        else:
            self.work = comm.all_to_all_v(inp, out, job.counts, starts, ends, **how)

    def _coalesced(self) -> None:
        comm, job = self.comm, self.job
        given, want = (cut(total(job, who, comm.size, sum(job.parts)), job.parts) for who in (comm.rank, -1))
        tensors = []
        for i, data in enumerate(given):
            memory = Memory(comm, data.nbytes, job.dtype.itemsize, job.shift, job.device)
            memory.write(data)
            tensors.append(Buffer(memory.ptr, data.size, job.dtype, memory))
            self.checks.append((f"tensor {i} of ", memory, want[i]))
        self.work = comm.all_reduce_coalesced(
            tensors, job.redop, factor=factor(job, comm.rank), async_op=not job.blocking
        )

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        for what, memory, want in self.checks:
            compare(what + draws.describe(self.job), self.comm, memory, want)


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
