# SPDX-License-Identifier: Apache-2.0
"""Random mutants of valid plans, and the normal form by which some are seen to be the same plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetccl.core.plan import NO_SLICE, Buffer, Channel, Flow, FlowKind, Lane, Plan, Slice, Step, StepKind
from hetccl.core.verify.flows import COMBINING, flow_clash
from hetccl.core.verify.island import ROOTED, VENDOR
from hetccl.core.verify.machine import on_host
from hetccl.types import RedOp


@dataclass
class Loose:
    """A step with its flows, and whom it waits for, free to be moved."""

    step: Step
    flows: list[Flow]
    wait: Loose | None = None


def loosen(plan: Plan) -> list[Loose]:
    loose = [Loose(s, list(plan.flows[s.first_flow : s.first_flow + s.n_flows])) for s in plan.steps]
    for one, s in zip(loose, plan.steps, strict=True):
        one.wait = loose[s.wait] if s.wait >= 0 else None
    return loose


def tighten(plan: Plan, loose: Sequence[Loose]) -> Plan:
    number = {id(one): i for i, one in reversed(list(enumerate(loose)))}
    steps, flows = [], []
    for one in loose:
        wait = number.get(id(one.wait), -1)
        steps.append(replace(one.step, wait=wait, first_flow=len(flows) if one.flows else 0, n_flows=len(one.flows)))
        flows += one.flows
    return replace(plan, steps=tuple(steps), flows=tuple(flows))


def mutate(plans: Sequence[Plan], draw: random.Random) -> tuple[str, list[Plan]]:
    """One random change to one rank's plan: what it is, and all plans."""
    while True:
        rank = draw.choice([p.rank for p in plans if p.steps])
        name = draw.choice(list(MUTATIONS))
        loose = loosen(plans[rank])
        what = MUTATIONS[name](plans[rank], loose, draw, len(plans))
        if not what:
            continue
        head = what if isinstance(what, Plan) else plans[rank]
        changed = tighten(head, loose)
        if changed != plans[rank]:
            text = name if isinstance(what, Plan) else f"{name} {what}"
            return f"rank {rank}: {text}", [changed if p.rank == rank else p for p in plans]


def _pick_flow(loose: list[Loose], draw: random.Random) -> tuple[Loose, int] | None:
    all_flows = [(one, i) for one in loose for i in range(len(one.flows))]
    return draw.choice(all_flows) if all_flows else None


def drop(plan: Plan, loose: list[Loose], draw: random.Random, n: int) -> Any:
    found = _pick_flow(loose, draw)
    if found and draw.random() < 0.5:
        one, i = found
        return f"flow {_show(one.flows.pop(i))}"
    return f"step {loose.pop(draw.randrange(len(loose))).step.kind.name}"


def duplicate(plan: Plan, loose: list[Loose], draw: random.Random, n: int) -> Any:
    found = _pick_flow(loose, draw)
    if found and draw.random() < 0.5:
        one, i = found
        one.flows.insert(draw.randint(0, len(one.flows)), one.flows[i])
        return f"flow {_show(one.flows[i])}"
    one = draw.choice(loose)
    loose.insert(draw.randint(0, len(loose)), Loose(one.step, list(one.flows), one.wait))
    return f"step {one.step.kind.name}"


def swap(plan: Plan, loose: list[Loose], draw: random.Random, n: int) -> Any:
    found = _pick_flow(loose, draw)
    if found and len(found[0].flows) > 1 and draw.random() < 0.5:
        flows = found[0].flows
        i, j = draw.sample(range(len(flows)), 2)
        flows[i], flows[j] = flows[j], flows[i]
        return f"flows {_show(flows[i])} and {_show(flows[j])}"
    if len(loose) < 2:
        return None
    i, j = draw.sample(range(len(loose)), 2)
    loose[i], loose[j] = loose[j], loose[i]
    return f"steps {i} {loose[j].step.kind.name} and {j} {loose[i].step.kind.name}"


def reorder(plan: Plan, loose: list[Loose], draw: random.Random, n: int) -> Any:
    if draw.random() < 0.5:
        one = loose.pop(draw.randrange(len(loose)))
        to = draw.randint(0, len(loose))
        loose.insert(to, one)
        return f"step {one.step.kind.name} moved to {to}"
    one = draw.choice(loose)
    if draw.random() < 0.5:
        one.step = replace(one.step, lane=Lane(1 - one.step.lane))
        return f"step {one.step.kind.name} to lane {one.step.lane.name}"
    one.step = replace(one.step, shift=draw.choice([s for s in (0, 1, 2) if s != one.step.shift]))
    return f"step {one.step.kind.name} to shift {one.step.shift}"


