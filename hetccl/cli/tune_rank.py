# SPDX-License-Identifier: Apache-2.0
"""One rank of `hetccl tune`. Started by cli/tune.py with its settings as JSON; rank 0 writes the file.

Islands are measured by communicators of their own ranks, all at once, as they work in an operation; paths by a
communicator of two ranks of different islands; algorithms by turns, on a communicator each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from hetccl.cli.rivals import Rivals, environment, interleaved
from hetccl.core.communicator import Communicator
from hetccl.core.cost import CALLS, Costs, CostTable, IslandCost, Line, PathCost, carried
from hetccl.core.plan import StepKind
from hetccl.core.selector import MODEL_OPS
from hetccl.core.start import meeting
from hetccl.core.store import Store
from hetccl.core.tuning import render_tuning
from hetccl.errors import HetcclError
from hetccl.native.combine import combine
from hetccl.types import DType, Op, RedOp

__all__ = ["main"]

SMALL, LARGE, BUDGET = 64, 4 << 20, 0.15  # bytes, bytes, seconds a measurement
ISLAND_OPS = (Op.ALL_REDUCE, Op.BROADCAST, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.REDUCE)
SMALL_CHUNK = 4096


def main(text: str) -> int:
    """Exit code 0, or 2 with one line on stderr for an error of hetccl."""
    options = json.loads(text)
    for variable, key in (("HETCCL_RANKS", "ranks"), ("HETCCL_TRANSPORTS", "transports")):
        if options[key]:
            os.environ[variable] = options[key]
    try:
        with environment(HETCCL_TUNING=None, HETCCL_ALGORITHM=None):
            _main(options)
        return 0
    except HetcclError as error:
        print(f"hetccl: {error}", file=sys.stderr)
        return 2


def _main(options: dict[str, Any]) -> None:
    store, rank, size = meeting()
    with Communicator(store, rank, size) as world:
        tuner = Tuner(store, world, options["progress"])
        table = tuner.basics()
        if options["sizes"]:
            table = tuner.operations(table, options["sizes"])
        if rank == 0:
            with open(options["output"], "w", encoding="utf-8") as file:
                file.write(render_tuning(table, f"written by hetccl tune: {options['ranks'] or size}"))
        world.barrier()


class Memory:
    """Memory of a rank's device, which its vendor's library takes as it is."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self._device, self.nbytes = comm.device, nbytes
        self.ptr = self._device.alloc(max(1, nbytes))
        self._device.memset(self.ptr, 0, max(1, nbytes))
        self._device.stream_sync()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.free(self.ptr)


