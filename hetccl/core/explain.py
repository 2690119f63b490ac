# SPDX-License-Identifier: Apache-2.0
"""What an operation would do: islands, paths, algorithm, steps, and the bytes that cross the border against their
bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetccl.core.plan import FlowKind, Plan, StepKind
from hetccl.core.topology import Topology
from hetccl.types import Op

__all__ = ["Explanation", "border_bound", "describe_steps"]


@dataclass(frozen=True)
class Explanation:
    """`str()` gives it as text. Bytes are of one operation, summed over all ranks, headers not counted."""

    op: str
    nbytes: int
    dtype: str
    redop: str
    algorithm: str
    plan_class: str
    combined_by: str
    islands: list[str]
    paths: dict[tuple[int, int], str]
    steps: list[str]
    segments: int
    border_bytes: int
    border_bound: int
    staged: bool = False
    borders: list[str] = field(default_factory=list)  # of each island: who is at the border, and why
    relays: list[str] = field(default_factory=list)  # pairs of islands that others connect
    through: list[str] = field(default_factory=list)  # of each island: bytes out and in, and the most allowed
    notes: list[str] = field(default_factory=list)
    proof: str = ""  # whether the plan is proved before it runs, how, or why not
    trace: str = ""  # whether the executor's trace is held against it
    plan_cache: tuple[int, int] = (0, 0)  # plans that this communicator found ready, and plans that it made

    def __str__(self) -> str:
        lines = [f"{self.op} of {self.nbytes} bytes, {self.dtype}" + (f", {self.redop}" if self.redop else "")]
        lines += [f"  island {i}: {text}" for i, text in enumerate(self.islands)]
        lines += [f"  border of island {i}: {text}" for i, text in enumerate(self.borders)]
        lines += [f"  relayed: {text}" for text in self.relays]
        lines += [f"  path {a} - {b}: {path}" for (a, b), path in sorted(self.paths.items())]
        lines.append(f"  algorithm: {self.algorithm} ({self.plan_class} class), {self.segments} segment(s)")
        lines.append(f"  combined by: {self.combined_by}" + (", caller's host memory is staged" if self.staged else ""))
        lines += [f"  step: {step}" for step in self.steps]
        lines += [f"  {what}: {text}" for what, text in (("proved", self.proof), ("traced", self.trace)) if text]
        lines.append(f"  plan cache: {self.plan_cache[0]} hits, {self.plan_cache[1]} misses so far")
        share = f" ({self.border_bytes / self.border_bound:.2f} of it)" if self.border_bound else ""
        lines.append(f"  border bytes: {self.border_bytes}, bound of this class: {self.border_bound}{share}")
        lines += [f"  through island {i}: {text}" for i, text in enumerate(self.through)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def border_bound(
    topology: Topology, op: Op, plan_class: str, count: int, itemsize: int, root: int = 0, counts: Sequence[int] = ()
) -> int:
    """Least bytes that must leave the islands, all together (docs/design/plans.md). `count` as in
    `Communicator.run`; `counts` are the blocks' lengths of the v forms (all_to_all: of pair i, j at i * n + j)."""
    c, n = len(topology.islands), topology.size
    if c == 1:
        return 0
    nbytes = count * itemsize
    if op == Op.ALL_REDUCE:
        if plan_class == "star":  # each rank in host memory sends and gets everything
            return 2 * nbytes * sum(i.size for i in topology.islands if i.host_memory)
        exchanged = plan_class == "latency" and topology.border.mesh
        return c * (c - 1) * nbytes if exchanged else 2 * (c - 1) * nbytes
    if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        return (c - 1) * (sum(counts) * itemsize if counts else n * nbytes)
    if op in (Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL):  # a block counts once a link on its way
        island = [topology.place(r)[0] for r in range(n)]
        hops = topology.border.hops
        if op != Op.ALL_TO_ALL:
            return sum(hops(island[r], island[root]) * (counts[r] if counts else count) * itemsize for r in range(n))
        if counts:
            pairs = ((i, j) for i in range(n) for j in range(n))
            return sum(hops(island[i], island[j]) * counts[i * n + j] * itemsize for i, j in pairs)
        ways = ((a, b) for a in topology.islands for b in topology.islands)
        return sum(a.size * b.size * hops(a.index, b.index) for a, b in ways) * nbytes
    return (c - 1) * nbytes


def describe_steps(plan: Plan) -> list[str]:
    """One line a step, as this rank runs them."""
    lines = []
    for step in plan.steps:
        if step.kind != StepKind.FLOWS:
            name = step.kind.name.lower()
            where = f" to island rank {step.root}" if step.kind == StepKind.REDUCE else ""
            where = f" from island rank {step.root}" if step.kind == StepKind.BROADCAST else where
            where = f" from island rank {step.root} to {step.to}" if step.kind == StepKind.TRANSFER else where
            by = "vendor " if step.kind.is_call else "local "
            lines.append(by + name + where + (" (moved as bytes)" if step.as_bytes else ""))
            continue
        for flow in plan.flows[step.first_flow : step.first_flow + step.n_flows]:
            peers = ", ".join(map(str, flow.peers))
            text = {
                FlowKind.SEND: f"send to rank {peers}",
                FlowKind.RECV: f"receive from rank {peers}",
                FlowKind.FORWARD: f"receive from rank {flow.peers[0]}, forward to {flow.peers[-1]}",
                FlowKind.OWN: f"combine with contributions of ranks {peers}"
                + (", return the result" if flow.give_back else ""),
                FlowKind.PASS: f"combine with ranks {', '.join(map(str, flow.peers[:-1]))}, pass to {flow.peers[-1]}",
                FlowKind.EXCHANGE: f"exchange with ranks {peers} and combine alike",
            }[flow.kind]
            lines.append("border " + text)
    return lines
