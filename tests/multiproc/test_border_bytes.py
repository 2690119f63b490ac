# SPDX-License-Identifier: Apache-2.0
"""Every operation on real ranks over topologies of all kinds: right bit for bit, and the transports' own counters say
that as many bytes crossed between islands as the bounds allow, in all and through each island.

A few topologies run always; HETCCL_TEST_FULL=1 (`tox -e full`) draws many more, HETCCL_TEST_SEED repeats them.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import matrix
import uneven

import hetccl
from hetccl.core.algorithms.common import Shared
from hetccl.core.plan import Plan
from hetccl.core.topology import Topology
from hetccl.core.topology_file import parse_topology
from hetccl.core.verify.bounds import RELAYING, bound_of
from hetccl.core.verify.spec import Sizes
from hetccl.testing.launch import run
from hetccl.types import DType, Op, RedOp

SEED = int(os.environ.get("HETCCL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
DRAWN = 60
ROOTED = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
UNEVEN = (Op.REDUCE_SCATTER, *uneven.MOVING)
SMALL, LARGE = 37, 4096  # times the units of the topology: no tail, so that shares are exact

TOPOLOGIES = {
    "all at the border, 3 + 2": "a: {vendor: host, ranks: 3}\n b: {vendor: sim-a, ranks: 2}",
    "one at the border each, 3 + 2, dealt": """
 a: {vendor: host, ranks: [0, 2, 4], border: 1}
 b: {vendor: sim-a, ranks: [1, 3], border: [3]}""",
    "three islands in a row, rails 1 to 3": """
 a: {vendor: host, ranks: [0, 5], rails: [1GB/s, 3GB/s]}
 b: {vendor: sim-a, ranks: [1, 3, 4], border: 2, rails: [3GB/s, 2GB/s, 1GB/s]}
 c: {vendor: host, ranks: [2]}
links:
 - {between: [a, c], rate: none}""",
    "a star of five of one and two": """
 a: {vendor: host, ranks: 1}
 b: {vendor: host, ranks: 2, border: 1}
 c: {vendor: sim-a, ranks: 1}
 d: {vendor: sim-b, ranks: 2}
 hub: {vendor: host, ranks: 1}
links:"""
    + "".join(f"\n - {{between: [{p}, {q}], rate: none}}" for p, q in ("ab", "ac", "ad", "bc", "bd", "cd")),
    "eight islands of one, one link missing": "".join(f"\n {n}: {{vendor: host, ranks: 1}}" for n in "abcdefgh")
    + "\nlinks:\n - {between: [b, f], rate: none}",
    # a rank that had still to relay sat in a call of its island
    "six of twelve ranks, five links missing": """
 a: {vendor: sim-a, ranks: [1, 9], rails: [3GB/s, 2GB/s]}
 b: {vendor: host, ranks: [3, 4, 8, 10], border: 3}
 c: {vendor: sim-b, ranks: [11], border: 1}
 d: {vendor: sim-a, ranks: [2, 7], rails: [4GB/s, 4GB/s, 3GB/s]}
 e: {vendor: sim-a, ranks: [0, 5], border: 1}
 f: {vendor: sim-b, ranks: [6]}
