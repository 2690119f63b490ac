# SPDX-License-Identifier: Apache-2.0
"""How a job's make-up is written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetccl.core.ranks import RankSpec, check_size, format_ranks, parse_ranks
from hetccl.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("host", [("host", "")]),
        ("oneccl:2,host:2", [("oneccl", ""), ("oneccl", ""), ("host", ""), ("host", "")]),
        ("host,sim-a,host,sim-b", [("host", ""), ("sim-a", ""), ("host", ""), ("sim-b", "")]),
        ("host@a:1,host@b:1", [("host", "a"), ("host", "b")]),
        (" host @ left : 2 , sim-a ", [("host", "left"), ("host", "left"), ("sim-a", "")]),
    ],
)
def test_reads(spec: str, ranks: list[tuple[str, str]]) -> None:
    assert parse_ranks(spec) == [RankSpec(*one) for one in ranks]


@pytest.mark.parametrize(
    ("spec", "position", "says"),
    [
        ("", None, "empty"),
        ("  ", None, "empty"),
        ("host,,host", 5, "between two commas"),
        ("host:2,", 7, "between two commas"),
        ("host:0", 5, "'0' is no count"),
        ("host:", 5, "'' is no count"),
        ("host,sim:-1", 9, "'-1' is no count"),
        ("host:1e9", 5, "'1e9' is no count"),
        ("host:99999999", 0, "more than"),
        ("host:999999999999999999999", 5, "is no count"),
        ("2host", 0, "'2host' is no vendor"),
        ("host@:2", 5, "'' is no label"),
        ("host@a b", 5, "'a b' is no label"),
        ("host;sim", 0, "is no vendor"),
        ("host:2:3", 5, "'2:3' is no count"),
    ],
)
def test_says_what_is_wrong_and_where(spec: str, position: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_ranks(spec)
    assert "oneccl:2,host:2" in str(caught.value)
    if position is not None:
        assert caught.value.facts["position"] == position
        assert f"position {position + 1}" in str(caught.value)


name = st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z])?", fullmatch=True)
rank = st.builds(RankSpec, name, st.sampled_from(["", "a", "rack.1"]))


@given(st.lists(rank, min_size=1, max_size=20))
def test_what_is_written_is_read_again(ranks: list[RankSpec]) -> None:
    assert parse_ranks(format_ranks(ranks)) == ranks


def test_writes_runs_as_counts() -> None:
    assert format_ranks(parse_ranks("host,host,sim-a,host@x,host@x:2")) == "host:2,sim-a,host@x:3"


def test_the_size_must_be_the_jobs() -> None:
    check_size(parse_ranks("host:2"), 2)
    with pytest.raises(ConfigError, match=r"host:3 describes 3 ranks, but the job has 4"):
        check_size(parse_ranks("host:3"), 4)
