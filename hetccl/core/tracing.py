# SPDX-License-Identifier: Apache-2.0
"""HETCCL_TRACE_STEPS: the executor writes down what it does, and afterwards that is replayed through the checker. For
debugging: a replay takes milliseconds, on the rank that asked, and sends nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetccl.core._trace import Trace
from hetccl.core.algorithms.blocks import packed
from hetccl.core.algorithms.common import Places, Shared
from hetccl.core.log import get_logger
from hetccl.core.plan import Plan
from hetccl.core.verify.machine import PlanFault
from hetccl.core.verify.replay import Did, Event, Run, replay

if TYPE_CHECKING:
    from hetccl.core.config import Config
    from hetccl.core.planner import Planner, Shape

__all__ = ["Traced", "Tracing"]

log = get_logger("trace")

ALWAYS_STEPS = 1 << 16  # events under HETCCL_VERIFY=always, where HETCCL_TRACE_STEPS says nothing: 4 MiB


@dataclass(frozen=True)
class Traced:
    """One operation that has ended on this rank. `arguments` are those of `Planner.plan`."""

    shared: Shared
    places: Places | None
    arguments: tuple[Any, ...]
    run: Run


class Tracing:
    """The trace of one communicator. Does nothing unless the configuration asks for it."""

    def __init__(self, planner: Planner, config: Config) -> None:
        capacity = config.trace_steps
        if capacity is None:
            capacity = ALWAYS_STEPS if config.verify == "always" else 0
        # what goes straight between devices leaves no trace: who asks for one gets the staged path
        self.device_path = "staged" if config.trace_steps else config.device_path
        self._planner, self._plans = planner, list[tuple[Plan, tuple[Any, ...]]]()
        self._trace = Trace(capacity) if capacity else None
        self._open: dict[int, list[Event]] = {}
        self._torn: set[int] = set()  # operations of which events are missing
        self._lock = threading.Lock()
        self.replayed = self.lost = self.untold = 0  # operations; events that found no room; that do not tell all
        self.keep: list[Traced] | None = None  # a list here gets all that is replayed, to look at it with other ranks'

    def describe(self) -> str:
        """Whether what the executor does is held against what was proved, for `explain`."""
        if self._trace is None:
            return "no, HETCCL_TRACE_STEPS asks for it"
        if self._direct:
            return "no: what goes straight between devices leaves no trace; HETCCL_DEVICE_PATH=staged stages it"
        return "yes, and replayed through the checker after each blocking operation and at close()"

    def attach(self, core: int) -> None:
        """Gives a C half, by its address, the memory for its trace, which must live as long: it holds this object as
        its planner."""
        if self._trace is not None:
            self._trace.attach(core)

    def limits(self, op: int) -> tuple[int, ...]:
        return self._planner.limits(op)

    def plan(self, op: int, dtype: int, redop: int, root: int, bucket: int, shape: Shape | None = None) -> Plan:
        """As `Planner.plan`; the plan bears a number by which the trace names it."""
        plan = self._planner.plan(op, dtype, redop, root, bucket, shape)
        if self._trace is None:
            return plan
        with self._lock:
            self._plans.append((replace(plan, number=len(self._plans)), (op, dtype, redop, root, bucket, shape)))
            return self._plans[-1][0]

    def after(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A blocking call that is followed by a replay of what has ended."""
        if self._trace is None:
            return run

        def run_and_replay(*args: Any) -> Any:
            result = run(*args)
            self.replay()
            return result

        return run_and_replay

    def take(self) -> list[Traced]:
        """The operations that have ended since it was asked last. What found no room is left out, and counted."""
        if self._trace is None:
            return []
        with self._lock:
            events, lost = self._trace.take()
            found: list[Traced] = []
            if self._direct:
                if not self.untold:
                    log.warning("operations are not replayed: what goes straight between devices leaves no trace")
                self.untold += len(events)
                return found
            for sequence, what, index, peer, segment, a, b, n, m in events:
                if what == Did.BEGIN:
                    self._torn.discard(sequence)
                    self._open[sequence] = [Event(index, m, 0, 0, a, 0, n)]  # its head: plan, chunk, apart, count
                elif sequence in self._open and what != Did.END:
                    self._open[sequence].append(Event(what, index, peer, segment, a, b, n))
                elif sequence in self._open and sequence not in self._torn:
                    found.append(self._ended(self._open.pop(sequence), streamed=n == 1))
            if lost:
                self.lost += lost
                self._torn |= set(self._open)
                log.warning("%d steps found no room in the trace and are not replayed; raise HETCCL_TRACE_STEPS", lost)
            return found

    def replay(self) -> None:
        """Checks what has ended: this rank as traced, the others as planned. Raises `PlanFault` (an
        `InternalError`)."""
        for traced in self.take():
            try:
                self._check(traced)
            except PlanFault as fault:
                raise PlanFault(
                    f"the executor did not do what was proved: {fault}. The operation has ended, its result may be "
                    "wrong. This is a fault of hetccl: please report this text",
                    **fault.facts,
                ) from None
            self.replayed += 1
            if self.keep is not None:
                self.keep.append(traced)

    @property
    def _direct(self) -> bool:
        return any(island.direct for island in self._planner.topology.islands)

    def _check(self, traced: Traced) -> None:
        planner, n = self._planner, self._planner.topology.size
        shared, algorithm = planner.choose(*traced.arguments)
        places = [packed(shared, rank, n) for rank in range(n)] if shared.counts else []
        if traced.places is not None:
            places[planner.rank] = traced.places
        plans = [algorithm(planner.topology, shared, r, places[r] if places else None) for r in range(n)]
        runs = [traced.run if rank == planner.rank else None for rank in range(n)]
        replay(planner.topology, shared, plans, runs, places)

    def _ended(self, events: list[Event], streamed: bool) -> Traced:
        head, *steps = events
        plan, arguments = self._plans[head.what]
        shared, _ = self._planner.choose(*arguments)
        shape = arguments[5]
        plan = replace(plan, op=shared.op)  # a barrier is an all_reduce
        run = Run(plan, head.n, head.a, head.number, tuple(steps), streamed)
        return Traced(shared, shape[1] if shape else None, arguments, run)
