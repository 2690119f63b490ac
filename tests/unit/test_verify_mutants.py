# SPDX-License-Identifier: Apache-2.0
"""The verifier is shown to find faults: random mutants of valid plans are refused, and each that is not is shown to be
equivalent, by its normal form or by 50 runs of the reference interpreter with the right outputs and border elements.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from hetccl.core.algorithms.common import Shared
from hetccl.core.plan import Plan
from hetccl.core.topology import Topology
from hetccl.core.verify import PlanFault, representative_counts, verify_class
from hetccl.core.verify.checker import shrink
from hetccl.core.verify.reference import Stuck
from hetccl.core.verify.spec import spec_of
from hetccl.types import RedOp

sys.path.insert(0, os.path.dirname(__file__))
from verify_cases import classes, places_of, plans, topology
from verify_mutants import mutate, normal_form
from verify_oracle import judge

TOPOLOGIES = {
    "2": topology([[0, 1]]),
    "1+1": topology([[0], [1]]),
    "2+2": topology([[0, 1], [2, 3]]),
    "2+2 mixed": topology([[0, 2], [1, 3]]),
    "2+1+1": topology([[0, 1], [2], [3]]),
    "3+2 device": topology([[0, 1, 2], [3, 4]], device=[0]),
    "2+1 devices": topology([[0, 1], [2]], device=[0, 1]),
    "2+2 poor": topology([[0, 1], [2, 3]], device=[0], poor=[0, 1]),
    "3 poor": topology([[0, 1, 2]], poor=[0]),
    "3+2 lacking": topology([[0, 2, 3], [1, 4]], device=[1], lacking=[0, 1], plain=[1]),
}
SAMPLE, ALL = 320, 2400
RUNS = 50


@pytest.mark.timeout(1800)
def test_mutants_are_refused_or_equivalent(full: bool) -> None:
    draw = random.Random(20260)
    cases = [(name, shared, algorithm) for name, top in TOPOLOGIES.items() for shared, algorithm in
             classes(top, (RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM))]  # fmt: skip
    verdicts: Counter[str] = Counter()
    unexplained = []
    for number in range(ALL if full else SAMPLE):
        name, shared, algorithm = draw.choice(cases)
        top = TOPOLOGIES[name]
        original = shrink(plans(top, shared, algorithm))
        what, mutant = mutate(original, draw)
        try:
            verify_class(top, shared, mutant, places=places_of(top, shared))
        except PlanFault:
            verdicts["refused"] += 1
            continue
        why = explain(top, shared, original, mutant)
        verdicts[why.split(":")[0]] += 1
        which = f"{name}, {shared.op.label} {shared.redop.label} root {shared.root} by {algorithm}"
        print(f"survivor {number}: {which}: {what}: {why}")
        if why.startswith("unexplained"):
            unexplained.append(f"{number}: {name} {shared.op.label} {algorithm} {what}: {why}")
    total = sum(verdicts.values())
    print(f"{total} mutants: " + ", ".join(f"{n} {k}" for k, n in verdicts.most_common()))
    assert len(unexplained) <= total // 20, unexplained
    assert verdicts["refused"] > total * 0.7
    assert not any("finds a fault" in text for text in unexplained), unexplained


def explain(top: Topology, shared: Shared, original: Sequence[Plan], mutant: Sequence[Plan]) -> str:
    """Why a mutant that the verifier accepts is right."""
    places = [top.place(p.rank)[1] for p in original]
    if all(normal_form(a, i) == normal_form(b, i) for a, b, i in zip(original, mutant, places, strict=True)):
        return "same normal form"
    counts = [1] if shared.counts else [c for c in representative_counts(original[0]) if c]
    border = {}
    for seed in range(RUNS):
        count = counts[-1 - seed % len(counts)]
        in_place = spec_of(shared.op).in_place is not None and seed // len(counts) % 2 == 1
        chunk = max(2, count // 16)
        try:
            ran = judge(top, shared, mutant, count, seed, in_place=in_place, chunk=chunk, slots=1 + seed % 2)
        except (AssertionError, Stuck) as error:
            return f"unexplained: the interpreter finds a fault that the verifier does not (seed {seed}): {error}"
        if count not in border:
            border[count] = judge(top, shared, original, count, 0, chunk=chunk).sent
        if ran.sent != border[count]:
            return f"unexplained: other border elements, {ran.sent} for {border[count]}"
    return f"{RUNS} runs equal"
