# SPDX-License-Identifier: Apache-2.0
"""The tuning file: what `hetccl tune` measured, as YAML that people can read and change.

    version: 1
    job: "sim-a 0,1 on 0,0; sim-b 2,3 on 0,0"
    paths:
      shm: {latency: 0.8us, rate: 7.9GB/s, message: 0.2us}
    vendors:
      sim-a:
        copy: {latency: 3us, rate: 6GB/s}
        calls:
          reduce_scatter: {latency: 40us, rate: 3GB/s}
    combine: {latency: 0.1us, rate: 12GB/s}
    measured:
      all_reduce:
        owners: {4: 93.1us, 64K: 164us}

Keys are declared in KEYS; a mistake is named with file, line and column.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hetccl.core.config import parse_bytes
from hetccl.core.cost import CALLS, CostTable, IslandCost, Line, PathCost
from hetccl.core.yaml_keys import MAX_FILE, Document, Key, Wrong, a_rate, a_time, one_of, text_of
from hetccl.errors import ConfigError
from hetccl.types import Op

__all__ = ["KEYS", "adopt", "load_tuning", "mismatch", "parse_tuning", "published", "render_tuning"]

RATE, TIME = 'a rate, as in "8GB/s"', 'a time, as in "5us"'


def _text(node: Any) -> str:
    return text_of(node, "text")


def _size(node: Any) -> int:
    try:
        return parse_bytes(text_of(node, "a size"))
    except ValueError:
        raise Wrong(node, f"{node.value!r} is no size") from None


KEYS: tuple[Key, ...] = (
    Key("version", "1", "1", "Version of this format.", one_of("1")),
    Key("job", "text", "", "Islands, ranks and hosts of the job that was measured.", _text),
    Key("paths", "paths by name: shm, tcp, ...", "", "Ways between ranks of different islands."),
    Key("paths.*.latency", TIME, "", "Of a message of no length.", a_time, True),
    Key("paths.*.rate", RATE, "", "One rank's, each way.", a_rate, True),
    Key("paths.*.message", TIME, "0us", "What each wire message costs.", a_time),
    Key("vendors", "vendors, or islands as vendor@label", "", "What calls of the vendors' libraries cost."),
    Key("vendors.*.copy", "latency and rate", "", "Between device and host memory."),
    Key("vendors.*.copy.latency", TIME, "", "Of a copy of no length.", a_time, True),
    Key("vendors.*.copy.rate", RATE, "", "Of long copies.", a_rate, True),
    Key("vendors.*.calls", "calls by name, any for the others", "", "Calls of the library."),
    Key("vendors.*.calls.*.latency", TIME, "", "Of a call on next to nothing.", a_time, True),
    Key("vendors.*.calls.*.rate", RATE, "", "Bytes that pass one rank's link in a ring or chain.", a_rate, True),
    Key("combine", "latency and rate", "", "The host's own combining."),
    Key("combine.latency", TIME, "", "Of a combination of nothing.", a_time, True),
    Key("combine.rate", RATE, "", "Bytes that it reads.", a_rate, True),
    Key("measured", "operations", "", "Times of whole operations, by algorithm and size: only for the same `job`."),
)  # fmt: skip


def load_tuning(path: str) -> CostTable:
    """Reads a tuning file. Raises `ConfigError` with file, line and column."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"the tuning file {path} cannot be read: {why}; `hetccl tune` writes one",
            variable="HETCCL_TUNING",
            value=path,
        ) from None
    if len(text) > MAX_FILE:
        raise ConfigError(f"the tuning file {path} is larger than {MAX_FILE >> 20} MiB", path=path)
    return parse_tuning(text, path)


def parse_tuning(text: str, path: str = "tuning.yaml") -> CostTable:
    document = Document(path, text, KEYS)
    top = document.mapping(document.root, "")
    paths, vendors, measured = {}, {}, {}
    for key, node in document.pairs(top["paths"].node, "paths") if "paths" in top else ():
        found = document.mapping(node, "paths.*", f"paths.{key.value}")
        message = found["message"].value if "message" in found else 0.0
        paths[key.value] = PathCost(found["latency"].value, 1 / found["rate"].value, message)
    for key, node in document.pairs(top["vendors"].node, "vendors") if "vendors" in top else ():
        vendors[key.value] = _vendor(document, key.value, node)
    for key, node in document.pairs(top["measured"].node, "measured") if "measured" in top else ():
        if key.value not in {op.label for op in Op}:
            document.fail(key, f"{key.value} is no operation; there are {', '.join(op.label for op in Op)}")
        measured[key.value] = {
            name.value: _times(document, times, f"measured.{key.value}.{name.value}")
            for name, times in document.pairs(node, f"measured.{key.value}")
        }
    return CostTable(
        paths,
        vendors,
        _line(document, "combine", "combine", top["combine"].node) if "combine" in top else None,
        top["job"].value if "job" in top else "",
        measured,
    )


