# SPDX-License-Identifier: Apache-2.0
"""What `hetccl bench` has to know of each collective: who holds which buffer, of how many blocks, data that make the
result exact, and the call of torch that does the same. The root of rooted ones is rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetccl.testing import oracle
from hetccl.types import DType, RedOp

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["SHAPES", "Shape", "addresses", "bus_factor", "exact", "torch_call"]

ROOT = 0
PERIOD = 65_537  # the exact data repeat after so many elements: large sizes are made quickly


@dataclass(frozen=True)
class Shape:
    """The buffers of a collective. One that is neither `many_in` nor `many_out` works in place, in one buffer."""

    many_in: bool = False  # the input holds one block a rank, the output one
    many_out: bool = False
    root_in: bool = False  # only the root has an input, or an output
    root_out: bool = False
    reduces: bool = False
    bus_parts: int = 1  # busbw = algbw times this, and (n-1)/n where the data are cut into blocks

    @property
    def blocks(self) -> bool:
        """Whether the larger buffer holds one block a rank."""
        return self.many_in or self.many_out


SHAPES = {
    "all_reduce": Shape(reduces=True, bus_parts=2),
    "broadcast": Shape(root_in=True),
    "all_gather": Shape(many_out=True),
    "reduce_scatter": Shape(many_in=True, reduces=True),
    "all_to_all": Shape(many_in=True, many_out=True),
    "reduce": Shape(root_out=True, reduces=True),
    "gather": Shape(many_out=True, root_out=True),
    "scatter": Shape(many_in=True, root_in=True),
}


def bus_factor(op: str, n: int) -> float:
    """busbw over algbw, as nccl-tests define it: what one link carries if the algorithm is the best there is."""
    shape = SHAPES[op]
    return shape.bus_parts * ((n - 1) / n if shape.blocks or shape.bus_parts == 2 else 1.0)


def addresses(op: str, rank: int, given: Array, out: Array) -> tuple[int, int]:
    """(input, output) for `Communicator.run`: 0 for a buffer that this rank has no part in."""
    shape, other = SHAPES[op], rank != ROOT
    absent_in = shape.root_in and shape.blocks and other
    return 0 if absent_in else given.ctypes.data, 0 if shape.root_out and other else out.ctypes.data


def exact(op: str, dtype: DType, redop: RedOp, rank: int, n: int, count: int) -> tuple[Array, Array | None]:
    """(input, expected output) of `rank`, `count` as in `Communicator.run`. The output None: it must be left alone."""
    import numpy as np

    shape = SHAPES[op]
    if shape.reduces:
        length = count * (n if shape.blocks else 1)
        base = min(length, PERIOD)
        given = np.resize(oracle.data(dtype, redop, rank, n, base), length)
        if shape.root_out and rank != ROOT:
            return given, None
        want = np.resize(oracle.expected(dtype, redop, n, base), length)
        return given, want[rank * count : (rank + 1) * count] if shape.blocks else want
    base = min(count, PERIOD)

    def block(source: int, target: int) -> Array:
        return np.resize(oracle.moved(dtype, source, base, salt=target), count)

    if op == "all_to_all":
        return (
            np.concatenate([block(rank, target) for target in range(n)]),
            np.concatenate([block(source, rank) for source in range(n)]),
        )
    if op == "scatter":
        whole = np.concatenate([block(ROOT, target) for target in range(n)])
        return whole if rank == ROOT else np.zeros_like(whole), block(ROOT, rank)
    if shape.many_out:
        if shape.root_out and rank != ROOT:
            return block(rank, 0), None
        return block(rank, 0), np.concatenate([block(source, 0) for source in range(n)])
    root = block(ROOT, 0)
    return root if rank == ROOT else np.zeros_like(root), root


def torch_call(op: str, dist: Any, group: Any, tensors: tuple[Any, Any], redop: RedOp) -> Callable[[], Any]:
    """The same operation by torch.distributed; `tensors`: input and output, one and the same where it is in place."""
    given, out = tensors
    at_root = dist.get_rank() == ROOT
    n = dist.get_world_size()
    reduction = getattr(dist.ReduceOp, redop.name if redop.name != "PROD" else "PRODUCT")
    if op == "all_reduce":
        return lambda: dist.all_reduce(given, op=reduction, group=group)
    if op == "reduce":
        return lambda: dist.reduce(given, ROOT, op=reduction, group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(given, ROOT, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(out, given, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(out, given, op=reduction, group=group)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(out, given, group=group)
    if op == "gather":
        outs = list(out.chunk(n)) if at_root else None
        return lambda: dist.gather(given, outs, dst=ROOT, group=group)
    parts = list(given.chunk(n)) if at_root else None
    return lambda: dist.scatter(out, parts, src=ROOT, group=group)
