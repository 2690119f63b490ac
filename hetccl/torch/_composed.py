# SPDX-License-Identifier: Apache-2.0
"""torch's operations that the core has no collective for, made of those that it has and of point-to-point messages.

A composed operation is: copies in, any number of the core's works at once, then one function that copies out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hetccl.errors import UsageError
from hetccl.torch import _tensors
from hetccl.torch._errors import for_torch
from hetccl.torch._work import HetWork, join
from hetccl.types import DType, Op, RedOp

__all__ = ["ComposedOps"]

# Messages of composed operations, apart from the user's. Ranks issue collectives in one order, and messages of one
# pair and tag arrive in order, so one tag is enough.
TAG = 0x7FFF_FFF0


class ComposedOps:
    """Mixin: expects `_post`, `_rank`, `_size`, `_checked` and the core's own collectives from the class it joins."""

    _post: Callable[..., Any]
    _rank: int
    _size: int
    _device: Any
    _current_stream: Callable[[], int]
    _coalescing: list[Any] | None

    # -- lists of tensors

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """Gathers into a list. Lists of unequal shapes go by one broadcast a rank."""
        opts = opts or c10d.AllgatherOptions()
        with _as_torch_errors():
            tensor, targets = _one_list("all_gather", ins, outs, self._size, self._device)
        count = tensor.numel()
        if any(target.numel() != count for target in targets):
            return self._allgather_uneven(targets, tensor, opts, outs)
        source = tensor.detach().contiguous()
        flat = _tensors.flat_view(targets)
        finish = None
        if flat is None:
            flat = torch.empty(count * self._size, dtype=tensor.dtype, device=tensor.device)
            finish = _scatter_out(targets, flat)
        return self._gather_into(flat, source, opts, outs, finish)  # type: ignore[attr-defined]

    def _allgather_uneven(self, targets: Any, tensor: Any, opts: Any, outs: Any) -> Any:
        with _as_torch_errors():
            if targets[self._rank].numel() != tensor.numel():
                raise UsageError(
                    f"all_gather: this rank's input has {tensor.numel()} elements, "
                    f"its place in the list {targets[self._rank].numel()}"
                )
        targets[self._rank].detach().copy_(tensor.detach().reshape(targets[self._rank].shape))
        works = []
        for root, target in enumerate(targets):
            each = c10d.BroadcastOptions()
            each.rootRank, each.timeout, each.asyncOp = root, opts.timeout, opts.asyncOp
            works.append(self.broadcast([target], each))  # type: ignore[attr-defined]
        return self._joined(works, outs)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """Reduces a list of one tensor a rank. Lists of unequal shapes go by an all_reduce of all of it."""
        opts = opts or c10d.ReduceScatterOptions()
        with _as_torch_errors():
            out, sources = _one_list("reduce_scatter", outs, ins, self._size, self._device)
            if sources[self._rank].numel() != out.numel():
                raise UsageError(
                    f"reduce_scatter: output has {out.numel()} elements, its input {sources[self._rank].numel()}"
                )
        if all(source.numel() == out.numel() for source in sources):
            flat = _tensors.flat_view(sources)
            if flat is None:
                flat = _concatenated(sources)
            return self._reduce_scatter_flat(out, flat, opts)  # type: ignore[attr-defined]
        flat = _concatenated(sources)
        start = sum(source.numel() for source in sources[: self._rank])
        each = c10d.AllreduceOptions()
        each.reduceOp, each.timeout, each.asyncOp = opts.reduceOp, opts.timeout, opts.asyncOp
        work = self.allreduce([flat], each)  # type: ignore[attr-defined]
        return self._joined([work], outs, _scatter_out([out], flat[start : start + out.numel()]))

    # -- several operations in one call

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._joined([self.allreduce([tensor], opts) for tensor in tensors], tensors)  # type: ignore[attr-defined]

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._joined([self.all_gather_single(o, i, opts) for o, i in zip(outs, ins, strict=True)], outs)  # type: ignore[attr-defined]

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._joined([self.reduce_scatter_single(o, i, opts) for o, i in zip(outs, ins, strict=True)], outs)  # type: ignore[attr-defined]

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """`outs[r][k]` receives rank r's `ins[k]`."""
        columns = [[row[k] for row in outs] for k in range(len(ins))]
        return self._joined([self.allgather([column], [i], opts) for column, i in zip(columns, ins, strict=True)], outs)

    # -- rooted operations

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """Only the root's tensor changes."""
        opts = opts or c10d.ReduceOptions()
        tensor = self._checked(tensors, "reduce")  # type: ignore[attr-defined]
        with _as_torch_errors():
            code, factor = _tensors.reduction(opts.reduceOp)
            dtype = _tensors.dtype_code(tensor)
        flat = tensor.detach().contiguous()
        source = flat if factor is None else flat * factor
        at_root = opts.rootRank == self._rank
        finish = None
        if at_root and flat.data_ptr() != tensor.data_ptr():
            finish = _tensors.copier([(tensor, flat)])
        target = flat.data_ptr() if at_root else 0
        call = (Op.REDUCE, source.data_ptr(), target, flat.numel(), dtype, code, opts.rootRank)
        return self._start(*call, opts, tensors, (source, flat, tensor), finish)  # type: ignore[attr-defined]

    def gather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        opts = opts or c10d.GatherOptions()
        tensor = self._checked(ins, "gather")  # type: ignore[attr-defined]
        source, flat, target, finish = tensor.detach().contiguous(), None, 0, None
        if opts.rootRank == self._rank:
            with _as_torch_errors():
                _, targets = _one_list("gather", ins, outs, self._size, self._device)
                _equal_sizes("gather", tensor, targets)
            flat = _tensors.flat_view(targets)
            if flat is None:
                flat = torch.empty(tensor.numel() * self._size, dtype=tensor.dtype, device=tensor.device)
                finish = _scatter_out(targets, flat)
            target = flat.data_ptr()
            if source.data_ptr() != target + self._rank * source.nbytes and _tensors.overlap(flat, source):
                source = source.clone()
        call = (Op.GATHER, source.data_ptr(), target, *self._moved(source), RedOp.SUM, opts.rootRank)  # type: ignore[attr-defined]
        return self._start(*call, opts, outs, (source, flat, outs), finish)  # type: ignore[attr-defined]

    def scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ScatterOptions()
        tensor = self._checked(outs, "scatter")  # type: ignore[attr-defined]
        flat, source, finish, target = None, 0, None, tensor
        if opts.rootRank == self._rank:
            with _as_torch_errors():
                _, sources = _one_list("scatter", outs, ins, self._size, self._device)
                _equal_sizes("scatter", tensor, sources)
            flat = _tensors.flat_view(sources)
            if flat is None:
                flat = _concatenated(sources)
            source = flat.data_ptr()
        own = source + self._rank * tensor.nbytes
        inside = flat is not None and tensor.data_ptr() != own and _tensors.overlap(flat, tensor)
        if not tensor.is_contiguous() or inside:
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            finish = _tensors.copier([(tensor, target)])
        call = (Op.SCATTER, source, target.data_ptr(), *self._moved(target), RedOp.SUM, opts.rootRank)  # type: ignore[attr-defined]
        return self._start(*call, opts, outs, (flat, target, tensor), finish)  # type: ignore[attr-defined]

    # -- all to all

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """Rank r receives this rank's `ins[r]`; shapes may differ from pair to pair."""
        opts = opts or c10d.AllToAllOptions()
        with _as_torch_errors():
            if len(outs) != self._size or len(ins) != self._size:
                raise UsageError(f"all_to_all takes {self._size} tensors each way, got {len(ins)} and {len(outs)}")
            for tensor in (*outs, *ins):
                _tensors.check_tensor(tensor, self._device)
            _tensors.same_dtype("all_to_all", *outs, *ins)
        own = outs[self._rank]
        own.detach().copy_(ins[self._rank].detach().reshape(own.shape))
        others = [r for r in range(self._size) if r != self._rank]
        return self._exchange([(r, ins[r]) for r in others], [(r, outs[r]) for r in others], opts, outs)

    def all_to_all_single(
        self, out: Any, inp: Any, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any = None
    ) -> Any:
        """Splits are rows of dimension 0; empty means equal parts, on all ranks: those go by the core's all_to_all."""
        opts = opts or c10d.AllToAllOptions()
        with _as_torch_errors():
            outs = _rows(out, out_splits, self._size, "output", self._device)
            ins = _rows(inp, in_splits, self._size, "input", self._device)
            if out_splits or in_splits:
                return self.alltoall(outs, ins, opts)
            _tensors.same_dtype("all_to_all_single", out, inp)
            if out.numel() != inp.numel():
                raise UsageError(f"all_to_all_single: {inp.numel()} elements go in, the output has {out.numel()}")
        source, target, finish = inp.detach().contiguous(), out, None
        if not out.is_contiguous() or _tensors.overlap(out, source):
            target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            finish = _tensors.copier([(out, target)])
        count, dtype = self._moved(source)  # type: ignore[attr-defined]
        call = (Op.ALL_TO_ALL, source.data_ptr(), target.data_ptr(), count // self._size, dtype, RedOp.SUM, 0)
        return self._start(*call, opts, [out], (source, target, out), finish)  # type: ignore[attr-defined]

    # -- how a composed operation is run

    def _exchange(self, sends: Any, receives: Any, opts: Any, outputs: Any) -> Any:
        """Posts all sends and receives, (peer, tensor) each, at once. Data only moves, so it travels as bytes."""
        timeout = opts.timeout.total_seconds() if opts.timeout.days >= 0 else 0.0
        works, copies = [], []
        stream = self._current_stream()

        def post(op: Op, source: Any, target: Any, flat: Any, peer: int) -> None:
            code = (flat.nbytes, DType.UINT8, RedOp.SUM)
            works.append(self._post(op, source, target, *code, peer, TAG, timeout, flat, None, 1.0, stream))

        with _as_torch_errors():
            for peer, tensor in receives:
                _tensors.check_tensor(tensor, self._device)
                flat = (
                    tensor
                    if tensor.is_contiguous()
                    else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                )
                if flat is not tensor:
                    copies.append((tensor, flat))
                post(Op.RECV, 0, flat.data_ptr(), flat, peer)
            for peer, tensor in sends:
                _tensors.check_tensor(tensor, self._device)
                flat = tensor.detach().contiguous()
                post(Op.SEND, flat.data_ptr(), 0, flat, peer)
        work = HetWork(tuple(works), outputs, _tensors.copier(copies) if copies else None, self._device)
        return self._handed_out(work, opts)

    def _joined(self, works: list[Any], outputs: Any, finish: Callable[[], None] | None = None) -> Any:
        """One work for several. Parts that ran while the caller waited are done already."""
        if self._coalescing is not None:
            for part in works:  # replaced by the one that covers them
                if part in self._coalescing:
                    self._coalescing.remove(part)
        work = join(works, outputs, finish, self._device)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _handed_out(self, work: Any, opts: Any) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(work)
        elif not opts.asyncOp:
            work.wait()
        return work

    # older names of the same calls
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class _as_torch_errors:
    """Turns hetccl's errors into those that torch users expect."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            new = for_torch(error)
            if new is not error:
                raise new


def _one_list(call: str, singles: Any, lists: Any, size: int, device: Any) -> tuple[Any, Any]:
    """The one tensor and the one list of `size` tensors that a call must have, all of one dtype."""
    single = _tensors.one(singles, call)
    many = _tensors.one(lists, call)
    if len(many) != size:
        raise UsageError(f"{call} takes a list of {size} tensors, one a rank, got {len(many)}")
    for tensor in (single, *many):
        _tensors.check_tensor(tensor, device)
    _tensors.same_dtype(call, single, *many)
    return single, many


def _equal_sizes(call: str, single: Any, many: Any) -> None:
    for i, tensor in enumerate(many):
        if tensor.numel() != single.numel():
            raise UsageError(
                f"{call}: this rank's tensor has {single.numel()} elements, number {i} of the list {tensor.numel()}"
            )


def _rows(tensor: Any, splits: Sequence[int], size: int, what: str, device: Any) -> list[Any]:
    """`tensor` cut along dimension 0 into one part a rank."""
    _tensors.check_tensor(tensor, device)
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise UsageError(
                f"all_to_all_single: {what} has {rows} rows, which {size} ranks cannot share equally; pass split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise UsageError(
            f"all_to_all_single: {what} split sizes {list(splits)} must be {size} numbers with the sum {rows}"
        )
    return list(tensor.detach().split(list(splits)))


def _concatenated(tensors: Any) -> Any:
    """One new flat tensor with the elements of all."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _scatter_out(targets: Any, flat: Any) -> Callable[[], None]:
    """A function that fills `targets` one after the other from `flat`."""

    def copy() -> None:
        start = 0
        for target in targets:
            end = start + target.numel()
            target.detach().copy_(flat[start:end].view(target.shape))
            start = end

    return copy
