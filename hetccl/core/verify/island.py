# SPDX-License-Identifier: Apache-2.0
"""Vendor calls: all ranks of an island meet in the order in which each issues its calls.

Only the order that the data itself forces is taken as given (a broadcast's root need not wait for the others), but all
ranks are taken to block until all have come: whatever a library promises beyond the first or does short of the
second, the proof holds.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetccl.core.groups import groups_of
from hetccl.core.plan import Buffer, Plan, Step, StepKind
from hetccl.core.topology import Island, Topology
from hetccl.core.verify.layout import Place
from hetccl.core.verify.memory import Access, Fault
from hetccl.core.verify.values import UNDEFINED, Content, cut, merge
from hetccl.types import RedOp

if TYPE_CHECKING:
    from hetccl.core.verify.machine import Machine, Proc, Rank

__all__ = ["VENDOR", "Rendezvous", "check_able", "combining", "vendor_operator"]

REDUCING = (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER, StepKind.REDUCE)
ROOTED = (StepKind.BROADCAST, StepKind.REDUCE, StepKind.TRANSFER)
VENDOR = frozenset({*REDUCING, *ROOTED, StepKind.ALL_GATHER, StepKind.ALL_TO_ALL})  # calls of the vendor's library


@dataclass
class _Arrival:
    rank: Rank
    proc: Proc
    step: Step
    n: int
    src: Place | None  # None: this rank gives nothing
    dst: Place | None


class Rendezvous:
    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._calls: dict[int, int] = {}  # rank -> calls made
        self._open: dict[tuple[int, int], dict[int, _Arrival]] = {}

    def call(
        self, machine: Machine, rank: Rank, me: Proc, step: Step, segment: int
    ) -> Generator[tuple[Any, ...], None, None]:
        n = rank.layout.length(step.len, segment)
        if n == 0:
            return
        island = self._topology.island_of(rank.plan.rank)
        members = members_of(self._topology, island, step)
        number = self._calls.get(rank.plan.rank, 0)
        self._calls[rank.plan.rank] = number + 1
        key = (island.index, number)
        met = self._open.setdefault(key, {})
        met[rank.plan.rank] = _arrival(rank, me, step, segment, n, members)
        if len(met) < island.size:
            while key in self._open:
                yield (("call", *key),)
            return
        del self._open[key]
        self._run(machine, key, [met[r] for r in island.ranks])
        machine.notify(("call", *key))

    def _run(self, machine: Machine, key: tuple[int, int], met: list[_Arrival]) -> None:
        first = met[0]
        for other in met[1:]:
            mine, theirs = _signature(first), _signature(other)
            if mine != theirs:
                raise Fault(
                    f"call {key[1]} of island {key[0]}: {first.proc.where} calls {mine}, but {other.proc.where} "
                    f"calls {theirs}"
                )
        kind, n, root, to = first.step.kind, first.n, first.step.root, first.step.to
        members = members_of(self._topology, self._topology.islands[key[0]], first.step)
        if kind in ROOTED and root not in members:
            raise Fault(f"names island rank {root} as root of island ranks {members}")
        if kind == StepKind.TRANSFER and (to not in members or to == root):
            raise Fault(f"transfers from island rank {root} to island rank {to} of {members}")
        if len(members) < len(met):  # the others only pass by
            met, root = [met[m] for m in members], members.index(root) if kind in ROOTED else 0
            to = members.index(to) if kind == StepKind.TRANSFER else 0
        together, sent = 0, met[root].proc.clock if kind in ROOTED else 0
        if kind not in (StepKind.BROADCAST, StepKind.TRANSFER):
            for a in met:
                if kind != StepKind.REDUCE or a.src is not None:  # not those outside the group
                    together = machine.join(together, a.proc.clock)
        contents: list[Content] = []
        accesses: list[Access] = []
        for i, a in enumerate(met):
            if a.src is None and a.dst is None:  # a transfer between others
                accesses.append(Access(a.proc.thread, 0, 0, a.proc.where))
                contents.append([])
                continue
            access = a.proc.access()
            accesses.append(access)
            if kind == StepKind.BROADCAST or (kind == StepKind.TRANSFER and i == to):
                a.proc.clock = machine.join(a.proc.clock, sent)
            elif kind != StepKind.TRANSFER and (kind != StepKind.REDUCE or i == root):
                a.proc.clock = machine.join(a.proc.clock, together)  # else: what is sent may be taken later
            src = a.src if i == root or kind not in (StepKind.BROADCAST, StepKind.TRANSFER) else None
            if src is None:
                contents.append([])
            else:
                contents.append(_blame(a, lambda s=src, access=access: s.region.read(s.lo, s.hi, access)))
        for i, a in enumerate(met):
            content = self._result(machine, key, kind, contents, i, n, root, vendor_operator(a.rank.plan))
            dst = a.dst
            if dst is None:
                continue
            if kind == StepKind.ALL_GATHER and a.src == Place(dst.region, dst.lo + i * n, dst.lo + (i + 1) * n):
                self._store_around(machine, a, dst, content, i, n, accesses[i])
            elif not (kind == StepKind.BROADCAST and i == root and a.src == dst):
                _blame(a, lambda a=a, d=dst, c=content, i=i: machine.store(a.rank, d, c, accesses[i]))

    def _result(
        self, machine: Machine, key: tuple[int, int], kind: StepKind, contents: list[Content], i: int, n: int,
        root: int, redop: RedOp,
    ) -> Content:  # fmt: skip
        if kind in (StepKind.BROADCAST, StepKind.TRANSFER):
            return contents[root]
        if kind == StepKind.ALL_TO_ALL:
            return [piece for content in contents for piece in cut(content, i * n, n)]
        if kind == StepKind.ALL_GATHER:
            return [piece for content in contents for piece in content]
        if kind == StepKind.REDUCE and i != root:
            return [(n, UNDEFINED, 0)]
        sources = contents
        if kind == StepKind.REDUCE_SCATTER:
            sources = [cut(content, i * n, n) for content in contents]
        # an all_reduce need not give all ranks the same bits; the ranks of the only island are taken as they come
        call = (*key, i) if kind == StepKind.ALL_REDUCE and len(self._topology.islands) > 1 else key
        result = []
        for length, parts in merge([content for content in sources if content]):
            node, index = machine.values.by_vendor(redop, call, parts)
            result.append((length, node, index))
            if any(self._topology.place(leaf.rank)[0] != key[0] for leaf in machine.values.leaves(node)):
                rank = self._topology.islands[key[0]].ranks[i]  # it combines what came over the border
                machine.values.made.setdefault(machine.values.root_of(node), []).append((index, length, rank))
        return result

    def _store_around(
        self, machine: Machine, a: _Arrival, dst: Place, content: Content, i: int, n: int, access: Access
    ) -> None:  # an all_gather in place does not write the rank's own part
        total = sum(piece[0] for piece in content)
        for lo, hi in ((0, i * n), ((i + 1) * n, total)):
            place = Place(dst.region, dst.lo + lo, dst.lo + hi)
            part = cut(content, lo, hi - lo)
            _blame(a, lambda p=place, c=part: machine.store(a.rank, p, c, access))


def members_of(topology: Topology, island: Island, step: Step) -> tuple[int, ...]:
    """The island ranks that take part in a call."""
    groups = groups_of(island.size, len(topology.islands))
    if not 0 <= step.group < len(groups):
        raise Fault(f"calls in group {step.group}; island {island.index} has {len(groups)}")
    return groups[step.group]


def _arrival(rank: Rank, me: Proc, step: Step, segment: int, n: int, members: tuple[int, ...]) -> _Arrival:
    """Where the call reads and writes. In place means what the NCCL-shaped interfaces allow, and nothing else."""
    at, size = rank.island_rank, len(members)
    if at not in members:
        return _Arrival(rank, me, step, n, None, None)
    if step.kind == StepKind.TRANSFER:
        src = rank.layout.place(step.src, segment, n) if at == step.root else None
        return _Arrival(rank, me, step, n, src, rank.layout.place(step.dst, segment, n) if at == step.to else None)
    reads = n * size if step.kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_TO_ALL) else n
    writes = n * size if step.kind in (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL) else n
    src, dst = rank.layout.place(step.src, segment, reads), rank.layout.place(step.dst, segment, writes)
    at = members.index(at)
    fits = src.lo == dst.lo
    if step.kind == StepKind.REDUCE_SCATTER:
        fits = dst.lo == src.lo + at * n
    elif step.kind == StepKind.ALL_GATHER:
        fits = src.lo == dst.lo + at * n
    elif step.kind == StepKind.ALL_TO_ALL:
        fits = False
    if src.region is dst.region and src.lo < dst.hi and dst.lo < src.hi and not fits:
        raise Fault(f"source [{src.lo}:{src.hi}] and target [{dst.lo}:{dst.hi}] of {src.region.name} overlap in part")
    return _Arrival(rank, me, step, n, src, dst)


def check_able(island: Island, plan: Plan, step: Step) -> str:
    """Why the vendor's library cannot do a step, or nothing."""
    if not island.host_memory and Buffer.HOST_SCRATCH in (step.src.buffer, step.dst.buffer):
        return "hands host memory to the vendor's library of a device"
    if island.size == 1:
        return "calls the vendor's library in an island of one rank"
    if step.group and not island.splits:
        return f"vendor {island.vendor} can make no communicator of a part of the island"
    if step.kind not in REDUCING:
        if step.kind == StepKind.ALL_TO_ALL and not island.swaps:
            return f"vendor {island.vendor} has no all_to_all"
        if step.kind == StepKind.TRANSFER and not island.transfers:
            return f"vendor {island.vendor} has no send and receive"
        able = step.as_bytes or island.moves(plan.dtype)
        return "" if able else f"vendor {island.vendor} cannot move {plan.dtype.label}"
    if step.as_bytes:
        return "reduces elements as if they were bytes"
    if step.group and not island.splits:
        return f"vendor {island.vendor} makes no communicator of a part of the island"
    redop = vendor_operator(plan)
    able = island.reduces(plan.dtype, redop)
    return "" if able else f"vendor {island.vendor} cannot reduce {plan.dtype.label} with {redop.label}"