def shift_by_one(plan: Plan, loose: list[Loose], draw: random.Random, n: int) -> Any:
    """One element where a unit or the tail is one; else one unit, tail or block."""

    def moved(s: Slice) -> Slice:
        by = draw.choice((-1, 1))
        names = draw.choice((("a", "b"), ("a",), ("b",), ("at", "bt"), ("at",), ("bt",), ("block",)))
        return replace(s, **{name: getattr(s, name) + by for name in names})

    return _change_slice(loose, draw, moved)


def _change_slice(loose: list[Loose], draw: random.Random, change: Callable[[Slice], Slice]) -> Any:
    found = _pick_flow(loose, draw)
    if found and draw.random() < 0.5:
        one, i = found
        name = draw.choice([k for k in ("src", "dst") if getattr(one.flows[i], k) != NO_SLICE])
        new = change(getattr(one.flows[i], name))
        one.flows[i] = replace(one.flows[i], **{name: new})
        return f"{name} of flow {_show(one.flows[i])} to {new}"
    plain = [one for one in loose if one.step.kind != StepKind.FLOWS]
    if not plain:
        return None
    one = draw.choice(plain)
    names = ("src", "dst", "len") if one.step.kind in VENDOR else ("src", "dst")
    name = draw.choice([name for name in names if getattr(one.step, name) != NO_SLICE])
    new = change(getattr(one.step, name))
    one.step = replace(one.step, **{name: new})
    return f"{name} of step {one.step.kind.name} to {new}"


def retarget(plan: Plan, loose: list[Loose], draw: random.Random, n: int) -> Any:
    found = _pick_flow(loose, draw)
    rooted = [one for one in loose if one.step.kind in ROOTED]
    how = draw.random()
    if found and how < 0.5:
        one, i = found
        flow = one.flows[i]
        if draw.random() < 0.25:
            one.flows[i] = replace(flow, channel=Channel(1 - flow.channel))
            return f"flow {_show(flow)} to the other channel"
        peers = list(flow.peers)
        peers[draw.randrange(len(peers))] = draw.randrange(n)
        one.flows[i] = replace(flow, peers=tuple(peers))
        return f"flow {_show(flow)} to {peers}"
    if rooted and how < 0.75:
        one = draw.choice(rooted)
        if one.step.kind == StepKind.TRANSFER and draw.random() < 0.5:
            one.step = replace(one.step, to=draw.randrange(n))
            return f"end of TRANSFER to {one.step.to}"
        one.step = replace(one.step, root=draw.randrange(n))
        return f"root of {one.step.kind.name} to {one.step.root}"

    def elsewhere(s: Slice) -> Slice:
        return replace(s, buffer=draw.choice([int(b) for b in Buffer if b != s.buffer]))

    return _change_slice(loose, draw, elsewhere)


def operator(plan: Plan, loose: list[Loose], draw: random.Random, n: int) -> Any:
    found = _pick_flow(loose, draw)
    how = draw.random()
    if how < 0.1:
        return replace(plan, redop=draw.choice([r for r in (RedOp.SUM, RedOp.PROD, RedOp.MAX) if r != plan.redop]))
    if how < 0.2:
        return replace(plan, divisor=plan.divisor + 1.0, scale_divisor=plan.scale_divisor + draw.choice((0.0, 1.0)))
    if found and how < 0.6:
        one, i = found
        flow = one.flows[i]
        one.flows[i] = draw.choice(
            [
                replace(flow, position=draw.randint(0, len(flow.peers))),
                replace(flow, position=max(0, flow.position - 1)),
                replace(flow, give_back=not flow.give_back),
                replace(flow, finish=not flow.finish),
                replace(flow, kind=draw.choice([k for k in FlowKind if k != flow.kind])),
            ]
        )
        return f"flow {_show(flow)} to {_show(one.flows[i])}"
    plain = [one for one in loose if one.step.kind != StepKind.FLOWS]
    if not plain:
        return None
    one = draw.choice(plain)
    before = one.step.kind
    if draw.random() < 0.3:
        n_src = max(0, one.step.n_src + draw.choice((-1, 1)))
        stride = one.step.stride + draw.choice((-1, 0, 1))
        one.step = replace(one.step, n_src=n_src, stride=stride, as_bytes=not one.step.as_bytes)
    else:
        kinds = [k for k in StepKind if k not in (before, StepKind.FLOWS)]
        one.step = replace(one.step, kind=draw.choice(kinds))
    return f"step {before.name} to {one.step.kind.name}"


