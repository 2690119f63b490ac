# SPDX-License-Identifier: Apache-2.0
"""Proves the plans of all ranks for one count, or for the counts that stand for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetccl.core.algorithms.common import HALF_TYPES, Places, Shared
from hetccl.core.plan import UNIT_ALIGN, Lane, Plan, Step, StepKind, slice_range
from hetccl.core.topology import Topology
from hetccl.core.verify.bounds import check_bounds
from hetccl.core.verify.island import VENDOR, check_able, combining
from hetccl.core.verify.machine import Machine, PlanFault, Rank, on_host
from hetccl.core.verify.memory import Fault
from hetccl.core.verify.spec import REDUCED, Need, Sizes, spec_of
from hetccl.core.verify.values import UNSCALED, Values
from hetccl.types import Op, RedOp

__all__ = ["Proof", "proved_counts", "representative_counts", "shrink", "verify_class", "verify_plans"]


@dataclass(frozen=True)
class Proof:
    """What was proved. Elements are those that crossed between islands."""

    count: int
    steps: int
    border_elements: int
    segments: int


def verify_class(
    topology: Topology, shared: Shared, plans: Sequence[Plan], *, slots: int = 1, few: int = 0,
    places: Sequence[Places] = (),
) -> list[Proof]:  # fmt: skip
    """Proves a class: for counts that stand for all (`few`: for so many of them), in place and not. Raises `PlanFault`.
    The v forms are proved for the one shape that the plans are made for: lengths `shared.counts` at `places`.

    Plans are affine in the segment, so a model segment of few elements stands for one of many; one slot a ring stands
    for any number (a lock-up needs full rings), and chunks are small enough that every ring fills.
    """
    small = shrink(plans)
    proofs = []
    for count in proved_counts(shared, small[0], few):
        for in_place in (False, True) if spec_of(shared.op).in_place else (False,):
            proofs.append(verify_plans(topology, shared, small, count, in_place=in_place, slots=slots, places=places))
    return proofs


def verify_plans(
    topology: Topology, shared: Shared, plans: Sequence[Plan], count: int, *, in_place: bool = False, slots: int = 2,
    chunk: int = 0, scratch_rule: bool = True, places: Sequence[Places] = (),
) -> Proof:  # fmt: skip
    """Proves the plans of all ranks, in rank order, for one count. Raises `PlanFault` with rank, step and interval.

    `chunk` is in elements (0: so that messages have a few). `slots` is the number of messages a ring holds. `places`
    are those of the v forms, by rank (packed, if not given), whose count is 1.
    """
    sizes = Sizes(shared, topology.size, count, places)
    try:
        check_alike(topology, shared, plans, sizes)
        machine = Machine(
            topology, sizes, plans, chunk=chunk or model_chunk(plans, count), slots=slots, in_place=in_place,
            scratch_rule=scratch_rule,
        )  # fmt: skip
        machine.run()
        owned = check_outputs(topology, shared, machine, sizes)
        wrong = check_bounds(topology, plans[0], sizes, machine.channels, owned)
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


def proved_counts(shared: Shared, plan: Plan, few: int) -> list[int]:
    """The counts that `verify_class` takes: all that stand for others, or `few` of them, the last among them."""
    counts = [1] if shared.counts else representative_counts(plan)
    return [*counts[: few - 1], counts[-1]] if 0 < few < len(counts) else counts


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


def check_alike(topology: Topology, shared: Shared, plans: Sequence[Plan], sizes: Sizes) -> None:
    """What all ranks' plans must agree on, and what the executor takes from a plan's head."""
    if [p.rank for p in plans] != list(range(topology.size)):
        raise PlanFault("there must be one plan for each rank, in rank order")
    first = plans[0]
    for p in plans:
        for name in ("op", "dtype", "redop", "root", "units", "segment", "algorithm", "plan_class", "digest"):
            if getattr(p, name) != getattr(first, name):
                raise PlanFault(
                    f"rank {p.rank}: {name} is {getattr(p, name)!r}, but {getattr(first, name)!r} on rank 0",
                    rank=p.rank,
                )
        if (p.op, p.dtype, p.redop) != (shared.op, shared.dtype, shared.redop):
            raise PlanFault(f"rank {p.rank}: the plan is of {p.op.label} {p.redop.label} {p.dtype.label}", rank=p.rank)
        for name, found, out in (("in", p.in_blocks, False), ("out", p.out_blocks, True)):
            expected = sizes.extent(p.rank, out) if shared.counts else len(sizes.held(p.rank, out))
            if found != expected:
                raise PlanFault(f"rank {p.rank}: {name}_blocks is {found}, expected {expected}", rank=p.rank)
        filled = sum(hi - lo for lo, hi in sizes.blocks(p.rank, out=True))
        if shared.counts and filled < p.out_blocks and not p.reads_out:
            raise PlanFault(
                f"rank {p.rank}: the blocks fill {filled} of {p.out_blocks} elements of the output, but what lies "
                "between them is not kept (reads_out)",
                rank=p.rank,
            )
        if shared.counts and (p.segment or p.units != 1):
            raise PlanFault(f"rank {p.rank}: a v form is measured in elements, not in segments or units", rank=p.rank)
        if p.segment and p.segment % (p.units * UNIT_ALIGN):
            raise PlanFault(f"rank {p.rank}: a segment of {p.segment} elements is not whole units of 16", rank=p.rank)
        for i, step in enumerate(p.steps):
            if not -1 <= step.wait < len(p.steps) or step.first_flow + step.n_flows > len(p.flows):
                raise PlanFault(
                    f"rank {p.rank}, step {i}: names a step or a flow that does not exist", rank=p.rank, step=i
                )
        device = not topology.island_of(p.rank).host_memory
        for i, step in enumerate(p.steps):
            wrong = _wrong_lane(p, step, device)
            if wrong:
                raise PlanFault(f"rank {p.rank}, step {i} ({step.kind.name.lower()}): {wrong}", rank=p.rank, step=i)
    check_capabilities(topology, plans)


def _wrong_lane(plan: Plan, step: Step, device: bool) -> str:
    """Two lanes that both call, send or enqueue would do so in an order that is left to chance."""
    if step.kind == StepKind.FLOWS:
        return "" if step.lane == Lane.BORDER else "messages belong on the border lane"
    if step.lane == Lane.ISLAND:
        return ""
    if step.kind in VENDOR:
        return "vendor calls belong on the island lane"
    return "what goes onto the stream belongs on the island lane" if device and not on_host(plan, step) else ""


def check_capabilities(topology: Topology, plans: Sequence[Plan]) -> None:
    """Whether each island's library and device can do what its plans ask. The only part of a proof that depends on
    dtype and operator, once averages are told from sums."""
    for p in plans:
        island = topology.island_of(p.rank)
        for i, step in enumerate(p.steps):
            wrong = ""
            if step.kind in VENDOR:
                wrong = check_able(island, p, step)
            elif step.kind == StepKind.SCALE and not (island.host_memory or island.kernels) and not on_host(p, step):
                wrong = f"scales on a device of vendor {island.vendor}, which has no kernels"
            if wrong:
                raise PlanFault(f"rank {p.rank}, step {i} ({step.kind.name.lower()}): {wrong}", rank=p.rank, step=i)


def check_outputs(topology: Topology, shared: Shared, machine: Machine, sizes: Sizes) -> dict[int, int]:
    """Every output interval against its specification. Returns the elements that each island combined (all_reduce)."""
    agreed: list[tuple[int, int, int, int]] = []  # (first element, length, node, index), of the first rank
    owned: dict[int, int] = {}
    for rank in machine.ranks:
        r = rank.plan.rank
        blocks = sizes.blocks(r, out=True)
        for need in sizes.spec.needs(topology.size, r, rank.plan.root):
            lo, hi = blocks[need.place]
            sources = range(topology.size) if need.source == REDUCED else (need.source,)
            starts = {q: sizes.start(q, False, need.at) for q in sources}
            found = _content(rank, need, lo, hi)
            at = lo
            for length, node, index in found:
                wanted = {q: start + at - lo for q, start in starts.items()}
                problem = _wrong(machine.values, shared, topology.size, need, node, index, wanted)
                if problem:
                    raise PlanFault(
                        f"rank {rank.plan.rank}: output[{at}:{at + length}] holds {machine.values.text(node, index)}; "
                        f"{problem}",
                        rank=rank.plan.rank,
                    )
                at += length
            if shared.op == Op.ALL_REDUCE and len(topology.islands) > 1:
                this = [(sum(f[0] for f in found[:i]), *f) for i, f in enumerate(found)]
                if agreed and this != agreed:
                    raise PlanFault(_differs(machine.values, rank, agreed, this), rank=rank.plan.rank)
                agreed = this
    for _, length, node, index in agreed:
        for maker, n in machine.values.owners(node, index, length).items():
            island = topology.place(maker)[0]
            owned[island] = owned.get(island, 0) + n
    return owned


def _content(rank: Rank, need: Need, lo: int, hi: int) -> list[tuple[int, int, int]]:
    out = rank.layout.output
    try:
        return out.region.read(out.lo + lo, out.lo + hi, None)
    except Fault as fault:
        what = "the operator over every rank's input" if need.source == REDUCED else f"input of rank {need.source}"
        raise PlanFault(
            f"rank {rank.plan.rank}: at the end, {fault}; expected {what}, block {need.at}", rank=rank.plan.rank
        ) from None


def _wrong(values: Values, shared: Shared, size: int, need: Need, node: int, index: int, at: dict[int, int]) -> str:
    """Why a value is not what is needed; element 0 of it should be element at[r] of rank r's input."""
    leaves = values.leaves(node)
    if need.source != REDUCED:
        if len(leaves) == 1 and not values.operators(node):
            leaf = leaves[0]
            place, untouched = (leaf.rank, index + leaf.offset), (leaf.inner, leaf.outer, leaf.factor)
            if place == (need.source, at[need.source]) and untouched == (1.0, 1.0, UNSCALED):
                return ""
        return f"expected in{need.source}[{at[need.source]}]"
    average = shared.redop == RedOp.AVG
    operator = combining(shared.redop)
    odd = values.operators(node) - {operator} - ({RedOp.AVG} if average else set())
    if odd:
        return f"expected only {operator.label}"
    times = [0] * size
    for leaf in leaves:
        if index + leaf.offset != at[leaf.rank]:
            return f"expected element {at[leaf.rank]} of rank {leaf.rank}'s input, found element {index + leaf.offset}"
        if leaf.factor != (leaf.rank if shared.redop == RedOp.PREMUL_SUM else UNSCALED):
            return (
                f"expected the input of rank {leaf.rank} to be multiplied by its own factor "
                f"{'once, before combining' if shared.redop == RedOp.PREMUL_SUM else 'never'}"
            )
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
