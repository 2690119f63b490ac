# SPDX-License-Identifier: Apache-2.0
"""What callers write, turned into numbers and checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from hetccl.core.buffers import Buffer
from hetccl.errors import UnsupportedError, UsageError
from hetccl.types import DType, RedOp

__all__ = ["block_counts", "block_places", "message_tag", "nothing", "number", "redop", "same_size"]


def redop(op: str | RedOp) -> RedOp:
    return op if type(op) is RedOp else number(RedOp, op, "operator")


def number(kind: Any, value: Any, what: str) -> Any:
    """The member of an enumeration by its number or its name in lower case. Raises `UsageError` for a number that is
    none and `UnsupportedError` for a name."""
    if isinstance(value, int):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(f"{v.value} {v.name.lower()}" for v in kind)
            raise UsageError(f"{value} is no {what}; there are {known}") from None
    try:
        return kind[str(value).upper()]
    except KeyError:
        raise UnsupportedError(
            f"no {what} is called {value!r}; there are {', '.join(v.name.lower() for v in kind)}"
        ) from None


def message_tag(tag: Any) -> None:
    """Raises `UsageError` unless messages can bear this tag."""
    if not isinstance(tag, int) or not 0 <= tag < 1 << 31:
        raise UsageError(f"{tag!r} is no tag of a message; tags are whole numbers from 0 to 2147483647")


def same_size(
    one: Buffer, many: Buffer, times: int, op: str, one_name: str = "input", many_name: str = "output"
) -> None:
    """Raises `UsageError` unless `many` is `times` as long as `one`."""
    if one.count * times != many.count:
        raise UsageError(
            f"{op}: {many_name} has {many.count} elements, but {one_name} has {one.count}"
            + (f" and there are {times} ranks; {many_name} must have {one.count * times}" if times > 1 else "")
        )


def nothing(dtype: DType) -> Buffer:
    """In place of a buffer that this rank need not have."""
    return Buffer(0, 0, dtype, None)


def block_counts(counts: Sequence[Any], n: int, op: str) -> tuple[int, ...]:
    """`n` lengths in elements; a matrix is taken row by row. Raises `UsageError`."""
    flat = [c for row in counts for c in (row if hasattr(row, "__len__") else (row,))]
    found = tuple(int(c) for c in flat)
    if len(found) != n or min(found, default=0) < 0:
        raise UsageError(f"{op}: counts must be {n} numbers from 0 on, the same on all ranks, got {found}")
    return found


def block_places(
    displacements: Sequence[Any] | None, counts: Sequence[int], buffer: Buffer, op: str, what: str
) -> tuple[int, ...]:
    """Where each block begins in `buffer` (None: one after the other). Raises `UsageError` if one does not fit, or if
    blocks of an output overlap."""
    if displacements is None:
        starts = tuple(accumulate(counts, initial=0))[:-1]
    else:
        starts = tuple(int(d) for d in displacements)
    if len(starts) != len(counts):
        raise UsageError(f"{op}: {what} needs {len(counts)} displacements, got {len(starts)}")
    for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if start < 0 or start + count > buffer.count:
            raise UsageError(
                f"{op}: block {r} of {what} ({count} elements from {start}) does not fit into {buffer.count} elements"
            )
    taken = sorted((s, c) for s, c in zip(starts, counts, strict=True) if c)
    if what == "output" and any(s + c > after for (s, c), (after, _) in pairwise(taken)):
        raise UsageError(f"{op}: blocks of the output overlap")
    return starts
