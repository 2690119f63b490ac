# SPDX-License-Identifier: Apache-2.0
"""hetccl.yaml: what it says becomes a topology, and what is wrong is named with file, line and column."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hetccl.core.topology import Topology
from hetccl.core.topology_file import load_topology, parse_topology
from hetccl.core.topology_keys import KEYS
from hetccl.core.yaml_keys import parse_rate_text, parse_time_text, render_keys
from hetccl.errors import ConfigError

CLUSTER = """\
islands:
  amd: {vendor: rccl, ranks: 16, hosts: 2, rails: 4, rate: 50GB/s}
  nvidia:
    vendor: nccl
    ranks: 16
    hosts: 2
    rails: [50GB/s, 25GB/s, 400Gbit/s, 1GB/s]
    border: 5
    inside: {rate: 400GB/s, latency: 10us}
  cpu: {vendor: oneccl, ranks: 32-33, hosts: [head], measured: 3GB/s}
links:
  - {between: [amd, cpu], rate: none}
  - {between: [nvidia, amd], rate: 100GB/s, latency: 5us}
"""


def test_a_cluster_becomes_a_topology() -> None:
    top = parse_topology(CLUSTER).topology()
    assert [i.name for i in top.islands] == ["rccl@amd", "nccl@nvidia", "oneccl@cpu"]
    assert [i.size for i in top.islands] == [16, 16, 2]
    assert [i.host_memory for i in top.islands] == [False, False, True]
    amd, nvidia, cpu = top.islands
    assert amd.borders == amd.ranks and set(amd.speeds) == {25e9}  # two ranks share a rail
    assert nvidia.border == (16, 17, 18, 24, 26)  # three on the first host, the fastest rails first
    assert nvidia.border_rate == 2 * 126e9  # every rail is somebody's
    assert nvidia.inner_rate == 400e9 and nvidia.inner_latency == pytest.approx(1e-5)
    assert cpu.speeds == (1.5e9, 1.5e9)
    assert not top.link(0, 2).direct and top.link(2, 1).direct
    assert top.link(1, 0).rate == 100e9
    assert top.hosts[0] == "amd-0" and top.hosts[15] == "amd-1" and top.hosts[33] == "head"


def test_a_topology_travels_as_json() -> None:
    top = parse_topology(CLUSTER).topology()
    back = Topology.from_json(json.loads(json.dumps(top.to_json())))
    assert back == top and back.digest == top.digest


def test_the_digest_covers_the_content_and_nothing_else() -> None:
    first = parse_topology(CLUSTER)
    assert parse_topology("# a comment\n" + CLUSTER, "other.yaml").digest == first.digest
    for old, new in (("rate: none", "rate: 1GB/s"), ("border: 5", "border: 4"), ("hosts: 2", "hosts: 4")):
        changed = parse_topology(CLUSTER.replace(old, new, 1))
        assert changed.digest != first.digest
        assert changed.topology().digest != first.topology().digest


def test_counts_take_the_ranks_that_nobody_names() -> None:
    text = "islands:\n a: {vendor: x, ranks: 2}\n b: {vendor: y, ranks: [0, 3]}\n c: {vendor: y, ranks: 1}"
    top = parse_topology(text)
    assert {i.label: i.ranks for i in top.topology().islands} == {"a": (1, 2), "b": (0, 3), "c": (4,)}
    assert [str(s) for s in top.rank_specs()] == ["y@b", "x@a", "x@a", "y@b", "y@c"]


def test_hosts_by_number_of_ranks_and_shared_by_islands() -> None:
    text = "islands:\n a: {vendor: x, ranks: 3, hosts: {n1: 1, n2: 2}}\n b: {vendor: y, ranks: 1, hosts: n1}"
    assert parse_topology(text).topology().hosts == ("n1", "n2", "n2", "n1")


def test_what_if() -> None:
    top = parse_topology(CLUSTER, sets=["islands.amd.rails=8", "links.1.rate=3GB/s", "chunk=64K"]).topology()
    assert set(top.islands[0].speeds) == {50e9}
    assert top.link(0, 1).rate == 3e9
    assert top.chunk_bytes == 65536


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("islands.amdd.rails=8", "has no amdd there; did you mean amd?"),
        ("islands.amd.rail=8", "--set islands.amd.rail=8: islands.amd.rail is no key; did you mean rails?"),
        ("islands.amd.rails", "write path=value"),
        ("islands.amd.rails=", "there is no value"),
        ("islands.amd.rails=many", "islands.amd.rails: 'many' is no whole number"),
        ("version.x=3", "has no version there"),
    ],
)
def test_a_wrong_what_if_is_named(what: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(CLUSTER, sets=[what])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: [", 1, 5, "is no YAML"),
        ("- 1", 1, 1, "the file is a list; expected keys and values with version, islands, links, chunk"),
        ("islands: {}", 1, 10, "islands is empty"),
        ("islands: 3", 1, 10, "islands is '3'; expected keys and values"),
        ("islnds: {}", 1, 1, "islnds is no key; did you mean islands?"),
        ("version: 2\nislands: {a: {vendor: x, ranks: 1}}", 1, 10, "version: '2' is none of them"),
        ("islands:\n  a: {vendor: x}", 2, 6, "islands.a lacks ranks"),
        ("islands:\n  a: {vendor: x, rnks: 2}", 2, 18, "islands.a.rnks is no key; did you mean ranks?"),
        ("islands:\n  a: {vendor: x, ranks: 2, ranks: 3}", 2, 28, "ranks stands there twice, first in line 2"),
        ("islands:\n  a: {vendor: x, ranks: 0}", 2, 25, "0 is not within"),
        ("islands:\n  a: {vendor: x, ranks: two}", 2, 25, "'two' is neither a rank nor a range as in 0-7"),
        ("islands:\n  a: {vendor: x, ranks: 5-2}", 2, 25, "'5-2' is no range"),
        ("islands:\n  a: {vendor: x, ranks: []}", 2, 25, "there is no rank"),
        ("islands:\n  a: {vendor: [x], ranks: 2}", 2, 15, "a list is not a name"),
        ("islands:\n  a: {vendor: x, ranks: [0, 1]}\n  b: {vendor: x, ranks: [1]}", 3, 26,
         "rank 1 stands there twice, first in hetccl.yaml:2:29"),
        ("islands:\n  a: {vendor: x, ranks: [0, 2]}", 2, 29, "rank 1 is in no island"),
        ("islands:\n  a: {vendor: x, ranks: 2, hosts: 3}", 2, 35, "2 ranks do not divide among 3 hosts"),
        ("islands:\n  a: {vendor: x, ranks: 2, hosts: {n: 3}}", 2, 35, "they hold 3 ranks, but the island has 2"),
        ("islands:\n  a: {vendor: x, ranks: 2, border: [5]}", 2, 37, "rank 5 is not in island a (ranks 0-1)"),
        ("islands:\n  a: {vendor: x, ranks: 2, rate: fast}", 2, 34, "'fast' is no rate"),
        ("islands:\n  a: {vendor: x, ranks: 2, latency: 5}", 2, 37, "'5' is no time"),
        ("islands:\n  a: {vendor: x, ranks: 2, rails: [1GB/s], rate: 1GB/s}", 2, 50, "leave one of them out"),
        ("islands:\n  a: {vendor: x, ranks: 2, inside: {rat: 1GB/s}}", 2, 37, "islands.a.inside.rat is no key"),
        ("islands:\n  a: {vendor: x, ranks: 1}\nlinks:\n  - {between: [a, c]}", 4, 19, "there is no island 'c'"),
        ("islands:\n  a: {vendor: x, ranks: 1}\nlinks:\n  - {between: [a, a]}", 4, 15, "and itself"),
        ("islands:\n  a: {vendor: x, ranks: 1}\n  b: {vendor: x, ranks: 1}\nlinks:\n  - {between: [a, b], rate: none}",
         5, 3, "no way leads from a to b"),
        ("islands:\n  a: {vendor: x, ranks: 1}\n  b: {vendor: x, ranks: 1}\nlinks:\n  - {between: [a, b]}\n"
         "  - {between: [b, a]}", 6, 5, "stands there twice, first in hetccl.yaml:5:5"),
        ("islands:\n  a: {vendor: x, ranks: 1}\nchunk: 3", 3, 8, "chunk: 3 is not within 4K .. 1G"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text)
    assert str(caught.value).startswith(f"hetccl.yaml:{line}:{column}: "), caught.value
    assert words in str(caught.value)
    assert (caught.value.line, caught.value.column) == (line, column)  # type: ignore[attr-defined]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        load_topology(str(tmp_path / "none.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_topology(str(tmp_path / "bytes.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match="the file lacks islands"):
        load_topology(str(tmp_path / "empty.yaml"))


@pytest.mark.parametrize(
    ("text", "rate"), [("50GB/s", 50e9), ("400Gbit/s", 50e9), ("400Gb/s", 50e9), ("1.5M", 1.5e6), ("7", 7.0)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate_text(text) == rate


@pytest.mark.parametrize("text", ["0", "-1GB/s", "GB/s", "1XB/s", "1e9", ""])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError):
        parse_rate_text(text)


def test_times() -> None:
    assert parse_time_text("2.5us") == pytest.approx(2.5e-6)
    with pytest.raises(ValueError):
        parse_time_text("2.5")


def test_the_reference_has_every_key() -> None:
    text = render_keys(KEYS)
    assert all(f"`{k.path}`" in text for k in KEYS)
    assert len({k.path for k in KEYS}) == len(KEYS)


def test_a_large_cluster_is_read_at_once() -> None:
    one = "{vendor: nccl, ranks: 256, hosts: 32, rails: 8, rate: 50GB/s, border: 64}"
    text = "islands:\n" + "".join(f"  i{k}: {one}\n" for k in range(64))
    started = time.perf_counter()
    assert parse_topology(text).topology().size == 16384
    assert time.perf_counter() - started < 2


def test_a_part_of_the_ranks() -> None:
    text = (
        "islands:\n a: {vendor: x, ranks: [0, 2, 4], border: [2], hosts: {m: 1, n: 2}}\n b: {vendor: y, ranks: [1]}\n"
        " c: {vendor: x, ranks: [3]}\nlinks:\n - {between: [b, c], rate: none}\n - {between: [a, c], rate: 2GB/s}"
    )
    whole = parse_topology(text)
    part = whole.part([4, 2, 3])  # numbered anew: 0, 1, 2
    top = part.topology()
    assert [(i.label, i.ranks, i.borders) for i in top.islands] == [("a", (0, 1), (1,)), ("c", (2,), (2,))]
    assert top.hosts[:2] == ("n", "n") and top.link(0, 1).rate == 2e9
    assert [str(s) for s in part.rank_specs()] == ["x@a", "x@a", "x@c"]
    assert part.digest != whole.digest != whole.part([0, 2, 3]).digest
    assert whole.part([0, 1]).topology().islands[0].border == ()  # its border rank is no member: all may
    with pytest.raises(ConfigError, match="no way leads from b to c inside this group"):
        whole.part([1, 3])
