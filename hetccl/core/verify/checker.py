# SPDX-License-Identifier: Apache-2.0
"""Proves the plans of all ranks for one count, or for the counts that stand for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetccl.core.algorithms.common import HALF_TYPES, Shared
from hetccl.core.plan import UNIT_ALIGN, Buffer, Lane, Plan, Step, StepKind, slice_range
from hetccl.core.topology import Topology
from hetccl.core.verify.bounds import check_bounds
from hetccl.core.verify.island import check_able
from hetccl.core.verify.machine import Machine, PlanFault, Rank
from hetccl.core.verify.memory import Fault
from hetccl.core.verify.spec import REDUCED, Need, spec_of
from hetccl.core.verify.values import Values
from hetccl.types import RedOp

__all__ = ["Proof", "representative_counts", "verify_class", "verify_plans"]


@dataclass(frozen=True)
class Proof:
    """What was proved. Elements are those that crossed between islands."""

    count: int
    steps: int
    border_elements: int
    segments: int


def verify_class(
    topology: Topology, shared: Shared, plans: Sequence[Plan], *, slots: int = 1, few: bool = False
) -> list[Proof]:
    """Proves a class: for counts that stand for all (`few`: for three of them), in place and not. Raises `PlanFault`.

    Plans are affine in the segment, so a model segment of few elements stands for one of many; one slot a ring stands
    for any number (a lock-up needs full rings), and chunks are small enough that every ring fills.
    """
    small = shrink(plans)
    proofs = []
    counts = representative_counts(small[0])
    for count in [*counts[:2], counts[-1]] if few else counts:
        for in_place in (False, True) if spec_of(shared.op).in_place else (False,):
            proofs.append(verify_plans(topology, shared, small, count, in_place=in_place, slots=slots))
    return proofs


def verify_plans(
    topology: Topology, shared: Shared, plans: Sequence[Plan], count: int, *, in_place: bool = False, slots: int = 2,
    chunk: int = 0, scratch_rule: bool = True,
) -> Proof:  # fmt: skip
    """Proves the plans of all ranks, in rank order, for one count. Raises `PlanFault` with rank, step and interval.

    `chunk` is in elements (0: so that messages have a few). `slots` is the number of messages a ring holds.
    """
    try:
        check_alike(topology, shared, plans)
        machine = Machine(
            topology, spec_of(shared.op), plans, count,
            chunk=chunk or model_chunk(plans, count), slots=slots, in_place=in_place, scratch_rule=scratch_rule,
        )  # fmt: skip
        machine.run()
        owned = check_outputs(topology, shared, machine, count)
        wrong = check_bounds(topology, plans[0], count, machine.channels, owned)
        if wrong:
            raise PlanFault(wrong)
    except PlanFault as fault:
        how = f"{shared.op.label} of {count} elements, {'in place' if in_place else 'not in place'}, {slots} slot(s)"
        raise PlanFault(f"{how}: {fault}", **fault.facts) from None
    return Proof(count, machine.steps_run, machine.channels.total, len(plans[0].segments(count)))


def shrink(plans: Sequence[Plan]) -> list[Plan]:
    """The same plans with the smallest segment whose unit can lose a remainder to the tail (`measure` rounds units of
    16 elements and more down)."""
    return [replace(p, segment=p.units * 2 * UNIT_ALIGN) if p.segment else p for p in plans]


def representative_counts(plan: Plan) -> list[int]:
    """Nothing, one element, less than a unit, units of one element, units of 16 without and with a tail; with segments
    also enough of them that scratch is used again, and a last one with a tail."""
    units = plan.units
    whole = units * UNIT_ALIGN
    counts = [0, 1, max(2, units - 1), units + 1, whole, whole + units // 2 + 1]
    if plan.segment:
        depth = max((s.shift for s in plan.steps), default=0) + 1
        counts.append(2 * whole * (depth + 1) + whole + units // 2 + 1)
    return sorted(set(counts))


def model_chunk(plans: Sequence[Plan], count: int) -> int:
    """Elements of a chunk such that the smallest border message has two and the longest no more than four."""
    first = plans[0].segments(count)[0]
    lengths = []
    for plan in plans:
        for flow in plan.flows:
            lo, hi = slice_range(flow.src if flow.src.buffer >= 0 else flow.dst, first, plan.units)
            if hi > lo:
                lengths.append(hi - lo)
    return max(1, -(-min(lengths) // 2), -(-max(lengths) // 4)) if lengths else 1


def check_alike(topology: Topology, shared: Shared, plans: Sequence[Plan]) -> None:
    """What all ranks' plans must agree on, and what the executor takes from a plan's head."""
    if [p.rank for p in plans] != list(range(topology.size)):
        raise PlanFault("there must be one plan for each rank, in rank order")
    first, spec = plans[0], spec_of(shared.op)
    for p in plans:
        for name in ("op", "dtype", "redop", "root", "units", "segment", "algorithm", "plan_class"):
            if getattr(p, name) != getattr(first, name):
                raise PlanFault(
                    f"rank {p.rank}: {name} is {getattr(p, name)!r}, but {getattr(first, name)!r} on rank 0",
                    rank=p.rank,
                )
        if (p.op, p.dtype, p.redop) != (shared.op, shared.dtype, shared.redop):
            raise PlanFault(f"rank {p.rank}: the plan is of {p.op.label} {p.redop.label} {p.dtype.label}", rank=p.rank)
        for name, found, blocks in (("in", p.in_blocks, spec.in_blocks), ("out", p.out_blocks, spec.out_blocks)):
            expected = blocks(topology.size, p.rank, p.root)
            if found != expected:
                raise PlanFault(f"rank {p.rank}: {name}_blocks is {found}, expected {expected}", rank=p.rank)
        if p.segment and p.segment % (p.units * UNIT_ALIGN):
            raise PlanFault(f"rank {p.rank}: a segment of {p.segment} elements is not whole units of 16", rank=p.rank)
        for i, step in enumerate(p.steps):
            if not -1 <= step.wait < len(p.steps) or step.first_flow + step.n_flows > len(p.flows):
                raise PlanFault(
                    f"rank {p.rank}, step {i}: names a step or a flow that does not exist", rank=p.rank, step=i
                )
        device = not topology.island_of(p.rank).host_memory
        for i, step in enumerate(p.steps):
            wrong = _wrong_lane(step, device)
            if wrong:
                raise PlanFault(f"rank {p.rank}, step {i} ({step.kind.name.lower()}): {wrong}", rank=p.rank, step=i)
    check_capabilities(topology, plans)


def _wrong_lane(step: Step, device: bool) -> str:
    """Two lanes that both call, send or enqueue would do so in an order that is left to chance."""
    if step.kind == StepKind.FLOWS:
        return "" if step.lane == Lane.BORDER else "messages belong on the border lane"
    if step.lane == Lane.ISLAND:
        return ""
    if step.kind <= StepKind.REDUCE:
        return "vendor calls belong on the island lane"
    return "what goes onto the stream belongs on the island lane" if device and step.kind != StepKind.COMBINE else ""


def check_capabilities(topology: Topology, plans: Sequence[Plan]) -> None:
    """Whether each island's library and device can do what its plans ask. The only part of a proof that depends on
    dtype and operator, once averages are told from sums."""
    for p in plans:
        island = topology.island_of(p.rank)
        for i, step in enumerate(p.steps):
            wrong = ""
            if step.kind <= StepKind.REDUCE:
                wrong = check_able(island, p, step)
            elif (
                step.kind == StepKind.SCALE
                and not (island.host_memory or island.kernels)
                and step.dst.buffer != Buffer.HOST_SCRATCH  # there the host scales
            ):
                wrong = f"scales on a device of vendor {island.vendor}, which has no kernels"
            if wrong:
                raise PlanFault(f"rank {p.rank}, step {i} ({step.kind.name.lower()}): {wrong}", rank=p.rank, step=i)


def check_outputs(topology: Topology, shared: Shared, machine: Machine, count: int) -> dict[int, int]:
    """Every output interval against its specification. Returns the elements that each island combined (all_reduce)."""
    spec = spec_of(shared.op)
    agreed: list[tuple[int, int, int, int]] = []  # (first input element, length, node, index), of the first rank
    owned: dict[int, int] = {}
    for rank in machine.ranks:
        for need in spec.needs(topology.size, rank.plan.rank, rank.plan.root, count):
            found = _content(rank, need)
            at = need.lo
            for length, node, index in found:
                wanted = need.at + at - need.lo
                problem = _wrong(machine.values, shared, topology.size, need, node, index, wanted)
                if problem:
                    raise PlanFault(
                        f"rank {rank.plan.rank}: output[{at}:{at + length}] holds {machine.values.text(node, index)}; "
                        f"{problem}",
                        rank=rank.plan.rank,
                    )
                at += length
            if need.source == REDUCED and len(topology.islands) > 1:
                this = [(need.at + sum(f[0] for f in found[:i]), *f) for i, f in enumerate(found)]
                if rank.plan.rank and need.at == 0 and agreed and this != agreed:
                    raise PlanFault(_differs(machine.values, rank, agreed, this), rank=rank.plan.rank)
                if not agreed and need.at == 0:
                    agreed = this
    for _, length, node, index in agreed:
        for maker, n in machine.values.owners(node, index, length).items():
            island = topology.place(maker)[0]
            owned[island] = owned.get(island, 0) + n
    return owned


def _content(rank: Rank, need: Need) -> list[tuple[int, int, int]]:
    out = rank.layout.output
    try:
        return out.region.read(out.lo + need.lo, out.lo + need.hi, None)
    except Fault as fault:
        raise PlanFault(f"rank {rank.plan.rank}: at the end, {fault}; expected {_expected(need)}") from None


def _expected(need: Need) -> str:
    what = "the operator over every rank's input" if need.source == REDUCED else f"input of rank {need.source}"
    return f"{what}, elements {need.at} to {need.at + need.hi - need.lo}"


def _wrong(values: Values, shared: Shared, size: int, need: Need, node: int, index: int, at: int) -> str:
    """Why a value is not what is needed; element 0 of it should be input element `at`."""
    leaves = values.leaves(node)
    if need.source != REDUCED:
        if len(leaves) == 1 and not values.operators(node):
            leaf = leaves[0]
            if (leaf.rank, index + leaf.offset, leaf.inner, leaf.outer) == (need.source, at, 1.0, 1.0):
                return ""
        return f"expected in{need.source}[{at}]"
    average = shared.redop == RedOp.AVG
    operator = RedOp.SUM if average else shared.redop
    odd = values.operators(node) - {operator} - ({RedOp.AVG} if average else set())
    if odd:
        return f"expected only {operator.label}"
    times = [0] * size
    for leaf in leaves:
        if index + leaf.offset != at:
            return f"expected element {at} of every input, found element {index + leaf.offset} of rank {leaf.rank}'s"
        times[leaf.rank] += 1
        before = average and shared.dtype in HALF_TYPES and not leaf.averaged
        inner, outer = (float(size), 1.0) if before else (1.0, float(size) if average else 1.0)
        if (leaf.inner, leaf.outer) != (inner, outer):
            return (
                f"expected every input divided by {inner:g} before and {outer:g} after combining, found "
                f"{leaf.inner:g} and {leaf.outer:g} for rank {leaf.rank}'s"
            )
    for rank, n in enumerate(times):
        if n != 1:
            return f"expected the input of every rank once, found that of rank {rank} {n} times"
    return ""


def _differs(
    values: Values, rank: Rank, agreed: list[tuple[int, int, int, int]], found: list[tuple[int, int, int, int]]
) -> str:
    for mine, other in _pairs(found, agreed):
        if mine != other:
            at, length, node, index = mine
            return (
                f"rank {rank.plan.rank}: output[{at}:{at + length}] holds {values.text(node, index)}, combined "
                f"otherwise than {values.text(other[2], other[3])} on rank 0: their bits may differ"
            )
    return f"rank {rank.plan.rank}: the output differs from that of rank 0"


def _pairs(
    a: list[tuple[int, int, int, int]], b: list[tuple[int, int, int, int]]
) -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int, int, int]]]:
    yield from zip(a, b, strict=False)
