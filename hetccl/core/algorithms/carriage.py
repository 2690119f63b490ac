# SPDX-License-Identifier: Apache-2.0
"""Blocks that nobody combines or copies on their way (gather, scatter, all_to_all): inside their island to the rank
where they leave, over the border, by way of other islands where links are missing, inside the last island to their
rank."""

from __future__ import annotations

from dataclasses import dataclass

from hetccl.core.algorithms.blocks import Blocks, transfer
from hetccl.core.algorithms.common import Shared
from hetccl.core.plan import Buffer, Channel, Flow, FlowKind, PlanBuilder, Slice, StepKind
from hetccl.core.topology import Topology

__all__ = ["NOWHERE", "Carriage"]

NOWHERE = Slice(-1)


@dataclass(frozen=True)
class _Item:
    which: int  # the block's number
    source: int
    target: int
    path: list[int]  # border ranks, from the source's island to the target's
    src: Slice  # on the source
    dst: Slice  # on the target


class Carriage:
    """One rank's part. All ranks add the same blocks in the same order, but may leave out those that have nothing to do
    with their island. Then come `depart`, `cross`, `arrive`, in this order; other steps may stand between them."""

    def __init__(self, topology: Topology, b: PlanBuilder, blocks: Blocks, shared: Shared, rank: int) -> None:
        self._topology, self._b, self._blocks, self._shared, self._rank = topology, b, blocks, shared, rank
        self._mine, self._me = topology.place(rank)
        self._island = topology.islands[self._mine]
        self._items: list[_Item] = []
        self._leaving: dict[int, Slice] = {}  # by number of item
        self._landed: dict[int, tuple[Slice, Slice]] = {}  # where the border puts it, where it lies for the island
        self._ready = self._done = -1

    def add(self, which: int, source: int, target: int, path: list[int], src: Slice, dst: Slice) -> None:
        """`src` counts on the source, `dst` on the target only."""
        self._items.append(_Item(which, source, target, path, src, dst))

    def depart(self) -> None:
        """To the ranks where blocks leave, and into memory that the border can read."""
        b, blocks, rank = self._b, self._blocks, self._rank
        place = self._topology.place
        for number, item in enumerate(self._items):
            first = item.path[0]
            if place(item.source)[0] != self._mine:
                continue
            src = item.src
            if first != item.source:
                there = blocks.scratch(Buffer.DEVICE_SCRATCH, item.which) if first == rank else NOWHERE
                ends = (place(item.source)[1], place(first)[1])
                step = transfer(b, blocks, self._island, self._shared, self._me, ends, src, there, item.which)
                self._ready = step if first == rank else self._ready
                src = there
            if first == rank:
                self._leaving[number] = src
        if self._island.staged:
            for number, src in self._leaving.items():
                pinned = blocks.scratch(Buffer.HOST_SCRATCH, self._items[number].which)
                self._ready = b.island(StepKind.COPY, src, pinned)
                self._leaving[number] = pinned

    def cross(self) -> None:
        """Over the border, in the order of the items at both ends of every link."""
        flows = []
        for number, item in enumerate(self._items):
            if self._rank not in item.path:
                continue
            at = item.path.index(self._rank)
            before, after = item.path[at - 1 : at] if at else [], item.path[at + 1 : at + 2]
            if not before:
                flows.append(Flow(FlowKind.SEND, Channel.RESULT, tuple(after), src=self._leaving[number]))
            elif after:
                memory = Buffer.DEVICE_SCRATCH if not self._island.staged else Buffer.HOST_SCRATCH
                relayed = self._blocks.scratch(memory, item.which)
                flows.append(Flow(FlowKind.FORWARD, Channel.RESULT, (*before, *after), dst=relayed))
            else:
                flows.append(Flow(FlowKind.RECV, Channel.RESULT, tuple(before), dst=self._land(number, item)))
        self._done = self._b.border(flows, self._ready)

    def arrive(self) -> None:
        """From where the border put it to the device, and on to its rank."""
        b, place = self._b, self._topology.place
        wait = self._done
        if self._island.staged:
            for landed, there in self._landed.values():
                b.island(StepKind.COPY, landed, there, wait=wait)
                wait = -1
        for number, item in enumerate(self._items):
            last = item.path[-1]
            if place(item.target)[0] != self._mine or last == item.target:
                continue
            ends = (place(last)[1], place(item.target)[1])
            src = self._landed[number][1] if last == self._rank else NOWHERE
            # whoever has something to do at the border does that first: in a call it could not
            transfer(b, self._blocks, self._island, self._shared, self._me, ends, src, item.dst, item.which, wait)
            wait = -1

    def _land(self, number: int, item: _Item) -> Slice:
        there = item.dst
        if item.target != self._rank:
            there = self._blocks.scratch(Buffer.DEVICE_SCRATCH, item.which)
        landed = there
        if self._island.staged:
            landed = self._blocks.scratch(Buffer.HOST_SCRATCH, item.which)
        self._landed[number] = (landed, there)
        return landed
