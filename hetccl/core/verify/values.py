# SPDX-License-Identifier: Apache-2.0
"""Symbolic values: what an interval of memory holds, as a term over the ranks' inputs.

A value is a pair (node, index). A node is a function of an index: node "input of rank r" at index i is element i of
that input; an operator node at index i combines its children, each at i plus that child's own offset. Equal terms are
one node, so two intervals hold the same bits if and only if their nodes and indices are equal. Stored content is a
list of (length, node, index of the first element).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hetccl.types import RedOp

__all__ = ["UNDEFINED", "UNSCALED", "Content", "Leaf", "Values", "cut", "merge"]

Content = list[tuple[int, int, int]]

UNDEFINED = -1  # a library may have scribbled here
UNSCALED, MISSCALED = -1, -2


class Leaf(NamedTuple):
    """One input in a value: element index + offset of rank's input, divided `inner` before and `outer` after the first
    combination. `averaged`: the vendor's library divided. `factor`: the rank whose own factor it was multiplied by
    before the first combination, UNSCALED, or MISSCALED (twice, or later)."""

    rank: int
    offset: int
    inner: float
    outer: float
    averaged: bool
    factor: int = UNSCALED


class Values:
    """The nodes of one verification."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Any, ...], int] = {}
        self._terms: list[tuple[Any, ...]] = []
        self._leaves: dict[int, tuple[Leaf, ...]] = {}
        self.made: dict[int, list[tuple[int, int, int]]] = {}  # combinations at the border: (index, length, rank)

    def input(self, rank: int) -> int:
        return self._node(("in", rank))

    def combined(self, redop: RedOp, parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Combined by hetccl's own code, which gives equal bits for equal parts in equal order."""
        return self._operator("op", redop, (), parts)

    def by_vendor(self, redop: RedOp, call: tuple[int, ...], parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Combined by a vendor's library: another call, even with the same parts, need not give the same bits."""
        return self._operator("vendor", redop, call, parts)

    def divided(self, divisor: float, value: tuple[int, int]) -> tuple[int, int]:
        return value if divisor == 1.0 else (self._node(("/", divisor, value[0])), value[1])

    def neutral(self, redop: RedOp) -> int:
        """What leaves the other side of an operator as it is."""
        return self._node(("neutral", redop))

    def scaled(self, rank: int, value: tuple[int, int]) -> tuple[int, int]:
        """Multiplied by a rank's own factor (premul_sum)."""
        return self._node(("*", rank, value[0])), value[1]

    def operators(self, node: int) -> set[RedOp]:
        """The operators in a term."""
        term = self._terms[node]
        if term[0] == "in":
            return set()
        if term[0] == "neutral":
            return {term[1]}
        if term[0] in ("/", "*"):
            return self.operators(term[2])
        return {term[1]}.union(*(self.operators(child) for child, _ in term[3]))

    def leaves(self, node: int) -> tuple[Leaf, ...]:
        """Every input in a term, as often as it stands there."""
        found = self._leaves.get(node)
        if found is None:
            found = self._leaves[node] = tuple(self._expand(self._terms[node]))
        return found

    def root_of(self, node: int) -> int:
        """The term below a final division."""
        term = self._terms[node]
        return int(term[2]) if term[0] == "/" else node

    def owners(self, node: int, index: int, length: int) -> dict[int, int]:
        """Ranks that combined [index, index + length) of a term at the border, and how many elements each."""
        found: dict[int, int] = {}
        for at, size, rank in self.made.get(self.root_of(node), ()):
            n = min(at + size, index + length) - max(at, index)
            if n > 0:
                found[rank] = found.get(rank, 0) + n
        return found

    def text(self, node: int, index: int = 0) -> str:
        """A term for people, e.g. 'sum(in0[5], in1[5])'."""
        if node == UNDEFINED:
            return "undefined"
        term = self._terms[node]
        if term[0] == "in":
            return f"in{term[1]}[{index}]"
        if term[0] == "neutral":
            return f"neutral of {term[1].label}"
        if term[0] == "/":
            return f"{self.text(term[2], index)}/{term[1]:g}"
        if term[0] == "*":
            return f"factor{term[1]}*{self.text(term[2], index)}"
        inside = ", ".join(self.text(child, index + offset) for child, offset in term[3])
        return f"{term[1].label}({inside})"

    def _operator(
        self, kind: str, redop: RedOp, call: tuple[int, ...], parts: Sequence[tuple[int, int]]
    ) -> tuple[int, int]:
        neutral = {node for node, _ in parts if node >= 0 and self._terms[node][0] == "neutral"}
        index = next((at for node, at in parts if node not in neutral), 0)
        children = tuple((node, 0 if node in neutral else at - index) for node, at in parts)
        return self._node((kind, redop, call, children)), index

    def _node(self, term: tuple[Any, ...]) -> int:
        found = self._ids.get(term)
        if found is None:
            found = self._ids[term] = len(self._terms)
            self._terms.append(term)
        return found

    def _expand(self, term: tuple[Any, ...]) -> Iterator[Leaf]:
        if term[0] == "in":
            yield Leaf(term[1], 0, 1.0, 1.0, False)
        elif term[0] == "neutral":
            return
        elif term[0] == "*":
            combined = bool(self.operators(term[2]))
            for leaf in self.leaves(term[2]):
                once = leaf.factor == UNSCALED and not combined
                yield leaf._replace(factor=term[1] if once else MISSCALED)
        elif term[0] == "/":
            combined = bool(self.operators(term[2]))
            for leaf in self.leaves(term[2]):
                if combined or leaf.outer != 1.0:
                    yield leaf._replace(outer=leaf.outer * term[1])
                else:
                    yield leaf._replace(inner=leaf.inner * term[1])
        else:
            by = float(len(term[3])) if term[1] == RedOp.AVG else 1.0
            for child, offset in term[3]:
                for leaf in self.leaves(child):
                    # a division between two combinations is neither before the first nor after the last: never right
                    inner = leaf.inner if leaf.outer == 1.0 else float("nan")
                    averaged = leaf.averaged or by != 1.0
                    yield Leaf(leaf.rank, leaf.offset + offset, inner, leaf.outer * by, averaged, leaf.factor)


def merge(contents: Sequence[Content]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Cuts contents of equal length alike: (length, the value of each)."""
    if all(len(c) == 1 for c in contents):
        yield contents[0][0][0], [(c[0][1], c[0][2]) for c in contents]
        return
    places = [0] * len(contents)
    used = [0] * len(contents)
    while places[0] < len(contents[0]):
        length = min(c[p][0] - u for c, p, u in zip(contents, places, used, strict=True))
        yield length, [(c[p][1], c[p][2] + u) for c, p, u in zip(contents, places, used, strict=True)]
        for i, c in enumerate(contents):
            used[i] += length
            if used[i] == c[places[i]][0]:
                places[i] += 1
                used[i] = 0


def cut(content: Content, lo: int, length: int) -> Content:
    """Elements [lo, lo + length) of a content."""
    result, at, hi = [], 0, lo + length
    for size, node, index in content:
        first, last = max(at, lo), min(at + size, hi)
        if first < last:
            result.append((last - first, node, index + first - at))
        at += size
    return result
