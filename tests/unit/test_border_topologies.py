# SPDX-License-Identifier: Apache-2.0
"""Who carries what between islands: shares, carriers, trees; and the verifier accepts the plans of every operation on
topologies with limited borders, missing links and unequal speeds."""

from __future__ import annotations

import itertools
import os
import random
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from test_border_plans import topology as drawn
from verify_cases import REDUCING, ROOTED, UNEVEN, places_of, ragged

from hetccl.core.algorithms.common import Shared
from hetccl.core.border import OWNER_PARTS, Border, owner_shares, parts_of
from hetccl.core.planner import ALGORITHMS, Planner
from hetccl.core.topology import Topology
from hetccl.core.topology_file import parse_topology
from hetccl.core.verify import verify_class
from hetccl.types import DType, Op, RedOp

ROW = """
islands:
 a: {vendor: x, ranks: 4, border: 2, rails: [3GB/s, 1GB/s]}
 b: {vendor: x, ranks: 3, memory: host}
 c: {vendor: x, ranks: 1, memory: host}
links:
 - {between: [a, c], rate: none}
"""


def border(text: str) -> Border:
    return parse_topology(text).topology().border


def star(n: int, centre: int) -> Topology:
    islands = "".join(f"\n i{i}: {{vendor: x, ranks: 1}}" for i in range(n))
    apart = [(a, b) for a, b in itertools.combinations(range(n), 2) if centre not in (a, b)]
    links = "".join(f"\n - {{between: [i{a}, i{b}], rate: none}}" for a, b in apart)
    return parse_topology(f"islands:{islands}\nlinks:{links}").topology()


