# SPDX-License-Identifier: Apache-2.0
"""The communicator: what users call."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from hetccl.core import _state, direct, lifecycle, log, registry
from hetccl.core._engine import Core, Work
from hetccl.core.arguments import message_tag, number, redop, same_size
from hetccl.core.bootstrap import join
from hetccl.core.buffers import Buffer, check_overlap, take
from hetccl.core.coalesced import Packing
from hetccl.core.collectives import Collectives
from hetccl.core.config import Config
from hetccl.core.connector import P2P, Connector
from hetccl.core.failures import Failures
from hetccl.core.planner import Planner
from hetccl.core.reactor import reactor
from hetccl.core.reports import Reports
from hetccl.core.store import Store
from hetccl.core.topology_file import TopologyFile
from hetccl.core.tracing import Tracing
from hetccl.core.vendor_comms import PARTING_SECONDS
from hetccl.core.watch import Watch
from hetccl.core.work import ensure_completion_thread
from hetccl.errors import HetcclError, UsageError
from hetccl.transports.base import Link, Transport
from hetccl.types import DType, Op, RedOp

__all__ = ["Communicator"]

_log = logging.getLogger("hetccl")


class Communicator(Collectives, Reports):
    """A group of ranks that call collectives together. Every rank calls the same ones in the same order.

    `store` is what the ranks meet through (torch's stores, or `hetccl.core.store.DirectoryStore`); it may die once the
    communicator exists. `ranks` ("oneccl:2,host:2") and `transports` ("shm,tcp") override the variables of the same
    meaning, `topology` (a path, or what `load_topology` returns) HETCCL_TOPOLOGY. `timeout` is in seconds, for joining
    and for each operation. Where nothing says which vendor a rank is, it is the best one for `device_type` ("cpu",
    "cuda"). Blocks until all ranks have joined.

    Buffers are arrays of any library (see `buffers.py`). Counts are elements, and equal on all ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str = "world",
        ranks: str | None = None,
        transports: str | None = None,
        timeout: float | None = None,
        device_type: str = "cpu",
        topology: str | TopologyFile | None = None,
    ) -> None:
        config = Config.from_env()
        log.set_up(config.log)
        log.set_rank(rank, size)
        self.rank, self.size, self.name = rank, size, name
        self.timeout = timeout or config.timeout
        self._closed = self._forked = self._may_part = False
        started = time.monotonic()
        joined = self._joined = join(
            store, rank, size, name, ranks, transports, config, self.timeout, device_type, topology
        )
        try:
            self._build(config)
        except BaseException as error:
            joined.view.fail(f"rank {rank}: {type(error).__name__}: {error}")
            self._abandon()
            raise
        lifecycle.remember(self)
        ensure_completion_thread()
        if rank == 0:
            _log.info("%s: %s; joined in %.2f s", name, "; ".join(self._who()), time.monotonic() - started)
            if joined.secret_from_store:
                _log.info("no secret is set: connections are as trustworthy as the store (HETCCL_SECRET_FILE sets one)")

    def _build(self, config: Config) -> None:
        joined = self._joined
        self._topology, self._control = joined.topology, joined.control
        # torch's words for the devices whose memory this rank's vendor takes directly, and which of them is ours
        self.device_types, self.device_index = joined.device_types, joined.device_index
        self._planner = Planner(
            joined.topology, self.rank, config.algorithm, config.verify, joined.costs, joined.combine
        )  # fmt: skip
        failures = Failures(
            joined.topology,
            self.rank,
            joined.control.calls,
            joined.control.aborted_by,
            joined.control.state,
        )
        self._packing = Packing(joined.device)
        self.tracing = Tracing(self._planner, config)
        self._core = Core(self.rank, self.size, self.tracing, failures, self.timeout)
        self.tracing.attach(self._core.address)
        self._run = self.tracing.after(self._core.run)  # `run` for who calls it all the time: one frame less
        island = joined.topology.island_of(self.rank)
        here = joined.topology.host_ids
        turns = {r: joined.records[r].process for r in island.ranks}
        mates = sorted((r for r in island.ranks if here[r] == here[self.rank]), key=lambda r: turns[r])
        self._core.set_device(
            joined.device, joined.ccl, joined.comms.island, island.ranks.index(self.rank), mates,
            len(joined.control.local_ranks), config.check != "off", joined.order == "island",
        )  # fmt: skip
        _state.set_groups(self._core.address, joined.comms.groups)
        for table in joined.tables.values():
            self._core.add_transport(table)
        self._endpoints: dict[int, tuple[str, int]] = {}
        self._connector = Connector(self.rank, joined.transports, joined.tables, self._linked)
        self._connector.start(joined.records)
        self._connector.connect_border(joined.topology.border_pairs(), joined.deadline, joined.check)
        self._direct = direct.agree(self._core, joined, self.tracing.device_path, config.cpu_threads)
        if self._direct:
            self._planner.use_direct()
        control = joined.control
        self._core.set_shared(joined.topology.chunk_bytes, control.address, control.owner)
        self._core.start()
        self._watch = Watch(
            self._core, self.size, joined.control.state, joined.control.aborted_by, bool(joined.ccl.caps & 2),
            lambda: str(failures(self._core.failed, "", self._core.failed_ranks())),
        )  # fmt: skip
        reactor().every_tick(self._watch.tick)

    # ---- collectives

    def all_reduce(
        self, input: Any, output: Any = None, op: str | RedOp = "sum", *, factor: float = 1.0, async_op: bool = False,
        timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """Combines `input` of all ranks; every rank gets the same bits in `output` (None: in place).

        `factor` is this rank's own, for op "premul_sum": its input is multiplied by it first.
        """
        inp = self._take(input, output is None, "input")
        out = inp if output is None else self._take(output, True, "output")
        same_size(inp, out, 1, "all_reduce")
        return self._collective(Op.ALL_REDUCE, inp, out, inp.count, redop(op), 0, async_op, timeout, 0, factor)

    def broadcast(self, buffer: Any, root: int, *, async_op: bool = False, timeout: float = 0) -> Work | None:
        """Copies `buffer` of rank `root` to all ranks' `buffer`."""
        self._check_rank(root, "root")
        out = self._take(buffer, self.rank != root, "buffer")
        return self._collective(Op.BROADCAST, out, out, out.count, RedOp.SUM, root, async_op, timeout, 0)

    def all_gather(self, input: Any, output: Any, *, async_op: bool = False, timeout: float = 0) -> Work | None:
        """`output` (size times `input`) gets the inputs of all ranks in rank order."""
        inp, out = self._take(input, False, "input"), self._take(output, True, "output")
        same_size(inp, out, self.size, "all_gather")
        return self._collective(
            Op.ALL_GATHER, inp, out, inp.count, RedOp.SUM, 0, async_op, timeout, self.rank * inp.nbytes
        )

    def reduce_scatter(
        self, input: Any, output: Any, op: str | RedOp = "sum", *, factor: float = 1.0, async_op: bool = False,
        timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """`input` is size times `output`; rank r gets block r of the combined inputs."""
        inp, out = self._take(input, False, "input"), self._take(output, True, "output")
        same_size(out, inp, self.size, "reduce_scatter", "output", "input")
        return self._collective(
            Op.REDUCE_SCATTER, inp, out, out.count, redop(op), 0, async_op, timeout, self.rank * out.nbytes, factor
        )

    def barrier(self, *, async_op: bool = False, timeout: float = 0) -> Work | None:
        """Returns when all ranks have called it."""
        token = self._take(bytearray(4), True, "token")
        token.dtype, token.count = DType.INT32, 1
        return self._collective(Op.BARRIER, token, token, 1, RedOp.SUM, 0, async_op, timeout, 0)

    # ---- point to point

    def send(self, buffer: Any, peer: int, tag: int = 0, *, async_op: bool = False, timeout: float = 0) -> Work | None:
        """Sends `buffer` to `peer`'s receive with the same tag. Messages with one tag arrive in order."""
        b = self._take(buffer, False, "buffer")
        return self._ended(self.post(Op.SEND, b.ptr, 0, b.count, b.dtype, 0, peer, tag, timeout, b), async_op)

    def recv(
        self, buffer: Any, peer: int | None = None, tag: int = 0, *, async_op: bool = False, timeout: float = 0
    ) -> Work | None:
        """Receives into `buffer` from `peer` (None: whoever sends first). `Work.source_rank` says who it was."""
        b = self._take(buffer, True, "buffer")
        source = -1 if peer is None else peer
        work = self.post(Op.RECV, 0, b.ptr, b.count, b.dtype, 0, source, tag, timeout, b, b.finish)
        return self._ended(work, async_op)

    # ---- the same by address, for layers that have their own arrays

    def run(
        self,
        op: int,
        in_ptr: int,
        out_ptr: int,
        count: int,
        dtype: int,
        redop: int = 0,
        root: int = 0,
        timeout: float = 0,
        factor: float = 1.0,
        stream: int = -1,
        ours: bool = False,
    ) -> None:
        """One collective on memory at two addresses (equal: in place; broadcast uses `out_ptr`).

        `count` is in elements: of the buffer (all_reduce, reduce, broadcast), of one rank's input (all_gather, gather)
        or output (reduce_scatter, scatter), of a pair's block (all_to_all). `timeout` 0 is the communicator's. `factor`
        is this rank's, for premul_sum. A buffer that the rank does not need is 0. `stream` is the caller's stream: the
        operation comes after what it holds, and may still be under way on it at the return. -1: none; it has ended.
        `ours`: the caller knows that both are memory of this rank's device, and it is not looked up.
        """
        self._run(op, in_ptr, out_ptr, count, dtype, redop, root, timeout, factor, None, stream, ours)

    def post(
        self, op: int, in_ptr: int, out_ptr: int, count: int, dtype: int, redop: int = 0, root: int = 0, tag: int = 0,
        timeout: float = 0, keep: Any = None, finish: Callable[[], None] | None = None, factor: float = 1.0,
        stream: int = -1, ours: bool = False,
    ) -> Work:  # fmt: skip
        """The same, asynchronous; also SEND (from `in_ptr` to rank `root`) and RECV (into `out_ptr`, rank -1: any).

        `keep` is held until the operation has ended, whatever becomes of the returned work; `finish` runs once when it
        has ended well.
        """
        if op in (Op.SEND, Op.RECV):
            message_tag(tag)
            number(DType, dtype, "dtype")
        else:
            self._check_rank(root, "root")
        if op == Op.SEND:
            self._check_rank(root, "peer")
            if root == self.rank:
                raise UsageError(f"rank {self.rank} cannot send to itself")
            if not self._core.has_p2p_link(root):
                self._core.usable()  # else the dialling would fail, with a reason that misleads
                self._connector.connect_p2p(root)
        elif op == Op.RECV and root != -1:
            self._check_rank(root, "peer")
            if root == self.rank:
                raise UsageError(f"rank {self.rank} cannot receive from itself")
        return self._core.post(
            op, in_ptr, out_ptr, count, dtype, redop, root, tag, timeout, keep, finish, factor, None, stream, ours
        )

    # ---- the end

    def set_timeout(self, seconds: float) -> None:
        """Deadline of operations that name none."""
        self.timeout = seconds
        self._core.timeout = seconds

    def abort(self) -> None:
        """Ends all operations on all ranks with `AbortedError`. Never blocks; any thread."""
        if not self._closed and not self._forked:
            self._core.abort()
            self._control.abort()

    def close(self) -> None:
        """Waits for operations in flight, at most `timeout` seconds (what has not ended then is aborted), and lets go
        of everything. Idempotent. Other ranks need not close at once: a vendor's library that waits for them is given
        5 s, and goes on by itself then."""
        if self._closed or self._forked:
            return
        deadline = time.monotonic() + self.timeout
        while self._core.pending and not self._core.failed and time.monotonic() < deadline:
            time.sleep(0.0005)
        self._shut(5.0)
        self._part(PARTING_SECONDS)
        self.tracing.replay()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()  # the other ranks would wait for what this one will not do
        self.close()

    # ---- inside

    def _collective(
        self, op: Op, inp: Buffer, out: Buffer, count: int, redop: RedOp, root: int, async_op: bool, timeout: float,
        in_place_at: int | None, factor: float = 1.0, shape: Any = None,
    ) -> Work | None:  # fmt: skip
        if inp.dtype != out.dtype:
            raise UsageError(f"{op.label}: input is {inp.dtype.label}, output is {out.dtype.label}; they must be equal")
        if inp is not out:
            check_overlap(inp, out, in_place_at)
        if not async_op:
            self._run(op, inp.ptr, out.ptr, count, inp.dtype, redop, root, timeout, factor, shape)
            if out.finish is not None:
                out.finish()
            return None
        keep = (inp, out)
        return self._core.post(
            op, inp.ptr, out.ptr, count, inp.dtype, redop, root, 0, timeout, keep, out.finish, factor, shape
        )

    def _ended(self, work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None

    def _linked(self, link: Link, transport: Transport, dialled: bool) -> None:
        table = self._joined.tables[transport.name]
        if link.purpose == P2P:
            self._core.add_p2p_link(link.peer, dialled, table, link.endpoint)
        else:
            self._core.add_link(link.peer, table, link.endpoint)
            self._endpoints[link.peer] = (transport.name, link.endpoint)

    def _take(self, array: Any, writable: bool, what: str) -> Buffer:
        buffer = take(array, writable, what)
        device = self._joined.device
        if buffer.place and buffer.nbytes and (device.host_memory or not device.owns(buffer.ptr, buffer.nbytes)):
            raise UsageError(
                f"{what} is memory of {buffer.place}, not of rank {self.rank}'s vendor {self.vendor}: copy it there"
            )
        return buffer

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"{what} {rank} is not a rank of this communicator (0 .. {self.size - 1})")

    def _who(self) -> list[str]:
        return [
            f"island {i.index} {i.name}: ranks {', '.join(map(str, i.ranks))} on "
            + ", ".join(sorted({self._topology.hosts[r] for r in i.ranks}))
            for i in self._topology.islands
        ]

    def _shut(self, patience: float) -> None:
        """Ends works in flight, says farewell to the other ranks and closes the links. `_part` comes next."""
        self._closed = True
        core = self._core
        reactor().no_tick(self._watch.tick)
        ended = core.shut(patience)
        abandoned = not ended or core.lane_abandoned  # a thread sits in a vendor's call, or the device works, for good
        if not abandoned:
            self._packing.close()
        lifecycle.forget(self, abandoned, not ended)
        self._control.leave()
        if ended:  # else the device may still use memory that is shared with others
            self._connector.close()
        self._may_part = not abandoned

    def _part(self, patience: float) -> None:
        """Leaves the vendor's communicators, in which at most `patience` seconds are spent on waiting for other
        ranks. Idempotent."""
        joined = self._joined
        if self._may_part:
            if self._core.failed:  # a blocking destroy would wait for ranks that are gone
                joined.comms.abort()
            joined.comms.destroy(patience)
        for r, record in enumerate(joined.records):  # also of other vendors: there may be no survivor of that one
            if joined.control.state(r) == 2 and record.host_id == joined.records[self.rank].host_id:
                with contextlib.suppress(HetcclError):  # that vendor's plug-in is not installed here
                    registry.vendor(record.vendor, probe=False).driver.remove_leftovers([record.pid])

    def _abandon(self) -> None:
        """Lets go of what had been made when `_build` failed: nothing watches, polls or holds it any more."""
        self._closed = True
        joined = self._joined
        undo: list[Callable[[], object]] = [t.close for t in joined.transports]
        undo += [joined.comms.abort, joined.comms.destroy, joined.control.leave]
        if hasattr(self, "_connector"):
            undo.insert(0, self._connector.close)
        if hasattr(self, "_core"):
            undo.insert(0, lambda: self._core.shut(1.0))
        for step in undo:
            with contextlib.suppress(Exception):  # the first failure is on its way up already
                step()

    def _leave_at_exit(self) -> None:
        """The program ends without close(): no waiting, but a farewell, and nobody may touch the engine any more."""
        self._shut(1.0)

    def _after_fork(self) -> None:
        self._forked = True
        self._core.mark_forked()
        self._control.forget()