class Tuner:
    def __init__(self, store: Store, world: Communicator, progress: str) -> None:
        self.store, self.world, self.progress = store, world, progress
        self.topology = world.topology
        self.rank = world.rank
        self.island = self.topology.island_of(self.rank)

    def say(self, text: str) -> None:
        if self.rank:
            return
        line = f"tune: {text}"
        if self.progress:
            with open(self.progress, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        else:
            print(line, file=sys.stderr, flush=True)

    def part(self, name: str, ranks: tuple[int, ...]) -> Communicator:
        """A communicator of some of the ranks. Only they may ask for it."""
        words = ",".join(f"{self.topology.island_of(r).name}:1" for r in ranks)
        with environment(HETCCL_TOPOLOGY=None):
            return Communicator(self.store, ranks.index(self.rank), len(ranks), name=name, ranks=words)

    # ---- paths, calls, copies

    def basics(self) -> CostTable:
        self.say("copies and the host's sums")
        copy, sums = self._copies(), self._sums()
        vendors = self._vendors(copy)
        paths = self._paths(vendors)
        return CostTable(paths, vendors, sums, Costs.job(self.topology))

    def _slowest(self, values: list[float]) -> list[float]:
        box = np.array(values, np.float64)
        self.world.all_reduce(box, op="max")
        return [float(v) for v in box]

    def _copies(self) -> Line:
        """Between this rank's device and host memory; all ranks at once."""
        device = self.world.device
        with Memory(self.world, LARGE) as memory:
            pinned = device.host_alloc(LARGE)
            try:

                def copy(nbytes: int) -> Callable[[], None]:
                    def run() -> None:
                        device.copy(pinned, memory.ptr, nbytes)
                        device.stream_sync()

                    return run

                found = interleaved(self.world, {"small": copy(SMALL), "large": copy(LARGE)}, BUDGET, slowest=False)
            finally:
                device.host_free(pinned)
        return line(SMALL, found["small"], LARGE, found["large"])

    def _sums(self) -> Line:
        """The host's own loop over two sources; all ranks at once."""

        def run_of(nbytes: int) -> Callable[[], None]:
            a, b, out = (np.zeros(nbytes // 4, np.float32) for _ in range(3))
            return lambda: combine([out], [a, b], DType.FLOAT32, RedOp.SUM)

        n = LARGE // 4
        found = interleaved(self.world, {"small": run_of(SMALL), "large": run_of(n)}, BUDGET)
        return line(2 * SMALL, found["small"], 2 * n, found["large"])

    def _vendors(self, copy: Line) -> dict[str, IslandCost]:
        """Every island's calls, all islands at once. An island of one rank makes none; it has its copies."""
        mine: dict[str, Line] = {}
        if self.island.size > 1:
            self.say(f"calls of the libraries: {', '.join(op.label for op in ISLAND_OPS)}")
            with self.part(f"tune-island-{self.island.index}", self.island.ranks) as comm:
                mine = self._calls(comm)
        figures = np.zeros((self.world.size, len(CALLS) + 1, 2))
        figures[self.rank, 0] = copy
        for i, call in enumerate(CALLS):
            figures[self.rank, i + 1] = mine.get(call, (0.0, 0.0))
        flat = figures.reshape(-1)
        self.world.all_reduce(flat)  # the others' rows are 0
        figures = flat.reshape(figures.shape)
        found: dict[str, IslandCost] = {}
        for island in self.topology.islands:
            rows = figures[list(island.ranks)].max(axis=0)
            calls = {c: Line(*map(float, rows[i + 1])) for i, c in enumerate(CALLS) if rows[i + 1].any()}
            own = Line(*map(float, rows[0]))
            if not calls:  # nobody calls a library here; the file still needs a line
                calls = {"any": own}
            found[island.name] = IslandCost(calls, own)
        return found

    def _calls(self, comm: Communicator) -> dict[str, Line]:
        n = comm.size
        found = {}
        with Memory(comm, LARGE) as a, Memory(comm, LARGE) as b:
            for op in ISLAND_OPS:
                kind = StepKind[op.name]
                blocks = n if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) else 1

                def call(nbytes: int, op: Op = op, blocks: int = blocks) -> Callable[[], None]:
                    count = nbytes // 4 // blocks
                    return lambda: comm.run(op, a.ptr, b.ptr if op != Op.BROADCAST else a.ptr, count, DType.FLOAT32)

                times = interleaved(comm, {"small": call(SMALL * n), "large": call(LARGE)}, BUDGET)
                small, large = (carried(kind, x // blocks, n) for x in (SMALL * n, LARGE))
                found[op.label] = line(small, times["small"], large, times["large"])
        return found

    def _paths(self, vendors: dict[str, IslandCost]) -> dict[str, PathCost]:
        """One pair of ranks for each kind of path."""
        found = {}
        for name, pair in self._pairs().items():
            self.say(f"path {name}, between ranks {pair[0]} and {pair[1]}")
            values = [0.0, 0.0, 0.0]
            if self.rank in pair:
                values = self._path(name, pair, vendors)
            self.world.barrier()
            found[name] = PathCost(*self._slowest(values))
        return found

    def _pairs(self) -> dict[str, tuple[int, int]]:
        """{path: the lowest pair of ranks that it joins}, the same on all ranks."""
        mine = {f"{a},{b}": path for (a, b), path in self.world.paths().items()}
        text = json.dumps(mine).encode()
        longest = int(self._slowest([float(len(text))])[0])
        box = np.zeros(longest, np.uint8)
        box[: len(text)] = np.frombuffer(text, np.uint8)
        everyone = np.zeros(longest * self.world.size, np.uint8)
        self.world.all_gather(box, everyone)
        pairs: dict[str, tuple[int, int]] = {}
        for row in everyone.reshape(self.world.size, longest):
            for key, path in sorted(json.loads(row.tobytes().rstrip(b"\0")).items()):
                a, b = map(int, key.split(","))
                name = path.partition(",")[0]  # "shm, direct": the same link, from device memory
                if path != "not connected":
                    pairs[name] = min(pairs.get(name, (a, b)), (a, b))
        return dict(sorted(pairs.items()))

    def _path(self, name: str, pair: tuple[int, int], vendors: dict[str, IslandCost]) -> list[float]:
        """Latency, seconds a byte, and what a wire message costs, from an all_gather of two ranks: one message each
        way. Copies to and from a device are taken off."""
        times: dict[str, float] = {}
        with Memory(self.world, LARGE) as a, Memory(self.world, 2 * LARGE) as b:
            for label, chunk in (("usual", None), ("chunks", str(SMALL_CHUNK))):
                with environment(HETCCL_CHUNK_BYTES=chunk), self.part(f"tune-path-{name}-{label}", pair) as comm:
                    middle = min(LARGE, 256 << 10)

                    def call(nbytes: int, comm: Communicator = comm) -> Callable[[], None]:
                        return lambda: comm.run(Op.ALL_GATHER, a.ptr, b.ptr, nbytes, DType.UINT8)

                    sizes = {"small": SMALL, "large": LARGE} if chunk is None else {"small": SMALL, "middle": middle}
                    got = interleaved(comm, {k: call(n) for k, n in sizes.items()}, BUDGET)
                    times.update({f"{label} {k}": t for k, t in got.items()})
                    if chunk is None:
                        usual = comm.topology.chunk_bytes
                        times["usual middle"] = interleaved(comm, {"m": call(middle)}, BUDGET)["m"]
        copy = max((vendors[self.topology.island_of(r).name].copy for r in pair), key=lambda c: c(LARGE))
        device = any(not self.topology.island_of(r).host_memory for r in pair)
        copies = 3 if device else 1  # to the own block; also to pinned memory and back
        latency = max(times["usual small"] - copies * copy(SMALL), 1e-7)
        more = middle // SMALL_CHUNK - max(1, middle // usual)
        message = max(0.0, (times["chunks middle"] - times["usual middle"]) / max(1, more))
        beta = (times["usual large"] - times["usual small"] - copies * (copy(LARGE) - copy(SMALL))) / (LARGE - SMALL)
        beta = max(beta - message / usual, 1e-13)
        return [latency, beta, message]

    # ---- whole operations

    def operations(self, table: CostTable, sizes: list[int]) -> CostTable:
        """Times of every algorithm at every size: what the model gets wrong about this job shows here."""
        measured: dict[str, dict[str, tuple[tuple[int, float], ...]]] = {}
        if len(self.topology.islands) == 1:
            return table
        with tempfile.TemporaryDirectory(prefix="hetccl-tune-") as folder:
            path = os.path.join(folder, "basics.yaml")
            if self.rank == 0:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(render_tuning(table))
            for op in MODEL_OPS:
                with environment(HETCCL_TUNING=path if self.rank == 0 else None):
                    measured[op.label] = self._operation(op, sizes)
        return CostTable(table.paths, table.vendors, table.combine, table.job, measured)

    def _operation(self, op: Op, sizes: list[int]) -> dict[str, tuple[tuple[int, float], ...]]:
        names = self.world.algorithms(op)
        n = self.world.size if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) else 1
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        with Rivals(self.store, self.rank, self.world.size, op, {name: name for name in names}) as rivals:
            a, b = (np.zeros(max(sizes) + 64, np.uint8) for _ in range(2))
            for nbytes in sizes:
                count = max(1, nbytes // n // 4)
                self.say(f"{op.label} of {nbytes} bytes: {', '.join(names)}")
                addresses = (a.ctypes.data, a.ctypes.data if n == 1 else b.ctypes.data)
                times = rivals.times(self.world, addresses, count, DType.FLOAT32, RedOp.SUM, BUDGET)
                for name, t in times.items():
                    points[name].append((count * 4, t))
        return {name: tuple(dict(found).items()) for name, found in points.items()}


def line(n0: float, t0: float, n1: float, t1: float) -> Line:
    """Through two measurements; both figures stay above 0 whatever noise says."""
    beta = max((t1 - t0) / (n1 - n0), 1e-13)
    return Line(max(t0 - beta * n0, 1e-8), beta)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