# ---- shares


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ((1.0, 1.0, 1.0), (1, 1, 1)),
        ((5.0, 1.0), (1, 1)),  # of two islands each has S each way, whoever owns what
        ((0.0, 5.0, 1.0), (1, 1, 1)),  # one is not known
        ((4.0, 2.0, 1.0), (32, 0, 0)),  # t = 1/2: the fastest owns all, and no border takes longer than its own
        ((2.0, 2.0, 1.0), (16, 16, 0)),
        ((3.0, 3.0, 3.0, 2.0), (10, 10, 10, 2)),
    ],
)
def test_shares_of_owners(rates: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert owner_shares(rates) == shares


def test_no_shares_would_be_done_sooner() -> None:
    """The slowest border needs S (1 + (C-2) w) / B; no other division of the same grain has less."""
    draw = random.Random(1)
    for _ in range(30):
        n = draw.randint(3, 4)
        rates = [draw.choice((1.0, 2.0, 3.0, 10.0)) for _ in range(n)]
        found = owner_shares(rates)

        def slowest(parts: tuple[int, ...], rates: list[float] = rates, n: int = n) -> float:
            return max((1 + (n - 2) * p / sum(parts)) / b for p, b in zip(parts, rates, strict=True))

        coarse = 8
        others = [p for p in itertools.product(range(coarse + 1), repeat=n) if sum(p) == coarse]
        assert slowest(found) <= min(map(slowest, others)) * (1 + 2 / OWNER_PARTS)


def test_shards_follow_the_speeds() -> None:
    assert parts_of((), 3, 24) == [1, 1, 1]
    assert parts_of((2.0, 2.0), 2, 16) == [1, 1]
    assert parts_of((30.0, 10.0), 2, 16) == [12, 4]
    assert parts_of((1000.0, 1.0), 2, 16)[1] == 1  # nobody at the border has nothing to do
    b = border(ROW)
    cuts = b.cuts(0)
    assert (cuts[1] - cuts[0]) / (cuts[2] - cuts[1]) == 3
    assert not b.even(0) and b.even(1)
    assert b.head(0) == 0


def test_pieces_cover_all_units_once() -> None:
    draw = random.Random(2)
    for _ in range(100):
        top = drawn(draw, 6)
        b = top.border
        at = 0
        for lo, hi, holders in b.pieces():
            assert lo == at < hi
            at = hi
            assert [top.place(r)[0] for r in holders] == list(range(len(top.islands)))
            assert all(b.at_border(r) for r in holders)
            assert all(b.linked(p, q) for p, q in itertools.combinations(holders, 2) if direct(top, p, q))
            parts = b.owned(lo, hi)
            assert parts[0][1] == lo and parts[-1][2] == hi
            assert all((h - w) * sum(b.owners) == (hi - lo) * b.owners[o] for o, w, h in parts)
        assert at == b.units


def direct(top: Topology, p: int, q: int) -> bool:
    return top.direct(top.place(p)[0], top.place(q)[0])


# ---- carriers and trees


def test_carriers_of_a_rank_are_linked_along_its_tree() -> None:
    draw = random.Random(3)
    for _ in range(150):
        top = drawn(draw, 7)
        b = top.border
        for rank in range(top.size):
            home = top.place(rank)[0]
            assert b.carrier(home, rank) == (rank if b.at_border(rank) else b.representative(rank))
            for island in range(len(top.islands)):
                if island != home:
                    up = b.parent(island, home)
                    assert top.direct(island, up)
                    assert b.linked(b.carrier(island, rank), b.carrier(up, rank))


def test_paths_lead_over_links() -> None:
    draw = random.Random(4)
    for _ in range(80):
        top = drawn(draw, 6)
        b = top.border
        for p, q in itertools.permutations(range(top.size), 2):
            if top.place(p)[0] == top.place(q)[0]:
                continue
            for path in (b.path(p, q), b.pair_path(p, q)):
                assert all(b.linked(x, y) for x, y in itertools.pairwise(path))
                assert (top.place(path[0])[0], top.place(path[-1])[0]) == (top.place(p)[0], top.place(q)[0])
                assert len(path) - 1 == b.hops(top.place(p)[0], top.place(q)[0])


def test_links_grow_with_ranks_and_not_with_their_square() -> None:
    text = "islands:" + "".join(f"\n i{c}: {{vendor: x, ranks: 64}}" for c in range(2))
    top = parse_topology(text).topology()
    assert len(top.border_pairs()) <= 3 * 64
    text = text.replace("ranks: 64", "ranks: 64, border: 2")
    assert len(parse_topology(text).topology().border_pairs()) <= 4


def test_hops_are_shortest() -> None:
    draw = random.Random(5)
    for _ in range(50):
        top = drawn(draw, 7)
        n = len(top.islands)
        far = {(a, b): 0 if a == b else 1 if top.direct(a, b) else n for a in range(n) for b in range(n)}
        for via, a, b in itertools.product(range(n), repeat=3):
            far[a, b] = min(far[a, b], far[a, via] + far[via, b])
        assert all(top.border.hops(a, b) == far[a, b] for a in range(n) for b in range(n))


def test_chains_branch_as_little_as_can_be() -> None:
    draw = random.Random(6)
    for _ in range(60):
        top = drawn(draw, 5)
        n = len(top.islands)
        for root in range(n):
            parents = top.border.chain(root)
            assert parents[root] == -1 and most(parents) == min(map(most, spanning_trees(top, root)), default=0)


def most(parents: list[int]) -> int:
    return max((parents.count(c) for c in range(len(parents))), default=0)


def spanning_trees(top: Topology, root: int) -> list[list[int]]:
    n = len(top.islands)
    choices = [[-1] if c == root else [u for u in range(n) if u != c and top.direct(c, u)] for c in range(n)]
    found = []
    for parents in itertools.product(*choices):
        ends = []
        for c in range(n):
            steps = 0
            while c != root and steps <= n:
                c, steps = parents[c], steps + 1
            ends.append(c == root)
        if all(ends):
            found.append(list(parents))
    return found


def test_the_middle_of_a_star_is_its_centre() -> None:
    for centre in (0, 3, 6):
        b = star(7, centre).border
        assert b.middle == centre and not b.mesh
        assert [b.parent(c, 1) for c in range(7) if c not in (1, centre)] == [centre] * len({*range(7)} - {1, centre})


# ---- plans


@pytest.mark.timeout(1800)
def test_the_verifier_accepts_plans_of_every_operation(full: bool) -> None:
    draw, proofs = random.Random(7 if not full else None), 0
    ops = itertools.cycle(ALGORITHMS)
    while proofs < (3000 if full else 80):
        top = drawn(draw, draw.randint(2, 8))
        if top.size > 12 or top.border.plain or len(top.islands) == 1:
            continue
        op = next(ops)
        redop = draw.choice((RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM)) if op in REDUCING else RedOp.SUM
        root = draw.randrange(top.size) if op in ROOTED else 0
        shared = Shared(op, draw.choice((DType.FLOAT32, DType.FLOAT16)), redop, root)
        if op in UNEVEN and draw.random() < 0.5:
            shared = ragged(shared, top.size, proofs)
        names = Planner(top, 0, {}).selector.candidates(op)
        assert names
        for name in names:
            places = places_of(top, shared)
            made = [ALGORITHMS[op][name](top, shared, r, places[r] if places else None) for r in range(top.size)]
            verify_class(top, shared, made, few=True, places=places)
            proofs += 1


def test_partials_of_islands_of_one_do_not_overwrite_the_input() -> None:
    """Found on real ranks: the island in the middle combined in its caller's input."""
    top, shared = star(3, 2), Shared(Op.REDUCE_SCATTER, DType.INT32, RedOp.SUM)
    verify_class(top, shared, [ALGORITHMS[shared.op]["direct"](top, shared, r, None) for r in range(3)])
