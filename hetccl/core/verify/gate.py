# SPDX-License-Identifier: Apache-2.0
"""HETCCL_VERIFY: proves a class of operation when it is planned for the first time, before any traffic.

Every rank proves all ranks' plans for itself: plans are pure functions of what all ranks share, so all come to the same
verdict without asking each other, and a faulty plan raises everywhere at once. A proof by rank 0 alone would have to be
announced, and the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetccl.core.algorithms.blocks import packed
from hetccl.core.algorithms.common import HALF_TYPES, Algorithm, Places, Shared
from hetccl.core.log import get_logger
from hetccl.core.plan import Plan
from hetccl.core.topology import Topology
from hetccl.core.verify.checker import check_capabilities, proved_counts, shrink, verify_class
from hetccl.core.verify.machine import PlanFault
from hetccl.core.verify.spec import spec_of
from hetccl.types import DType, Op, RedOp

__all__ = ["Gate"]

log = get_logger("verify")

MOST_RANKS = 64  # "first" proves no larger communicators
FEW_STEPS = 400  # steps and flows of all ranks; larger plans are proved for 3 counts, ten times larger ones for one
MOST_STEPS = 20_000  # beyond so many "first" proves nothing: the first call would wait for seconds
SHAPES = 5  # of a v form, beside the made-up ones, that are proved; the same code makes the plans of the next
MADE_UP = 2  # shapes of a v form that are proved before the first real one
REMEDY = "HETCCL_VERIFY=always proves any"


class Gate:
    """Lets a class pass once it is proved. `mode` is that of HETCCL_VERIFY, `rank` the one that asks."""

    def __init__(self, topology: Topology, mode: str, rank: int = 0) -> None:
        self._topology, self._mode, self._rank = topology, mode, rank
        self._proved: set[object] = set()
        self._shapes: dict[object, int] = {}  # of a v form: how many were proved
        self.proofs = 0  # made, not remembered

    def check(self, shared: Shared, make: Algorithm, places: Places | None = None) -> None:
        """Proves the plans that `make` gives all ranks; `places` are those of this rank's blocks in a v form. Raises
        `PlanFault` (an `InternalError`)."""
        topology = self._topology
        if self._skips():
            return
        if not shared.counts:
            self._prove(shared, make, ())
            return
        mine = make(topology, shared, self._rank, places)
        what = _kind(shared, mine)
        shapes = self._shapes.setdefault(what, 0)
        if shapes >= SHAPES and self._mode != "always":
            return
        if not shapes:
            for counts in made_up(shared, topology.size):
                self._prove(replace(shared, counts=counts), make, ())
        all_places = [packed(shared, rank, topology.size) for rank in range(topology.size)]
        if places is not None:
            all_places[self._rank] = places
        self._prove(shared, make, all_places)
        self._shapes[what] = shapes + 1

    def tell(self, shared: Shared, plans: Sequence[Plan]) -> str:
        """Whether these plans, of all ranks, are proved, how, or why not: for `explain`. Blocks of a v form lie one
        after the other."""
        always = self._mode == "always"
        steps = sum(len(p.steps) + len(p.flows) for p in plans)
        why = self._skips() or self._too_large(steps)
        if why:
            return f"no: {why}"
        known = _form(shared, plans) in self._proved
        if shared.counts and not known and not always and self._shapes.get(_kind(shared, plans[0]), 0) >= SHAPES:
            return (
                f"not for this shape, but for {MADE_UP} made-up ones and the first {SHAPES} that came, whose plans the "
                f"same code made; {REMEDY}"
            )
        counts = len(proved_counts(shared, shrink(plans)[0], self._few(steps)))
        of = (
            "this shape"
            if shared.counts
            else f"{counts} count{'s' * (counts > 1)} that stand{'s' * (counts == 1)} for all"
        )
        both = ", in place and not" if spec_of(shared.op).in_place else ""
        when = "each time it is planned" if always else "yes" if known else "at the first call"
        return f"{when}, for {of}{both}; {steps} steps and flows on all ranks"

    def _skips(self) -> str:
        """Why nothing at all is proved, or nothing."""
        if self._mode == "off":
            return "HETCCL_VERIFY=off"
        if self._topology.size > MOST_RANKS and self._mode != "always":
            return f"there are {self._topology.size} ranks, HETCCL_VERIFY=first proves up to {MOST_RANKS}; {REMEDY}"
        return ""

    def _too_large(self, steps: int) -> str:
        if steps <= MOST_STEPS or self._mode == "always":
            return ""
        return (
            f"its plans have {steps} steps and flows on all ranks, HETCCL_VERIFY=first proves up to {MOST_STEPS}; "
            f"{REMEDY}"
        )

    def _few(self, steps: int) -> int:
        """For how many counts plans of so many steps are proved; 0: for all that stand for others."""
        return 0 if self._mode == "always" or steps <= FEW_STEPS else 3 if steps <= 10 * FEW_STEPS else 1

    def _prove(self, shared: Shared, make: Algorithm, places: Sequence[Places]) -> None:
        topology, always = self._topology, self._mode == "always"
        mine = make(topology, shared, self._rank, places[self._rank] if places else None)
        steps = topology.size * (len(mine.steps) + len(mine.flows))
        plans: list[Plan] = []
        if always or steps <= 2 * MOST_STEPS:  # an estimate: making all plans would take its time, too
            plans = [make(topology, shared, rank, places[rank] if places else None) for rank in range(topology.size)]
            steps = sum(len(p.steps) + len(p.flows) for p in plans)
        if why := self._too_large(steps):
            log.info("%s is not proved before it runs: %s", shared.op.label, why)
            return
        try:
            check_capabilities(topology, plans)
            form = _form(shared, plans)
            if form in self._proved and not always:
                return
            for slots in (1, 8) if always else (1,):
                verify_class(topology, shared, plans, slots=slots, few=self._few(steps), places=places)
        except PlanFault as fault:
            raise PlanFault(
                f"the plan of {shared.op.label} ({plans[0].algorithm}) is wrong, so nothing was sent. {fault}. This is "
                "a fault of hetccl: please report this text; HETCCL_ALGORITHM can choose another algorithm",
                **fault.facts,
            ) from None
        self.proofs += 1
        self._proved.add(form)


def made_up(shared: Shared, n: int) -> list[tuple[int, ...]]:
    """Lengths that stand for many: all blocks of different length, and every third one empty."""
    pairs = range(n * n if shared.op == Op.ALL_TO_ALL else n)
    return [tuple(i + 1 for i in pairs), tuple((i % 3) * (i + 1) for i in pairs)]


def _kind(shared: Shared, plan: Plan) -> object:
    """What the shapes of a v form are counted by."""
    return replace(shared, counts=()), plan.algorithm


def _form(shared: Shared, plans: Sequence[Plan]) -> object:
    """What a proof depends on: everything but the dtype, the operator and the segment's length."""
    average = shared.redop == RedOp.AVG
    how = (average, average and shared.dtype in HALF_TYPES, shared.redop == RedOp.PREMUL_SUM)
    same = tuple(replace(p, dtype=DType.INT8, redop=RedOp.SUM, segment=int(p.segment > 0)) for p in plans)
    return how, shared.op, shared.root, shared.counts, same