def change_wait(plan: Plan, loose: list[Loose], draw: random.Random, n: int) -> Any:
    one = draw.choice(loose)
    if one.wait is not None and draw.random() < 0.5:
        one.wait = None
    else:
        one.wait = draw.choice([other for other in (*loose, None) if other is not one.wait])
    return f"of {one.step.kind.name} to {one.wait.step.kind.name if one.wait else 'nothing'}"


MUTATIONS: dict[str, Callable[[Plan, list[Loose], random.Random, int], Any]] = {
    "drop": drop,
    "duplicate": duplicate,
    "swap": swap,
    "reorder": reorder,
    "shift": shift_by_one,
    "retarget": retarget,
    "operator": operator,
    "wait": change_wait,
}


def normal_form(plan: Plan, me: int) -> Any:
    """What the executor sees of a plan: its lanes, without fields that it does not read, without waits that change
    nothing, flows that do not wait for each other in one order. `me` is the rank's number in its island."""
    place = {i: (lane, k) for lane in Lane for k, i in enumerate(plan.lane(lane))}
    lanes = []
    for lane in Lane:
        steps = []
        for i in plan.lane(lane):
            s = plan.steps[i]
            wait: Any = place[s.wait] if s.wait >= 0 else None
            if wait and wait[0] == lane and wait[1] < place[i][1] and plan.steps[s.wait].shift >= s.shift:
                wait = None  # done anyway, unless it waits for a stream
                if on_host(plan, s):
                    wait = place[s.wait]
            steps.append((s.shift, wait, *_step_form(plan, s, me)))
        lanes.append(tuple(steps))
    head = replace(plan, steps=(), flows=(), divisor=1.0, scale_divisor=1.0)
    scales = plan.scale_divisor if any(s.kind == StepKind.SCALE for s in plan.steps) else 1.0
    finishes = plan.divisor if any(f.finish for f in plan.flows) or plan.divisor == 0.0 else 1.0
    return head, scales, finishes, tuple(lanes)


def _step_form(plan: Plan, s: Step, me: int) -> Any:
    if s.kind == StepKind.FLOWS:
        flows = plan.flows[s.first_flow : s.first_flow + s.n_flows]
        forms = [_flow_form(plan, f) for f in flows]
        free = not any(flow_clash(flows, a, b) for b in range(len(flows)) for a in range(b))
        return s.kind, tuple(sorted(forms, key=repr) if free else forms)
    if s.kind in VENDOR:
        length = (s.len.b - s.len.a, s.len.bt - s.len.at)
        ends = (s.root, s.to) if s.kind == StepKind.TRANSFER else (s.root, 0) if s.kind in ROOTED else (0, 0)
        src, dst = s.src, s.dst
        if s.kind == StepKind.TRANSFER:  # only its two ends have memory in it
            src, dst = (src if me == s.root else NO_SLICE), (dst if me == s.to else NO_SLICE)
        return s.kind, _start(src), _start(dst), length, ends, s.group
    if s.kind == StepKind.FILL:
        return s.kind, s.dst
    more = (s.n_src, s.stride if s.n_src > 1 else 0) if s.kind == StepKind.COMBINE else ()
    return s.kind, _start(s.src), s.dst, more  # as long as the target


def _flow_form(plan: Plan, f: Flow) -> Any:
    combines = f.kind in COMBINING
    src = f.src if f.kind == FlowKind.SEND or combines else None
    dst = f.dst if f.kind != FlowKind.SEND else None
    finish = combines and f.finish and plan.divisor != 1.0
    return (
        int(f.kind), int(f.channel), f.peers, src, dst, f.position if combines else 0,
        f.give_back if f.kind == FlowKind.OWN else False, finish,
    )  # fmt: skip


def _start(s: Slice) -> Any:
    return s.buffer, s.block, s.a, s.at


def _show(flow: Flow) -> str:
    return f"{flow.kind.name}{list(flow.peers)}"
