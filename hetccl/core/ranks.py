# SPDX-License-Identifier: Apache-2.0
"""How a job's make-up is written: "oneccl:2,host:2" is two ranks of oneCCL and then two of the host vendor.

    spec  = part ("," part)*
    part  = vendor ["@" label] [":" count]

Ranks are numbered from left to right, so "host,sim-a,host,sim-b" alternates. Ranks of one vendor form one island; an
"@label" splits them: "host@a:1,host@b:1" is two islands of one rank each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from hetccl.errors import ConfigError

__all__ = ["RankSpec", "check_size", "format_ranks", "parse_ranks"]

EXAMPLE = 'e.g. "oneccl:2,host:2" or "host@a:1,host@b:1"'
MAX_RANKS = 1 << 20  # a slip such as host:1e9 must not fill the memory

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(?:-[A-Za-z0-9_]+)*")
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class RankSpec(NamedTuple):
    """What one rank is: its vendor as users write it ("sim-a"), and the label that splits islands ("" for none)."""

    vendor: str
    label: str = ""

    def __str__(self) -> str:
        return f"{self.vendor}@{self.label}" if self.label else self.vendor


def parse_ranks(spec: str) -> list[RankSpec]:
    """One `RankSpec` a rank, in rank order. Raises `ConfigError` with the position of what is wrong."""
    ranks: list[RankSpec] = []
    if not spec.strip():
        raise ConfigError(f"a list of ranks is empty; write vendors and counts, {EXAMPLE}", value=spec)
    start = 0
    for part in spec.split(","):
        one, count = _parse_part(spec, part, start)
        if len(ranks) + count > MAX_RANKS:
            raise _wrong(spec, start, f"makes more than {MAX_RANKS} ranks")
        ranks.extend([one] * count)
        start += len(part) + 1
    return ranks


def format_ranks(ranks: Iterable[RankSpec]) -> str:
    """The shortest spec that `parse_ranks` turns into `ranks` again."""
    runs: list[tuple[RankSpec, int]] = []
    for one in ranks:
        if runs and runs[-1][0] == one:
            runs[-1] = (one, runs[-1][1] + 1)
        else:
            runs.append((one, 1))
    return ",".join(str(one) if count == 1 else f"{one}:{count}" for one, count in runs)


def check_size(ranks: list[RankSpec], world_size: int, source: str = "HETCCL_RANKS") -> None:
    """Raises `ConfigError` unless there is one entry for every rank of the job."""
    if len(ranks) != world_size:
        raise ConfigError(
            f"{source}={format_ranks(ranks)} describes {len(ranks)} ranks, but the job has {world_size} (WORLD_SIZE). "
            f"Start {len(ranks)} ranks or write {world_size}",
            value=format_ranks(ranks),
        )


def _parse_part(spec: str, part: str, start: int) -> tuple[RankSpec, int]:
    text = part.strip()
    at = start + len(part) - len(part.lstrip())
    if not text:
        raise _wrong(spec, at, "there is nothing between two commas")
    rest, colon, count_text = text.partition(":")
    vendor, has_label, label = (piece.strip() for piece in rest.partition("@"))
    if not _NAME.fullmatch(vendor):
        raise _wrong(spec, at, f"{vendor!r} is no vendor's name (letters, digits, _ and -)")
    if has_label and not _LABEL.fullmatch(label):
        raise _wrong(spec, at + rest.index("@") + 1, f"{label!r} is no label (letters, digits, _ . and -)")
    count = 1
    if colon:
        number = count_text.strip()
        if not (number.isascii() and number.isdigit() and len(number) < 9 and int(number) > 0):
            raise _wrong(spec, at + len(rest) + 1, f"{number!r} is no count of ranks (1 or more)")
        count = int(number)
    return RankSpec(vendor, label), count


def _wrong(spec: str, position: int, what: str) -> ConfigError:
    return ConfigError(
        f"cannot read the ranks {spec!r}: at position {position + 1}, {what}; {EXAMPLE}", value=spec, position=position
    )
