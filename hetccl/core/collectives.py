# SPDX-License-Identifier: Apache-2.0
"""The operations of a communicator beyond the four that nearly every program uses: rooted ones, all_to_all, the v forms
with a count for each rank, several messages or tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetccl.core.algorithms.common import Places
from hetccl.core.arguments import block_counts, block_places, nothing, redop, same_size
from hetccl.core.batch import Batch, Recv, Send, post_all
from hetccl.core.buffers import Buffer
from hetccl.core.coalesced import Packing
from hetccl.core.work import Work
from hetccl.errors import UsageError
from hetccl.types import Op, RedOp

__all__ = ["Collectives"]


class Collectives:
    """Mixin of `Communicator`. Counts and displacements are in elements."""

    rank: int
    size: int
    if TYPE_CHECKING:
        _core: Any
        _packing: Packing

        def _check_rank(self, rank: int, what: str) -> None: ...
        def _take(self, array: Any, writable: bool, what: str) -> Buffer: ...
        def _collective(self, op: Op, inp: Buffer, out: Buffer, count: int, *more: Any, **named: Any) -> Any: ...
        def post(self, *args: Any, **named: Any) -> Work: ...

    def reduce(
        self, input: Any, output: Any, root: int, op: str | RedOp = "sum", *, factor: float = 1.0,
        async_op: bool = False, timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """Combines `input` of all ranks into `output` of rank `root` (None: in place there); others pass None.

        `factor` is this rank's own, for op "premul_sum": its input is multiplied by it first.
        """
        self._check_rank(root, "root")
        at_root = self.rank == root
        inp = self._take(input, at_root and output is None, "input")
        out = nothing(inp.dtype)
        if at_root:
            out = inp if output is None else self._take(output, True, "output")
            same_size(inp, out, 1, "reduce")
        return self._collective(Op.REDUCE, inp, out, inp.count, redop(op), root, async_op, timeout, 0, factor)

    def gather(self, input: Any, output: Any, root: int, *, async_op: bool = False, timeout: float = 0) -> Work | None:
        """`output` of rank `root` (size times `input`) gets the inputs of all ranks in rank order; others pass None."""
        self._check_rank(root, "root")
        inp = self._take(input, False, "input")
        out = nothing(inp.dtype)
        if self.rank == root:
            out = self._take(output, True, "output")
            same_size(inp, out, self.size, "gather")
        at = self.rank * inp.nbytes
        return self._collective(Op.GATHER, inp, out, inp.count, RedOp.SUM, root, async_op, timeout, at)

    def scatter(self, input: Any, output: Any, root: int, *, async_op: bool = False, timeout: float = 0) -> Work | None:
        """`input` of rank `root` is size times `output`; rank r gets block r of it. The other ranks' input is None."""
        self._check_rank(root, "root")
        out = self._take(output, True, "output")
        inp = nothing(out.dtype)
        if self.rank == root:
            inp = self._take(input, False, "input")
            same_size(out, inp, self.size, "scatter", "output", "input")
        at = self.rank * out.nbytes
        return self._collective(Op.SCATTER, inp, out, out.count, RedOp.SUM, root, async_op, timeout, at)

    def all_to_all(self, input: Any, output: Any, *, async_op: bool = False, timeout: float = 0) -> Work | None:
        """Both hold one block a rank: block q of `input` goes to rank q, block q of `output` comes from there."""
        inp, out = self._take(input, False, "input"), self._take(output, True, "output")
        same_size(inp, out, 1, "all_to_all")
        if inp.count % self.size:
            raise UsageError(f"all_to_all: {inp.count} elements cannot be cut into {self.size} equal blocks")
        count = inp.count // self.size
        return self._collective(Op.ALL_TO_ALL, inp, out, count, RedOp.SUM, 0, async_op, timeout, None)

    # ---- with a count for each rank, given on every rank

    def all_gather_v(
        self, input: Any, output: Any, counts: Sequence[int], displacements: Sequence[int] | None = None, *,
        async_op: bool = False, timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """Rank r's `input` has counts[r] elements; on every rank it goes to `output` from displacements[r] on.

        Without displacements, which may differ from rank to rank, blocks lie one after the other. What lies between
        blocks is left alone. Border bytes: (C-1) times the sum of all blocks, with C islands.
        """
        lengths = block_counts(counts, self.size, "all_gather_v")
        inp, out = self._take(input, False, "input"), self._take(output, True, "output")
        starts = block_places(displacements, lengths, out, "all_gather_v", "output")
        block_places(None, (lengths[self.rank],), inp, "all_gather_v", "input")
        at = starts[self.rank] * inp.dtype.itemsize
        shape = (lengths, Places((0,), starts))
        return self._collective(Op.ALL_GATHER, inp, out, 1, RedOp.SUM, 0, async_op, timeout, at, shape=shape)

    def gather_v(
        self, input: Any, output: Any, root: int, counts: Sequence[int], displacements: Sequence[int] | None = None, *,
        async_op: bool = False, timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """Rank r's `input` has counts[r] elements; at rank `root` it goes to `output` from displacements[r] on.

        Border bytes: the sum of the blocks from outside the root's island.
        """
        self._check_rank(root, "root")
        lengths = block_counts(counts, self.size, "gather_v")
        inp = self._take(input, False, "input")
        block_places(None, (lengths[self.rank],), inp, "gather_v", "input")
        out, starts = nothing(inp.dtype), (0,) * self.size
        if self.rank == root:
            out = self._take(output, True, "output")
            starts = block_places(displacements, lengths, out, "gather_v", "output")
        at = starts[self.rank] * inp.dtype.itemsize
        shape = (lengths, Places((0,), starts))
        return self._collective(Op.GATHER, inp, out, 1, RedOp.SUM, root, async_op, timeout, at, shape=shape)

    def scatter_v(
        self, input: Any, output: Any, root: int, counts: Sequence[int], displacements: Sequence[int] | None = None, *,
        async_op: bool = False, timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """Rank r's `output` gets counts[r] elements of the root's `input`, from displacements[r] on.

        Border bytes: the sum of the blocks for ranks outside the root's island.
        """
        self._check_rank(root, "root")
        lengths = block_counts(counts, self.size, "scatter_v")
        out = self._take(output, True, "output")
        block_places(None, (lengths[self.rank],), out, "scatter_v", "output")
        inp, starts = nothing(out.dtype), (0,) * self.size
        if self.rank == root:
            inp = self._take(input, False, "input")
            starts = block_places(displacements, lengths, inp, "scatter_v", "input")
        at = starts[self.rank] * out.dtype.itemsize
        shape = (lengths, Places(starts, (0,)))
        return self._collective(Op.SCATTER, inp, out, 1, RedOp.SUM, root, async_op, timeout, at, shape=shape)

    def reduce_scatter_v(
        self, input: Any, output: Any, counts: Sequence[int], op: str | RedOp = "sum",
        displacements: Sequence[int] | None = None, *, factor: float = 1.0, async_op: bool = False, timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """Every `input` has blocks of counts[r] elements from displacements[r] on; rank r gets the combined block r.

        Border bytes: (C-1) times the sum of all blocks, with C islands.
        """
        lengths = block_counts(counts, self.size, "reduce_scatter_v")
        inp, out = self._take(input, False, "input"), self._take(output, True, "output")
        starts = block_places(displacements, lengths, inp, "reduce_scatter_v", "input")
        block_places(None, (lengths[self.rank],), out, "reduce_scatter_v", "output")
        at = starts[self.rank] * out.dtype.itemsize
        shape = (lengths, Places(starts, (0,)))
        return self._collective(
            Op.REDUCE_SCATTER, inp, out, 1, redop(op), 0, async_op, timeout, at, factor, shape=shape
        )

    def all_to_all_v(
        self, input: Any, output: Any, counts: Sequence[Sequence[int]], in_displacements: Sequence[int] | None = None,
        out_displacements: Sequence[int] | None = None, *, async_op: bool = False, timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """Rank i sends counts[i][j] elements to rank j: block j of its `input`, block i of the other's `output`.

        Displacements say where this rank's blocks begin; without them blocks lie one after the other. Border bytes: the
        sum of counts[i][j] over pairs in different islands.
        """
        n, me = self.size, self.rank
        lengths = block_counts(counts, n * n, "all_to_all_v")
        inp, out = self._take(input, False, "input"), self._take(output, True, "output")
        sent, received = lengths[me * n : (me + 1) * n], lengths[me::n]
        starts = block_places(in_displacements, sent, inp, "all_to_all_v", "input")
        ends = block_places(out_displacements, received, out, "all_to_all_v", "output")
        shape = (lengths, Places(starts, ends))
        return self._collective(Op.ALL_TO_ALL, inp, out, 1, RedOp.SUM, 0, async_op, timeout, None, shape=shape)

    # ---- several at once

    def batch(self, messages: Sequence[Send | Recv], *, async_op: bool = False, timeout: float = 0) -> Batch | None:
        """Posts sends and receives together, so that their order does not matter; one `Batch` waits for all.

        comm.batch([hetccl.Send(a, right), hetccl.Recv(b, left)])
        """
        work = post_all(self, messages, timeout)
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: str | RedOp = "sum", *, factor: float = 1.0, async_op: bool = False,
        timeout: float = 0,
    ) -> Work | None:  # fmt: skip
        """One all_reduce over many tensors of one dtype, each in place: packed, reduced by one plan, unpacked."""
        parts = [self._take(t, True, f"tensor {i}") for i, t in enumerate(tensors)]
        if len({p.dtype for p in parts}) > 1:
            raise UsageError("all_reduce_coalesced: all tensors must have one dtype")
        if not parts:
            raise UsageError("all_reduce_coalesced: there is no tensor")
        whole = self._packing.pack(parts)
        return self._collective(Op.ALL_REDUCE, whole, whole, whole.count, redop(op), 0, async_op, timeout, 0, factor)
