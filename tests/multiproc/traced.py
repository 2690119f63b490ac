# SPDX-License-Identifier: Apache-2.0
"""Ranks that run given operations with tracing on, check the answers, and bring back what their executors did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import hetccl
from hetccl.core.algorithms.blocks import packed
from hetccl.core.tracing import Traced
from hetccl.core.verify import Proof
from hetccl.core.verify.replay import Run, replay

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
UNEVEN = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")  # those with a v form
FOLD = {"sum": np.add, "avg": np.add, "premul_sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Job:
    """`count` as in `Communicator.run`; with `counts` it is a v form (all_to_all: of pair i, j at i * n + j), whose
    blocks lie `gap` elements apart on odd ranks."""

    op: str
    dtype: str = "float32"
    redop: str = "sum"
    root: int = 0
    count: int = 0
    counts: tuple[int, ...] = ()
    gap: int = 0
    in_place: bool = False
    later: bool = False  # not blocking


def body(rank: int, size: int, jobs: list[Job]) -> tuple[Any, list[Traced]]:
    comm = hetccl.init()
    kept: list[Traced] = []
    comm.tracing.keep = kept
    topology = comm._topology
    for job in jobs:
        Case(comm, job).run()
    comm.close()
    assert (comm.tracing.replayed, comm.tracing.lost) == (len(jobs), 0)
    return topology, kept


def replay_all(ranks: list[tuple[Any, list[Traced]]]) -> list[Proof]:
    """Every operation once more, with the traces of all ranks together."""
    topology = ranks[0][0]
    proofs = []
    for together in zip(*(kept for _, kept in ranks), strict=True):
        runs: list[Run | None] = [t.run for t in together]
        shared, n = together[0].shared, topology.size
        places = [t.places or packed(shared, r, n) for r, t in enumerate(together)] if shared.counts else []
        proofs.append(replay(topology, shared, [t.run.plan for t in together], runs, places))
    return proofs


class Case:
    """One operation on one rank: its buffers, the call, the right answer."""

    def __init__(self, comm: Any, job: Job) -> None:
        self.comm, self.job = comm, job
        self.me, self.n = comm.rank, comm.size
        self.v = bool(job.counts)
        self.lengths = job.counts or (job.count,) * (self.n * self.n)

    def held(self, out: bool) -> list[int]:
        """The blocks of this rank's input or output."""
        op, n, me = self.job.op, self.n, self.me
        if op == "all_to_all":
            return [q * n + me if out else me * n + q for q in range(n)]
        many = ("all_gather", "gather") if out else ("reduce_scatter", "scatter")
        alone = ("reduce", "gather") if out else ("scatter",)
        if op in alone and me != self.job.root:
            return []
        return list(range(n)) if op in many else [me]

    def starts(self, out: bool) -> tuple[list[int], int]:
        """Where they begin, and how long the buffer is."""
        found, at = [], 0
        for block in self.held(out):
            found.append(at)
            at += self.lengths[block] + (self.job.gap if self.v and self.me % 2 else 0)
        return found, at

    def block(self, rank: int, block: int) -> Any:
        """What `rank` gives for a block: small numbers, exact in every dtype."""
        i = np.arange(self.lengths[block])
        return (1 + (rank + block + i) % 2).astype(self.job.dtype)

    def run(self) -> None:
        job = self.job
        (ins, n_in), (outs, n_out) = self.starts(False), self.starts(True)
        inp, out = np.zeros(n_in, job.dtype), np.full(n_out, 77, job.dtype)
        if job.in_place and job.op in ("all_gather", "gather") and outs:
            inp = out[outs[self.me] :][: self.lengths[self.me]]
        elif job.in_place and job.op in ("reduce_scatter", "scatter") and ins:
            out = inp[ins[self.me] :][: self.lengths[self.me]]
            outs = [0]
        elif job.op == "broadcast" or (job.in_place and job.op in ("all_reduce", "reduce")):
            out = inp
        for start, block in zip([0] if inp.base is out else ins, self.held(False), strict=True):
            inp[start : start + self.lengths[block]] = self.block(self.me, block if job.op in UNEVEN else 0)
        work = self.call(inp, out)
        if work is not None:
            work.wait()
        for place, (start, block) in enumerate(zip(outs, self.held(True), strict=True)):
            want = self.want(place)
            got = out[start : start + self.lengths[block]]
            assert np.allclose(got.astype(float), want, rtol=2e-3, atol=0), (job, self.me, place, got[:8], want[:8])

    def want(self, place: int) -> Any:
        job, me, n = self.job, self.me, self.n
        if job.op in ("all_gather", "gather"):
            return self.block(place, place)
        if job.op == "all_to_all":
            return self.block(place, place * n + me)
        if job.op in ("broadcast", "scatter"):
            return self.block(job.root, me if job.op == "scatter" else 0)
        parts = [self.block(r, me if job.op == "reduce_scatter" else 0).astype(float) for r in range(n)]
        if job.redop == "premul_sum":
            parts = [part * factor(r) for r, part in enumerate(parts)]
        total = FOLD[job.redop].reduce(parts)
        if job.redop == "avg":
            total = np.trunc(total / n) if "int" in job.dtype else total / n
        return total

    def call(self, inp: Any, out: Any) -> Any:
        job, comm = self.job, self.comm
        how: dict[str, Any] = {"async_op": job.later}
        if job.op in REDUCING:
            how |= {"op": job.redop} | ({"factor": factor(self.me)} if job.redop == "premul_sum" else {})
        if job.op in ROOTED:
            how["root"] = job.root
        if job.op == "broadcast":
            return comm.broadcast(out, **how)
        inp = None if job.op == "scatter" and self.me != job.root else inp
        out = None if job.op in ("reduce", "gather") and self.me != job.root else out
        if job.op in ("all_reduce", "reduce") and job.in_place:
            out = None
        if not self.v:
            return getattr(comm, job.op)(inp, out, **how)
        if job.op == "all_to_all":
            n = self.n
            matrix = [job.counts[i * n : (i + 1) * n] for i in range(n)]
            return comm.all_to_all_v(inp, out, matrix, self.starts(False)[0], self.starts(True)[0], **how)
        many = self.starts(job.op in ("all_gather", "gather"))[0] or None
        return getattr(comm, job.op + "_v")(inp, out, counts=job.counts, displacements=many, **how)


def factor(rank: int) -> float:
    return 2.0 + rank % 2
