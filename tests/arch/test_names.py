# SPDX-License-Identifier: Apache-2.0
"""Nothing in the tree tells on which machine it was written: no folder of one developer's machine, no private host."""

from __future__ import annotations

import re
from pathlib import Path

# Put together here, so that this file does not match itself.
FOLDERS = "|".join("/" + name + "/" for name in ("wo" + "rk", "fa" + "rm", "opt/" + "wheels", "opt/" + "pypi"))
HOME = "/ho" + r"me/[a-z]\w*/"
PRIVATE = re.compile(rf"(?<![\w.-])(?:{FOLDERS}|{HOME})")


def test_no_private_path_or_host(files: list[Path], root: Path) -> None:
    assert [f"{path.relative_to(root)}: {hit}" for path in files for hit in private_names(path)] == []


def test_a_planted_path_is_found(tmp_path: Path) -> None:
    for number, text in enumerate(("cd /wo" + "rk/main", 'open("/fa' + 'rm/x")', "/ho" + "me/anna/x")):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        assert private_names(path), text
    (tmp_path / "fine.txt").write_text("docs/work/x .github/" + "wo" + "rkflows/ https://example.org/work")
    assert private_names(tmp_path / "fine.txt") == []


def private_names(path: Path) -> list[str]:
    return PRIVATE.findall(path.read_text(encoding="utf-8", errors="replace"))
