# SPDX-License-Identifier: Apache-2.0
"""HETCCL_VERIFY: proves a class of operation when it is planned for the first time, before any traffic.

Every rank proves all ranks' plans for itself: plans are pure functions of what all ranks share, so all come to the same
verdict without asking each other, and a faulty plan raises everywhere at once. A proof by rank 0 alone would have to be
announced, and the others would wait for it.
"""

from __future__ import annotations

from dataclasses import replace

from hetccl.core.algorithms.common import HALF_TYPES, Algorithm, Shared
from hetccl.core.plan import Plan
from hetccl.core.topology import Topology
from hetccl.core.verify.checker import check_capabilities, verify_class
from hetccl.core.verify.machine import PlanFault
from hetccl.types import DType, RedOp

__all__ = ["Gate"]

MOST_RANKS = 64  # "first" proves no larger communicators
FEW_STEPS = 400  # of all ranks together; larger plans are proved for fewer counts


class Gate:
    """Lets a class pass once it is proved. `mode` is that of HETCCL_VERIFY."""

    def __init__(self, topology: Topology, mode: str) -> None:
        self._topology, self._mode = topology, mode
        self._proved: set[object] = set()
        self.proofs = 0  # made, not remembered

    def check(self, shared: Shared, make: Algorithm) -> None:
        """Proves the plans that `make` gives all ranks. Raises `PlanFault` (an `InternalError`)."""
        topology, always = self._topology, self._mode == "always"
        if self._mode == "off" or (topology.size > MOST_RANKS and not always):
            return
        plans = [make(topology, shared, rank, None) for rank in range(topology.size)]
        try:
            check_capabilities(topology, plans)
            form = _form(shared, plans)
            if form in self._proved and not always:
                return
            few = not always and sum(len(p.steps) + len(p.flows) for p in plans) > FEW_STEPS
            for slots in (1, 8) if always else (1,):
                verify_class(topology, shared, plans, slots=slots, few=few)
        except PlanFault as fault:
            raise PlanFault(
                f"the plan of {shared.op.label} ({plans[0].algorithm}) is wrong, so nothing was sent. {fault}. This is "
                "a fault of hetccl: please report this text; HETCCL_ALGORITHM can choose another algorithm",
                **fault.facts,
            ) from None
        self.proofs += 1
        self._proved.add(form)


def _form(shared: Shared, plans: list[Plan]) -> object:
    """What a proof depends on: everything but the dtype, the operator and the segment's length."""
    average = shared.redop == RedOp.AVG
    how = (average, average and shared.dtype in HALF_TYPES, shared.op, shared.root)
    return how, tuple(replace(p, dtype=DType.INT8, redop=RedOp.SUM, segment=int(p.segment > 0)) for p in plans)