def render_tuning(table: CostTable, heading: str = "") -> str:
    """The file's text; `parse_tuning` of it gives an equal table but for rounding."""
    lines = ["# SPDX-License-Identifier: Apache-2.0", *(f"# {line}" for line in heading.splitlines()), "version: 1"]
    if table.job:
        lines.append(f'job: "{table.job}"')
    if table.paths:
        lines.append("paths:")
        for name, p in table.paths.items():
            lines.append(
                f"  {name}: {{latency: {_us(p.latency)}, rate: {_rate(p.beta)}, message: {_us(p.message)}}}"
            )
    if table.vendors:
        lines.append("vendors:")
    for name, v in table.vendors.items():
        lines += [f"  {name}:", f"    copy: {_shown(v.copy)}", "    calls:"]
        lines += [f"      {call}: {_shown(line)}" for call, line in v.calls.items()]
    if table.combine:
        lines.append(f"combine: {_shown(table.combine)}")
    if table.measured:
        lines.append("measured:")
    for op, by in table.measured.items():
        lines.append(f"  {op}:")
        for algorithm, points in by.items():
            lines.append(f"    {algorithm}: {{{', '.join(f'{_bytes(n)}: {_us(t)}' for n, t in points)}}}")
    return "\n".join(lines) + "\n"


def published(table: CostTable | None) -> dict[str, str]:
    """Rank 0's table as it goes to the others."""
    text = json.dumps((table or CostTable()).to_json())
    return {"table": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def adopt(mine: CostTable | None, published: Mapping[str, Any], rank: int) -> CostTable:
    """Rank 0's table, as published. Raises `ConfigError` if it does not arrive as it was sent, or if this rank was
    given another one."""
    text = published["table"]
    if hashlib.sha256(text.encode()).hexdigest() != published["sha256"]:
        raise ConfigError("the tuning table that rank 0 published did not arrive as it was sent; is the store sound?")
    table = CostTable.from_json(json.loads(text))
    if mine is not None and mine.digest != table.digest:
        raise ConfigError(mismatch([rank], table.digest), variable="HETCCL_TUNING")
    return table


def mismatch(ranks: list[int], of_rank_0: str) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    has = f"has another (sha256 {of_rank_0[:12]})" if of_rank_0 else "has none"
    return (
        f"HETCCL_TUNING of {who} names a table that rank 0 does not share: rank 0 {has}. All ranks adopt rank 0's "
        "table; give every rank the same file, or rank 0 alone"
    )


def _vendor(document: Document, name: str, node: Any) -> IslandCost:
    shown = f"vendors.{name}"
    found = document.mapping(node, "vendors.*", shown)
    if "calls" not in found or "copy" not in found:
        document.fail(node, f"{shown} lacks {'copy' if 'calls' in found else 'calls'}")
    calls = {}
    for key, value in document.pairs(found["calls"].node, f"{shown}.calls"):
        if key.value not in (*CALLS, "any"):
            document.fail(key, f"{key.value} is no call; there are {', '.join(CALLS)} and any")
        calls[key.value] = _line(document, "vendors.*.calls.*", f"{shown}.calls.{key.value}", value)
    if not calls:
        document.fail(found["calls"].node, f"{shown}.calls is empty")
    return IslandCost(calls, _line(document, "vendors.*.copy", f"{shown}.copy", found["copy"].node))


def _line(document: Document, path: str, shown: str, node: Any) -> Line:
    found = document.mapping(node, path, shown)
    return Line(found["latency"].value, 1 / found["rate"].value)


def _times(document: Document, node: Any, shown: str) -> tuple[tuple[int, float], ...]:
    points = []
    for key, value in document.pairs(node, shown):
        size = document.value(key, Key(shown, "sizes and times: {4: 10us, 64K: 50us}", "", "", _size), shown)
        points.append((size, document.value(value, Key(shown, TIME, "", "", a_time), shown)))
    if not points or any(t <= 0 for _, t in points):
        document.fail(node, f"{shown} needs at least one size, and times above 0")
    return tuple(sorted(points))


def _shown(line: Line) -> str:
    return f"{{latency: {_us(line.alpha)}, rate: {_rate(line.beta)}}}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3f}us"


def _rate(beta: float) -> str:
    return f"{1e-9 / beta:.4f}GB/s" if beta > 1e-15 else "1000000GB/s"


def _bytes(n: int) -> str:
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if n and n % (1 << shift) == 0:
            return f"{n >> shift}{unit}"
    return str(n)
