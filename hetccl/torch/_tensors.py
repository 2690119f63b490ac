# SPDX-License-Identifier: Apache-2.0
"""torch's dtypes, operators and tensors in the numbers of the core; and which tensors are refused, with reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hetccl.errors import UnsupportedError, UsageError
from hetccl.torch._compat import premul_factor
from hetccl.types import DType, RedOp

__all__ = [
    "DTYPES",
    "REDOPS",
    "check_tensor",
    "copier",
    "dtype_code",
    "flat_view",
    "one",
    "overlap",
    "reduction",
    "same_dtype",
]

DTYPES: dict[Any, int] = {getattr(torch, member.label): int(member) for member in DType if hasattr(torch, member.label)}

# Keyed by hash: torch makes a new object at each read of `opts.reduceOp`, and hashing it is the quickest comparison.
REDOPS: dict[int, int] = {
    hash(dist.ReduceOp(kind)): int(code)
    for kind, code in (
        (dist.ReduceOp.SUM, RedOp.SUM),
        (dist.ReduceOp.PRODUCT, RedOp.PROD),
        (dist.ReduceOp.MAX, RedOp.MAX),
        (dist.ReduceOp.MIN, RedOp.MIN),
        (dist.ReduceOp.AVG, RedOp.AVG),
        (dist.ReduceOp.BAND, RedOp.BAND),
        (dist.ReduceOp.BOR, RedOp.BOR),
        (dist.ReduceOp.BXOR, RedOp.BXOR),
    )
}


def check_tensor(tensor: Any, device: Any = None) -> None:
    """Raises UnsupportedError for a tensor that is neither dense CPU memory nor on `device`, the rank's own if any."""
    if not tensor.is_cpu and tensor.device != device:
        takes = f"CPU tensors and those on {device}" if device is not None else "CPU tensors only"
        raise UnsupportedError(
            f"hetccl was given a tensor on {tensor.device}; this rank takes {takes}. "
            "Move it there, set HETCCL_DEVICE or LOCAL_RANK, or name a vendor for that device in HETCCL_RANKS."
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"hetccl takes dense tensors only, this one is {tensor.layout}: call to_dense()")


def dtype_code(tensor: Any) -> int:
    """Number of the tensor's dtype. Raises UnsupportedError."""
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise UnsupportedError(f"hetccl has no element type for {tensor.dtype}; convert it, or view it as torch.uint8")
    return code


def reduction(op: Any) -> tuple[int, Any]:
    """(number of the operator, factor to scale the input with first or None). Raises UnsupportedError."""
    code = REDOPS.get(hash(op))
    if code is not None:
        return code, None
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return int(RedOp.SUM), premul_factor(op)
    raise UnsupportedError(f"hetccl has no reduction operator {kind}")


def one(tensors: Any, call: str) -> Any:
    """The only tensor of a list. Lists exist for several devices a process, which torch itself has given up."""
    if len(tensors) != 1:
        raise UsageError(f"{call} takes one tensor a process, got {len(tensors)}")
    return tensors[0]


def same_dtype(call: str, *tensors: Any) -> None:
    """Raises UsageError unless all have one dtype."""
    first = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != first:
            raise UsageError(f"{call}: tensors must have one dtype, got {first} and {tensor.dtype}")


def flat_view(tensors: Any) -> Any:
    """One flat view over tensors that lie back to back in one storage, each contiguous; else None. No copy."""
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    position = first.data_ptr()
    total = 0
    for tensor in tensors:
        here = tensor.data_ptr()
        if not tensor.is_contiguous() or here != position or tensor.untyped_storage().data_ptr() != storage:
            return None
        position += tensor.nbytes
        total += tensor.numel()
    return first.detach().as_strided((total,), (1,), first.storage_offset())


def overlap(a: Any, b: Any) -> bool:
    """Whether two contiguous tensors share bytes."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    return bool(start_a < start_b + b.nbytes and start_b < start_a + a.nbytes)


def copier(pairs: Any) -> Callable[[], None]:
    """A function that copies (to, from) pairs; outside autograd, which never sees what a collective writes."""

    def copy() -> None:
        for to, source in pairs:
            to.detach().copy_(source)

    return copy
