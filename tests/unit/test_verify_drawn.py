# SPDX-License-Identifier: Apache-2.0
"""Hypothesis draws topologies, operations and counts: the verifier accepts every plan of the present algorithms, and
so does the reference interpreter."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hetccl.core.algorithms.all_reduce_star import MOST_SPOKES
from hetccl.core.algorithms.common import Shared
from hetccl.core.planner import ALGORITHMS
from hetccl.core.topology import Topology
from hetccl.core.verify import verify_class, verify_plans
from hetccl.core.verify.checker import shrink
from hetccl.core.verify.spec import spec_of
from hetccl.types import DType, Op, RedOp

sys.path.insert(0, os.path.dirname(__file__))
from verify_cases import REDUCING, ROOTED, UNEVEN, algorithms, by_border, places_of, plans, starry, topology
from verify_oracle import judge

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@st.composite
def topologies(draw: st.DrawFn, most: int = 8, ranks: int = 24) -> Topology:
    """Up to 8 islands of 1 to 5 ranks, of which none need be neighbours; host and device memory; libraries that can
    reduce or only move bytes."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=most).filter(lambda s: sum(s) <= ranks))
    order = list(range(sum(sizes)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    islands, at = [], 0
    for size in sizes:
        islands.append(order[at : at + size])
        at += size
    if len(sizes) > 1 and sum(sizes[1:]) <= MOST_SPOKES and draw(st.booleans()):
        return starry(islands[0], islands[1:], poor=sorted(draw(st.sets(st.integers(0, len(sizes) - 1)))))
    some = st.sets(st.integers(0, len(sizes) - 1))
    return topology(islands, *(sorted(draw(some)) for _ in range(2)), 1 << 20, *(sorted(draw(some)) for _ in range(2)))


@st.composite
def cases(draw: st.DrawFn, most: int = 8, ranks: int = 24) -> tuple[Topology, Shared, str, int]:
    """(topology, class, algorithm, count)"""
    top = draw(topologies(most, ranks))
    op = draw(st.sampled_from(sorted(ALGORITHMS)))
    operators = (RedOp.SUM, RedOp.AVG, RedOp.MAX, RedOp.PROD, RedOp.PREMUL_SUM) if op in REDUCING else (RedOp.SUM,)
    redop = draw(st.sampled_from(operators))
    dtype = draw(st.sampled_from((DType.FLOAT32, DType.FLOAT16, DType.INT32)))
    root = draw(st.integers(0, top.size - 1)) if op in ROOTED else 0
    algorithm = draw(st.sampled_from(algorithms(op, top)))
    counts: tuple[int, ...] = ()
    if op in UNEVEN and draw(st.booleans()):
        n = top.size**2 if op == Op.ALL_TO_ALL else top.size
        some = draw(st.lists(st.integers(0, 40), min_size=1, max_size=min(n, 24)))
        counts = (max(max(some), 1), *(some * n)[: n - 1])
    shared = Shared(op, dtype, redop, root, counts=counts)
    if op in REDUCING and draw(st.booleans()) and by_border(top, shared, algorithm):
        algorithm += "+border"
    return top, shared, algorithm, draw(st.integers(0, 20000))


@pytest.mark.timeout(900)
def test_all_plans_are_accepted(full: bool) -> None:
    @settings(max_examples=1500 if full else 60, deadline=None, suppress_health_check=QUIET, derandomize=not full)
    @given(cases(), st.integers(1, 4))
    @example((topology([[0, 1], [2, 3]]), Shared(Op.ALL_REDUCE, DType.FLOAT16, RedOp.AVG), "owners", 0), 1)
    def accepted(case: tuple[Topology, Shared, str, int], slots: int) -> None:
        top, shared, algorithm, count = case
        found = plans(top, shared, algorithm)
        verify_class(top, shared, found, slots=slots, few=3 if top.size > 12 else 0, places=places_of(top, shared))
        if not shared.counts:
            verify_plans(top, shared, shrink(found), count % (64 * found[0].units), slots=slots)

    accepted()


@pytest.mark.timeout(900)
def test_the_reference_interpreter_agrees(full: bool) -> None:
    @settings(max_examples=300 if full else 30, deadline=None, suppress_health_check=QUIET, derandomize=not full)
    @given(cases(4, 10), st.integers(0, 1000), st.booleans())
    def agrees(case: tuple[Topology, Shared, str, int], seed: int, in_place: bool) -> None:
        top, shared, algorithm, count = case
        found = shrink(plans(top, shared, algorithm))
        in_place = in_place and spec_of(shared.op).in_place is not None
        count = 1 if shared.counts else count % 1500
        judge(top, shared, found, count, seed, in_place=in_place, chunk=max(1, count // 12), slots=1 + seed % 3)

    agrees()
