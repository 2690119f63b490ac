# SPDX-License-Identifier: Apache-2.0
"""The keys of hetccl.yaml, declared once: what each accepts, its default and its text. The manual's reference is made
from this table."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hetccl.core.config import parse_bytes
from hetccl.core.ranks import MAX_RANKS
from hetccl.core.yaml_keys import Key, Wrong, a_name, a_number, a_rate, a_time, one_of, text_of

__all__ = ["ISLAND_NAME", "KEYS", "Hosts"]

MAX_HOSTS = 1 << 16


@dataclass(frozen=True)
class Hosts:
    """Hosts of an island: a number of them, names, or names with their numbers of ranks."""

    number: int = 0
    names: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()

    def spread(self, island: str, ranks: int) -> tuple[str, ...]:
        """The host's name of each rank, in rank order. Raises `ValueError` if ranks and hosts do not fit."""
        if self.counts:
            if sum(self.counts) != ranks:
                raise ValueError(f"they hold {sum(self.counts)} ranks, but the island has {ranks}")
            return tuple(n for n, count in zip(self.names, self.counts, strict=True) for _ in range(count))
        names = self.names or tuple(f"{island}-{i}" for i in range(self.number))
        if ranks % len(names):
            raise ValueError(
                f"{ranks} ranks do not divide among {len(names)} hosts; give each its number, as in "
                "{node1: 3, node2: 2}"
            )
        return tuple(n for n in names for _ in range(ranks // len(names)))


def numbers(node: Any) -> list[tuple[int, Any]]:
    """ "0-7, 16-23" or [0, 1, "4-6"]: each number, and where it stands."""
    found: list[tuple[int, Any]] = []
    if node.id == "mapping":
        raise Wrong(node, "keys and values are no ranks")
    pieces = (
        [(text_of(i, "a rank"), i) for i in node.value]
        if node.id == "sequence"
        else [(piece.strip(), node) for piece in text_of(node, "a list of ranks").split(",")]
    )
    for text, at in pieces:
        match = re.fullmatch(r"(\d{1,8})(?:\s*-\s*(\d{1,8}))?", text)
        if not match:
            raise Wrong(at, f"{text!r} is neither a rank nor a range as in 0-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= MAX_RANKS:
            raise Wrong(at, f"{text!r} is no range of ranks below {MAX_RANKS}")
        found += [(rank, at) for rank in range(first, last + 1)]
    if not found:
        raise Wrong(node, "there is no rank")
    return found


def ranks(node: Any) -> int | list[tuple[int, Any]]:
    if node.id == "scalar" and re.fullmatch(r"\d+", node.value.strip()):
        return a_number(1, MAX_RANKS)(node)
    return numbers(node)


def border(node: Any) -> int | list[tuple[int, Any]]:
    if node.id == "scalar" and node.value.strip() == "all":
        return 0
    return ranks(node)


def hosts(node: Any) -> Hosts:
    if node.id == "scalar" and re.fullmatch(r"\d+", node.value.strip()):
        return Hosts(number=a_number(1, MAX_HOSTS)(node))
    if node.id == "scalar":
        return Hosts(names=(a_name(node),))
    counts: tuple[int, ...] = ()
    if node.id == "sequence":
        names = tuple(a_name(n) for n in node.value)
    else:
        names = tuple(a_name(key) for key, _ in node.value)
        counts = tuple(a_number(1, MAX_RANKS)(value) for _, value in node.value)
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice or not names:
        raise Wrong(node, f"{twice[0]} stands there twice" if twice else "there is no host")
    return Hosts(names=names, counts=counts)


def rails(node: Any) -> int | tuple[float, ...]:
    if node.id == "sequence":
        if not node.value:
            raise Wrong(node, "there is no rail")
        return tuple(a_rate(n) for n in node.value)
    return a_number(1, 1024)(node)


def link_rate(node: Any) -> float | None:
    """None: there is no direct way."""
    return None if node.id == "scalar" and node.value.strip() == "none" else a_rate(node)


def ends(node: Any) -> list[tuple[str, Any]]:
    if node.id != "sequence" or len(node.value) != 2:
        raise Wrong(node, "there must be two islands")
    return [(a_name(n), n) for n in node.value]


def message(node: Any) -> int:
    text = text_of(node, "a size")
    try:
        value = parse_bytes(text)
    except ValueError:
        raise Wrong(node, f"{text!r} is no size") from None
    if not 4096 <= value <= 1 << 30:
        raise Wrong(node, f"{text} is not within 4K .. 1G")
    return value - value % 64


RATE = 'a rate, as in "50GB/s" or "400Gbit/s" (powers of 1000)'
TIME = 'a time, as in "5us" or "1.5ms"'

ISLAND_NAME = Key("islands.*", "a name of letters, digits, _ . and -", "", "An island.", a_name)

KEYS: tuple[Key, ...] = (
        Key("version", "1", "1", "Version of this format.", one_of("1")),
        Key(
            "islands", "islands by their names, at most 8 in a running job", "",
            "Groups of ranks that one vendor's library serves together. The name is the label of HETCCL_RANKS.",
            required=True,
        ),
        Key("islands.*.vendor", "a vendor's name, as in nccl", "", "Whose library the island uses.", a_name, True),
        Key(
            "islands.*.ranks", "a number of ranks, or which: [0, 2, 4] or 0-7,16-23", "",
            "Ranks of the island. Islands with a number take the lowest ranks that no other names, in the order of the "
            "file.",
            ranks, True,
        ),
        Key(
            "islands.*.hosts", "a number, names, or names with numbers of ranks: {node1: 3, node2: 1}", "",
            "Hosts of the island; ranks fill one after the other. Islands that name the same host share it.", hosts,
        ),
        Key(
            "islands.*.border", "a number of ranks, which ranks, or all", "all",
            "Ranks that talk to other islands. Of a number, the ranks on the fastest rails are taken, hosts in turn.",
            border,
        ),
        Key(
            "islands.*.rails", "a number, or the rate of each: [50GB/s, 25GB/s]", "",
            "Network cards of one host. Shards are cut in proportion to the speed of the border ranks' cards.", rails,
        ),
        Key("islands.*.rate", RATE, "", "Of each rail, each way.", a_rate),
        Key("islands.*.latency", TIME, "", "Of one message over a rail.", a_time),
        Key(
            "islands.*.measured", RATE, "",
            "What all border ranks of the island reached together, each way. Goes before what the rails add up to.",
            a_rate,
        ),
        Key("islands.*.memory", "host or device", "by vendor", "Where buffers are.", one_of("host", "device")),
        Key("islands.*.inside", "rate and latency", "", "What the vendor's library was measured to do inside."),
        Key("islands.*.inside.rate", RATE, "", "Bytes a second that a rank moves in the library's calls.", a_rate),
        Key("islands.*.inside.latency", TIME, "", "Of the library's smallest call.", a_time),
        Key("links", "a list of links", "", "What is known of ways between islands; the others are direct."),
        Key("links[].between", "two islands, as in [amd, cpu]", "", "The islands.", ends, True),
        Key(
            "links[].rate", f'{RATE}, or "none"', "what the rails give",
            "All border ranks together, each way. none: there is no direct way, a third island relays.", link_rate,
        ),
        Key("links[].latency", TIME, "that of the rails", "Of one message.", a_time),
        Key("links[].measured", RATE, "", "What was measured; goes before `rate`.", a_rate),
        Key("chunk", "4K to 1G", "what the transports like", "Most bytes of one wire message.", message),
)  # fmt: skip
