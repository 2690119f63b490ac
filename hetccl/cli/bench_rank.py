# SPDX-License-Identifier: Apache-2.0
"""One rank of `hetccl bench`. Started by cli/bench.py with its settings as JSON; rank 0 appends a line of JSON a size.

With `compare`, both sides go through torch.distributed on the same tensors, in rounds that take turns, so that whatever
else the machine does hits both; the communicator under torch is timed as well, without torch.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hetccl.cli.bench_ops import SHAPES, addresses, exact, torch_call
from hetccl.core.communicator import Communicator
from hetccl.core.start import init
from hetccl.errors import HetcclError
from hetccl.types import DType, Op, RedOp

Call = Callable[[], Any]
ROUNDS = 5
TARGET_S = 0.3  # how long one side is timed at one size where --iters is auto


def main(text: str) -> int:
    """Exit code 0, or 2 with one line on stderr for an error of hetccl."""
    try:
        _main(json.loads(text))
        return 0
    except HetcclError as error:
        print(f"hetccl: {error}", file=sys.stderr)
        return 2


def _main(options: dict[str, Any]) -> None:
    if options["pin"]:
        here, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        os.sched_setaffinity(0, {core_of(here, ranks, sorted(os.sched_getaffinity(0)))})
    for variable, key in (("HETCCL_RANKS", "ranks"), ("HETCCL_TRANSPORTS", "transports")):
        if options[key]:
            os.environ[variable] = options[key]
    if options["all_algorithms"]:
        from hetccl.cli.bench_algorithms import measure

        measure(options)
        return
    torch_side = TorchSide(options["compare"]) if options["compare"] else None
    comm = torch_side.comm if torch_side else init()
    try:
        with open(options["rows"] if comm.rank == 0 else os.devnull, "a", encoding="utf-8") as rows:
            for nbytes in options["sizes"]:
                row = Bench(options, comm, torch_side, nbytes).row()
                rows.write(json.dumps(row) + "\n")
                rows.flush()
        comm.barrier()
    finally:
        if torch_side:
            torch_side.close()
        else:
            comm.close()


class Bench:
    """One size: buffers, the calls of each side, a check with exact data, and the times."""

    def __init__(self, options: dict[str, Any], comm: Communicator, torch_side: TorchSide | None, nbytes: int) -> None:
        self.options, self.comm, self.torch_side = options, comm, torch_side
        self.op, self.dtype, self.redop = (
            options["op"],
            DType[options["dtype"].upper()],
            RedOp[options["redop"].upper()],
        )
        self.n = comm.size
        self.shape = SHAPES[self.op]
        parts = self.n if self.shape.blocks else 1
        # `count` as in Communicator.run: of one rank's block where the whole is divided.
        self.count = max(1, nbytes // self.dtype.itemsize // parts)
        self.nbytes = self.count * parts * self.dtype.itemsize  # as nccl-tests says it: the larger buffer
        self.input = _aligned(self.nbytes if self.shape.many_in else self.count * self.dtype.itemsize)
        self.output = self.input
        if self.shape.blocks:
            self.output = _aligned(self.nbytes if self.shape.many_out else self.count * self.dtype.itemsize)

    def row(self) -> dict[str, Any]:
        calls: dict[str, Call] = {"raw": self._raw()}
        if self.torch_side:
            calls = {"torch": self.torch_side.call(self, None), "other": self.torch_side.call(self, True), **calls}
        main_call = "torch" if self.torch_side else "raw"
        before = self.comm.stats()["border_bytes"]
        wrong = self._wrong(calls[main_call])
        if self.torch_side:
            wrong += self._wrong(calls["raw"])
        border = (self.comm.stats()["border_bytes"] - before) // (2 if self.torch_side else 1)
        explained = self.comm.explain(self.op, self.count * self.dtype.itemsize, self.dtype, self.redop)
        totals = self._sum([wrong, border])
        times, iters = self._times(calls)
        row = {
            "op": self.op,
            "nbytes": self.nbytes,
            "count": self.count,
            "dtype": self.dtype.label,
            "redop": self.redop.label if self.shape.reduces else "",
            "world": self.n,
            "ranks": self.options["ranks"],
            "transports": self.options["transports"],
            "time_us": times[main_call],
            "raw_time_us": times["raw"],
            "correct": totals[0] == 0,
            "wrong": int(totals[0]),
            "border_bytes": int(totals[1]),
            "border_bound": explained.border_bound,
            "algorithm": explained.algorithm,
            "plan_class": explained.plan_class,
            "compare_name": self.options["compare"] or "",
            "compare_time_us": times.get("other"),
            "iters": iters,
        }
        return row

    def _raw(self) -> Call:
        comm, op = self.comm, Op[self.op.upper()]
        places = addresses(self.op, comm.rank, self.input, self.output)
        args = (op, *places, self.count, self.dtype, self.redop, 0)
        return lambda: comm.run(*args)

    def _wrong(self, call: Call) -> int:
        """Elements of this rank that are not what they must be, bit for bit."""
        given, want = exact(self.op, self.dtype, self.redop, self.comm.rank, self.n, self.count)
        self.output.view(np.uint8)[:] = 0xA5
        self.input.view(np.uint8)[:] = given.view(np.uint8)
        if want is None:
            want = self.output.copy()
        call()
        size = self.dtype.itemsize
        differs = self.output.view(np.uint8).reshape(-1, size) != want.view(np.uint8).reshape(-1, size)
        return int(differs.any(axis=1).sum())

    def _times(self, calls: dict[str, Call]) -> tuple[dict[str, float], int]:
        """Median microseconds of a call, on the slowest rank, for each side; and how many calls a side were timed."""
        self.input.view(np.uint8)[:] = 0  # stays 0 however often it is summed in place
        once = 0.0
        for call in calls.values():
            self.comm.barrier()
            start = time.perf_counter()
            for _ in range(self.options["warmup"] or 5):
                call()
            once = max(once, (time.perf_counter() - start) / (self.options["warmup"] or 5))
        iters = self.options["iters"] or int(min(1000, max(10, TARGET_S / max(once, 1e-7))))
        a_round = self._agreed(max(1, iters // ROUNDS))
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                self.comm.barrier()
                call()
                taken[name].extend(_timed(call, a_round))
        medians = [statistics.median(times) for times in taken.values()]
        slowest = self._max(medians)
        return {name: slowest[i] * 1e6 for i, name in enumerate(taken)}, a_round * ROUNDS

    def _agreed(self, number: int) -> int:
        """Rank 0's number: all ranks must make the same calls."""
        box = np.array([number], np.int64)
        self.comm.broadcast(box, 0)
        return int(box[0])

    def _max(self, values: list[float]) -> list[float]:
        box = np.array(values, np.float64)
        self.comm.all_reduce(box, op="max")
        return [float(v) for v in box]

    def _sum(self, values: list[int]) -> list[int]:
        box = np.array(values, np.int64)
        self.comm.all_reduce(box)
        return [int(v) for v in box]


