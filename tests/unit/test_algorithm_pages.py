# SPDX-License-Identifier: Apache-2.0
"""Every algorithm has a page and a picture in the manual."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetccl.core.planner import ALGORITHMS

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
PAIRS = [(op.label, name) for op, names in ALGORITHMS.items() for name in names]


@pytest.mark.parametrize(("op", "name"), PAIRS, ids=[f"{op}-{name}" for op, name in PAIRS])
def test_there_is_a_page_with_its_picture(op: str, name: str) -> None:
    page = (FOLDER / f"{op}-{name}.md").read_text()
    assert page.splitlines()[1] == f"# {op} by {name}" and f"({op}-{name}.svg)" in page
    for word in ("| border bytes |", "| time |", "| good for |"):
        assert word in page
    assert "<svg" in (FOLDER / f"{op}-{name}.svg").read_text()


def test_there_are_no_pages_of_what_is_gone() -> None:
    assert {p.stem for p in FOLDER.glob("*.md")} == {f"{op}-{name}" for op, name in PAIRS}
