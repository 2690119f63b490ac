# SPDX-License-Identifier: Apache-2.0
"""The tuning file: what is written is read again, mistakes are named with their place, ranks adopt rank 0's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetccl.core.cost import CostTable, IslandCost, Line, PathCost
from hetccl.core.tuning import adopt, load_tuning, mismatch, parse_tuning, published, render_tuning
from hetccl.errors import ConfigError

TABLE = CostTable(
    {"shm": PathCost(1.5e-6, 1 / 8e9, 2e-7), "tcp": PathCost(2e-5, 1 / 1e9, 3e-6)},
    {"sim-a": IslandCost({"reduce_scatter": Line(4e-5, 1 / 3e9), "any": Line(1e-5, 1 / 5e9)}, Line(3e-6, 1 / 6e9))},
    Line(1e-7, 1 / 12e9),
    "sim-a 0,1 on 0,0; sim-b 2,3 on 0,0",
    {"all_reduce": {"owners": ((64, 9.31e-5), (65536, 1.64e-4)), "ring": ((64, 1e-4), (1 << 20, 2e-3))}},
)


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.yaml"
    path.write_text(render_tuning(TABLE, "a heading"))
    found = load_tuning(str(path))
    assert found.job == TABLE.job and found.measured.keys() == TABLE.measured.keys()
    for name, points in TABLE.measured["all_reduce"].items():
        got = found.measured["all_reduce"][name]
        assert [n for n, _ in got] == [n for n, _ in points]
        assert [t for _, t in got] == pytest.approx([t for _, t in points], rel=1e-3)
    assert found.paths["tcp"].latency == pytest.approx(2e-5)
    assert found.vendors["sim-a"].calls["reduce_scatter"].beta == pytest.approx(1 / 3e9)
    assert parse_tuning(render_tuning(found)) == parse_tuning(render_tuning(parse_tuning(render_tuning(found))))


def test_a_table_travels_as_json() -> None:
    assert CostTable.from_json(TABLE.to_json()) == TABLE
    assert CostTable().digest == "" and TABLE.digest


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("paths: {shm: {latency: 1us}}", "tuning.yaml:1:14: paths.shm lacks rate"),
        ("paths: {shm: {latency: 1, rate: 1GB/s}}", "paths.shm.latency: '1' is no time"),
        ("vendors:\n  x: {copy: {latency: 1us, rate: 1GB/s}}", "tuning.yaml:2:6: vendors.x lacks calls"),
        ("vendors: {x: {copy: {latency: 1us, rate: 1GB/s}, calls: {al_reduce: {latency: 1us, rate: 1GB/s}}}}",
         "al_reduce is no call"),
        ("measured: {all_reduc: {owners: {4: 1us}}}", "all_reduc is no operation"),
        ("measured: {all_reduce: {owners: {many: 1us}}}", "'many' is no size"),
        ("measured: {all_reduce: {owners: {}}}", "needs at least one size"),
        ("path: {}", "did you mean paths"),
        ("version: 2", "'2' is none of them"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong.replace("?", r"\?")):
        parse_tuning(text)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tuning("/nowhere/tuning.yaml")


def test_ranks_adopt_rank_0s_table() -> None:
    sent = published(TABLE)
    assert adopt(None, sent, 3) == TABLE
    assert adopt(TABLE, sent, 3) == TABLE
    with pytest.raises(ConfigError, match="HETCCL_TUNING of rank 3"):
        adopt(CostTable(job="other"), sent, 3)
    with pytest.raises(ConfigError, match="did not arrive as it was sent"):
        adopt(None, {**sent, "table": sent["table"].replace("owners", "ring")}, 3)
    assert "rank 0 has none" in mismatch([1, 2], "")
