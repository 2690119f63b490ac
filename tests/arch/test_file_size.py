# SPDX-License-Identifier: Apache-2.0
"""A file holds one idea: no source file has more than 450 lines."""

from __future__ import annotations

from pathlib import Path

LIMIT = 450
SUFFIXES = {".py", ".pyx", ".pxd", ".pyi", ".c", ".h"}


def test_no_file_has_outgrown_one_idea(files: list[Path], root: Path) -> None:
    assert [f"{path.relative_to(root)}: {lines(path)}" for path in files if too_long(path)] == []


def test_a_long_file_is_found(tmp_path: Path) -> None:
    long, fits = tmp_path / "long.pyx", tmp_path / "fits.pyx"
    long.write_text("\n" * (LIMIT + 1))
    fits.write_text("\n" * LIMIT)
    assert too_long(long) and not too_long(fits)


def too_long(path: Path) -> bool:
    return path.suffix in SUFFIXES and lines(path) > LIMIT


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