def vendor_operator(plan: Plan) -> RedOp:
    """As the executor asks the library (hx_vendor_call): hetccl scales, unless the divisor says that the library
    averages by itself."""
    if plan.redop == RedOp.AVG:
        return RedOp.AVG if plan.divisor == 0.0 else RedOp.SUM
    return combining(plan.redop)


def combining(redop: RedOp) -> RedOp:
    """The operator that partial results are combined with (hx_combining)."""
    return RedOp.SUM if redop in (RedOp.AVG, RedOp.PREMUL_SUM) else redop


def _signature(a: _Arrival) -> str:
    step = a.step
    redop = f" {vendor_operator(a.rank.plan).label}" if step.kind in REDUCING else ""
    return (
        f"{step.kind.name.lower()}{redop} of {a.n} elements"
        + (" as bytes" if step.as_bytes else "")
        + (f" with root {step.root}" if step.kind in ROOTED else "")
        + (f" on group {step.group}" if step.group else "")
        + (f" to {step.to}" if step.kind == StepKind.TRANSFER else "")
        + (f" in group {step.group}" if step.group else "")
    )


def _blame(a: _Arrival, run: Any) -> Any:
    """The fault is that of the rank whose memory it is, not of the last to come."""
    try:
        return run()
    except Fault as fault:
        raise Fault(f"{a.proc.where}: {fault}") from None