class TorchSide:
    """The default process group "hetccl", and a second one of another back end over the same ranks."""

    def __init__(self, other: str) -> None:
        # Only for a comparison that was asked for: the package itself works without torch.
        self.torch = importlib.import_module("torch")
        self.dist = importlib.import_module("torch.distributed")
        glue = importlib.import_module("hetccl.torch")
        self.dist.init_process_group("hetccl", init_method="env://")
        self.other = self.dist.new_group(backend=other)
        self.comm: Communicator = glue.communicator()

    def call(self, bench: Bench, other: bool | None) -> Call:
        torch, dist = self.torch, self.dist
        group = self.other if other else None
        dtype = getattr(torch, bench.dtype.label)
        given = torch.from_numpy(bench.input).view(dtype)
        out = given if bench.output is bench.input else torch.from_numpy(bench.output).view(dtype)
        return torch_call(bench.op, dist, group, (given, out), bench.redop)

    def close(self) -> None:
        self.dist.destroy_process_group()


def core_of(rank: int, ranks: int, cores: list[int]) -> int:
    """The core of one of `ranks` ranks of a host. Where they outnumber the cores, neighbours share one, as launchers
    place them."""
    return cores[rank * len(cores) // ranks if ranks > len(cores) else rank]


def _timed(call: Call, times: int) -> Iterator[float]:
    clock = time.perf_counter
    taken = []
    for _ in range(times):
        start = clock()
        call()
        taken.append(clock() - start)
    return iter(taken)


def _aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Host memory that begins at a page, as allocators of frameworks give it for large blocks, touched once."""
    block = np.zeros(nbytes + 4096, np.uint8)
    start = -block.ctypes.data % 4096
    return block[start : start + nbytes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