links:"""
    + "".join(f"\n - {{between: [{p}, {q}], rate: none}}" for p, q in ("be", "ce", "af", "bf", "df")),
    "three, borders of 4, 2 and 1 GB/s": """
 a: {vendor: host, ranks: 2, measured: 4GB/s}
 b: {vendor: host, ranks: 1, measured: 2GB/s}
 c: {vendor: host, ranks: 2, measured: 1GB/s}""",
}


def draw(seed: int) -> str:
    """2 to 8 islands of 1 to 4 ranks, 12 at most, with limits and missing links."""
    d = random.Random(seed)
    sizes = [1]
    while sum(sizes) > 12 or len(sizes) < 2:
        sizes = [d.randint(1, 4) for _ in range(d.randint(2, 8))]
    order = list(range(sum(sizes)))
    if d.random() < 0.6:
        d.shuffle(order)
    lines, at = [], 0
    for i, n in enumerate(sizes):
        ranks = sorted(order[at : at + n])
        at += n
        keys = [f"vendor: {d.choice(('host', 'sim-a', 'sim-b'))}", f"ranks: {ranks}"]
        if d.random() < 0.5:
            keys.append(f"border: {d.randint(1, n)}")
        if d.random() < 0.4:
            keys.append(f"rails: [{', '.join(f'{d.randint(1, 5)}GB/s' for _ in range(d.randint(1, 4)))}]")
        lines.append(f" i{i}: {{{', '.join(keys)}}}")
    tree = {(d.randrange(c), c) for c in range(1, len(sizes))}
    missing = [(a, b) for b in range(len(sizes)) for a in range(b) if (a, b) not in tree and d.random() < 0.4]
    if missing and d.random() < 0.7:
        lines.append("links:")
        lines += [f" - {{between: [i{a}, i{b}], rate: none}}" for a, b in missing]
    return "\n".join(lines)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        drawn = {f"drawn {SEED + i}": draw(SEED + i) for i in range(DRAWN if metafunc.config.full else 0)}  # type: ignore[attr-defined]
        cases = {**TOPOLOGIES, **drawn}
        metafunc.parametrize("case", cases.values(), ids=cases.keys())


def cells(units: int) -> list[matrix.Cell]:
    """Both classes of all_reduce by size; all others."""
    wide = LARGE * max(1, 64 // units) * units
    found = [matrix.Cell(Op.ALL_REDUCE, DType.FLOAT32, RedOp.SUM, count) for count in (units, wide)]
    found += [matrix.Cell(op, DType.INT32, RedOp.SUM, SMALL) for op in (Op.REDUCE_SCATTER, Op.REDUCE, *matrix.MOVING)]
    found.append(matrix.Cell(Op.REDUCE_SCATTER, DType.BFLOAT16, RedOp.MAX, 3))
    found.append(matrix.Cell(Op.REDUCE, DType.FLOAT16, RedOp.AVG, 5))
    return found + [matrix.Cell(op, DType.INT32, RedOp.SUM, SMALL, True) for op in UNEVEN]


def body(rank: int, size: int) -> tuple[dict[str, Any], list[tuple[str, str]], list[dict[int, int]]]:
    """(topology, algorithm and class of each cell, what this rank sent to each peer in it)"""
    with hetccl.init() as comm:
        topology = comm._topology
        sent, chosen = [], []
        for cell in cells(topology.border.units):
            before = comm.stats()["peer_bytes"]
            if cell.uneven:
                fault = uneven.run_cell(comm, cell.op, cell.dtype, cell.redop, cell.count, rank, size, True)
            else:
                fault = matrix.run_cell(comm, cell, rank, size, False, False)
            assert not fault, fault
            after = comm.stats()["peer_bytes"]
            sent.append({peer: n - before.get(peer, 0) for peer, n in after.items() if n != before.get(peer, 0)})
            if rank == 0:
                shared = class_of(topology, cell)
                e = comm.explain(
                    cell.op.label, cell.count * cell.dtype.itemsize, cell.dtype, cell.redop, shared.root, shared.counts
                )
                assert e.border_bytes == e.border_bound
                chosen.append((e.algorithm, e.plan_class))
        return topology.to_json(), chosen, sent


@pytest.mark.timeout(300)
def test_bytes_between_islands_equal_the_bounds(case: str, tmp_path: Path) -> None:
    path = tmp_path / "hetccl.yaml"
    path.write_text(f"islands:\n {case.strip()}\n")
    file = parse_topology(path.read_text(), str(path))
    env = {"HETCCL_TOPOLOGY": str(path), "HETCCL_VERIFY": "off"}  # proved in tests/unit/test_border_topologies.py
    results = run(body, file.size, timeout=240, env=env)
    topology = Topology.from_json(results[0][0])
    assert [i.borders for i in topology.islands] == [i.borders for i in file.topology().islands]
    for number, cell in enumerate(cells(topology.border.units)):
        check(topology, cell, results[0][1][number], [sent[number] for _, _, sent in results])


def check(topology: Topology, cell: matrix.Cell, chosen: tuple[str, str], sent: list[dict[int, int]]) -> None:
    out = {i.index: 0 for i in topology.islands}
    into = dict(out)
    for rank, peers in enumerate(sent):
        for peer, n in peers.items():
            assert topology.linked(rank, peer), f"{cell}: rank {rank} sent to rank {peer}"
            out[topology.place(rank)[0]] += n
            into[topology.place(peer)[0]] += n
    total, bound = sum(out.values()), bounds(topology, cell, chosen)
    size = cell.dtype.itemsize
    assert total == bound.total * size, f"{cell}: {total} bytes, bound {bound.total * size}"
    for way, found, allowed in (("leave", out, bound.out), ("enter", into, bound.into)):
        for island, most in allowed.items():
            text = f"{cell} by {chosen[0]}: {found[island]} bytes {way} island {island}, bound {most * size}"
            if cell.op in (Op.BROADCAST, Op.REDUCE) or chosen[0] in RELAYING:  # the ends of a chain have less to do
                assert found[island] <= most * size, text
            else:
                assert found[island] == most * size, text


def class_of(topology: Topology, cell: matrix.Cell) -> Shared:
    n = topology.size
    root = (cell.count + int(cell.dtype)) % n if cell.op in ROOTED else 0
    counts: tuple[int, ...] = ()
    if cell.uneven and cell.op == Op.ALL_TO_ALL:
        counts = tuple(cell.count * ((i + 2 * j) % 3) // 2 for i in range(n) for j in range(n))
    elif cell.uneven:
        counts = tuple(cell.count * (r * 3 % 4) // 2 + r % 2 for r in range(n))
    return Shared(cell.op, cell.dtype, cell.redop, root, counts=counts)


def bounds(topology: Topology, cell: matrix.Cell, chosen: tuple[str, str]) -> Any:
    """Elements, in all and through each island, for the class that was chosen."""
    shared, border = class_of(topology, cell), topology.border
    plan = Plan(cell.op, cell.dtype, cell.redop, shared.root, 0, *chosen, border.units, 0, (), ())
    count = 1 if shared.counts else cell.count
    owned = {i: count * part // sum(border.owners) for i, part in enumerate(border.owners)}
    return bound_of(topology, plan, Sizes(shared, topology.size, count), owned)


def test_a_byte_too_many_would_be_seen() -> None:
    topology = parse_topology("islands:\n a: {vendor: host, ranks: 1}\n b: {vendor: host, ranks: 1}").topology()
    cell = matrix.Cell(Op.BROADCAST, DType.INT32, RedOp.SUM, 10)
    root = (10 + int(DType.INT32)) % 2
    right: list[dict[int, int]] = [{}, {}]
    right[root] = {1 - root: 40}
    check(topology, cell, ("chain", "bandwidth"), right)
    for wrong in ({1 - root: 41}, {1 - root: 36}, {}):
        right[root] = wrong
        with pytest.raises(AssertionError):
            check(topology, cell, ("chain", "bandwidth"), right)
