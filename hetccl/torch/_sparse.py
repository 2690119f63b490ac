# SPDX-License-Identifier: Apache-2.0
"""The sum of sparse tensors, as DDP asks for it where an embedding has sparse gradients.

No rank knows which elements the others have, so all exchange their counts, then gather indices and values padded to
the largest count. Each rank adds them rank by rank: an element has at most two terms in each addition, so that all
ranks get the same bits, whatever their devices.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hetccl.errors import MismatchError, UnsupportedError
from hetccl.torch import _tensors
from hetccl.torch._errors import for_torch
from hetccl.types import RedOp

__all__ = ["SparseOps"]


class SparseOps:
    """Mixin: expects the operations of the class it joins."""

    _size: int
    _coalescing: list[Any] | None
    _joined: Callable[..., Any]
    _handed_out: Callable[..., Any]

    def _allreduce_sparse(self, tensors: Any, opts: Any) -> Any:
        """Sums one COO tensor in place; afterwards it is coalesced. Blocks for the exchange of the counts."""
        mine = tensors[0].detach()
        try:
            _check(mine, opts, self._coalescing)
            mine = mine.coalesce()
            counts = self._exchanged_counts(mine, opts)
        except Exception as error:
            raise for_torch(error) from error.__cause__
        indices, values = mine.indices(), mine.values()
        longest = max(counts)
        places = indices.new_zeros((longest, indices.shape[0]))  # one row an element
        places[: indices.shape[1]] = indices.t()
        terms = values.new_zeros((longest, *values.shape[1:]))
        terms[: values.shape[0]] = values
        all_places = places.new_empty((self._size * longest, *places.shape[1:]))
        all_terms = terms.new_empty((self._size * longest, *terms.shape[1:]))
        each = _gather_options(opts, asynchronous=True)
        works = [
            self.all_gather_single(all_places, places, each),  # type: ignore[attr-defined]
            self.all_gather_single(all_terms, terms, each),  # type: ignore[attr-defined]
        ]

        def add() -> None:
            with torch.no_grad():  # detach() would give another tensor here, not another view
                tensors[0].copy_(_sum(all_places, all_terms, counts, mine.shape))

        return self._handed_out(self._joined(works, tensors, add), opts)

    def _exchanged_counts(self, mine: Any, opts: Any) -> list[int]:
        """Elements of every rank. Raises MismatchError where shapes or kinds differ, on all ranks."""
        shape = zlib.crc32(repr((tuple(mine.shape), mine.sparse_dim(), str(mine.dtype))).encode())
        record = torch.tensor([mine.values().shape[0], shape])
        records = torch.empty(self._size * 2, dtype=torch.int64)
        self.all_gather_single(records, record, _gather_options(opts, asynchronous=False))  # type: ignore[attr-defined]
        counts, shapes = records.view(self._size, 2).t().tolist()
        different = [rank for rank, other in enumerate(shapes) if other != shapes[0]]
        if different:
            raise MismatchError(
                f"all_reduce of sparse tensors: shape, sparse dimensions or dtype of ranks {different} differ from "
                f"those of rank 0; here it is {tuple(mine.shape)}, {mine.sparse_dim()} sparse dimensions, {mine.dtype}"
            )
        return counts


def _check(tensor: Any, opts: Any, coalescing: Any) -> None:
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedError(f"hetccl sums sparse tensors in COO form only, this one is {tensor.layout}")
    code, factor = _tensors.reduction(opts.reduceOp)
    if code != RedOp.SUM or factor is not None:
        raise UnsupportedError(f"hetccl only sums sparse tensors, got {opts.reduceOp}: call to_dense()")
    if coalescing is not None:
        raise UnsupportedError("a sparse all_reduce cannot be coalesced with others: call it outside the manager")


def _gather_options(opts: Any, asynchronous: bool) -> Any:
    each = c10d.AllgatherOptions()
    each.timeout, each.asyncOp = opts.timeout, asynchronous
    return each


def _sum(places: Any, terms: Any, counts: list[int], shape: Any) -> Any:
    """The sum of all ranks' elements, which lie in blocks of equal length, each padded at its end."""
    longest = max(counts)
    total = None
    for rank, count in enumerate(counts):
        block = slice(rank * longest, rank * longest + count)
        part = torch.sparse_coo_tensor(places[block].t(), terms[block], shape, is_coalesced=True)
        total = part if total is None else (total + part).coalesce()
    return total
