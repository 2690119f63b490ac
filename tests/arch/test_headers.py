# SPDX-License-Identifier: Apache-2.0
"""Every file that a person wrote names its licence in its first line (in the second where the first one is #!)."""

from __future__ import annotations

from pathlib import Path

LINE = "SPDX-License-Identifier: " + "Apache-2.0"
# Taken word for word from elsewhere, empty by nature, joined into another file, or without comments.
EXEMPT_NAMES = {"LICENSE", "py.typed", ".gitignore", ".gitkeep"}
EXEMPT_SUFFIXES = {".json", ".csv", ".txt", ".tsv", ".gz"}


def test_every_file_names_its_licence(files: list[Path], root: Path) -> None:
    bad = [str(path.relative_to(root)) for path in files if not exempt(path) and not has_line(path)]
    assert bad == [], f"first line must hold '{LINE}'"


def test_a_file_without_the_line_is_found(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(f"#!/usr/bin/env python3\n# {LINE}\n")
    bad.write_text(f"import os\n\n\n# {LINE}\n")
    assert has_line(good) and not has_line(bad)


def exempt(path: Path) -> bool:
    fragment = path.parent.name == "changelog.d" and path.name != "README.md"
    return path.name in EXEMPT_NAMES or path.suffix in EXEMPT_SUFFIXES or fragment


def has_line(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines()[:2]
    if lines and not lines[0].startswith(("#!", "<?xml")):
        lines = lines[:1]
    return any(LINE in line for line in lines)
