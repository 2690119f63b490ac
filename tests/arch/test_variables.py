# SPDX-License-Identifier: Apache-2.0
"""Every environment variable is declared once, with its text: in hetccl.core.config or as an option of a driver."""

from __future__ import annotations

import ast
import re
from pathlib import Path

DECLARING = ("Variable", "Option")
NAME = re.compile(r"HETCCL_[A-Z0-9_]+")
QUOTED = re.compile(r'"(HETCCL_[A-Z0-9_]+)(?:=[^"]*)?"')
# Of the build and of the tests; no program of ours reads them.
OURS_ONLY = {"HETCCL_EXT", "HETCCL_TEST_STRICT", "HETCCL_TEST_SEED", "HETCCL_TEST_FULL"}


def test_every_variable_in_code_is_declared(root: Path, files: list[Path]) -> None:
    sources = code(root, files)
    known = declared(sources)
    assert "HETCCL_RANKS" in known
    assert {f"{path.relative_to(root)}: {name}" for path in sources for name in used(path) - known - OURS_ONLY} == set()


def test_every_variable_is_declared_once(root: Path, files: list[Path]) -> None:
    found = [name for path in code(root, files) for name in declarations(path)]
    assert sorted(found) == sorted(set(found))


def test_every_variable_in_the_manual_is_declared(root: Path, files: list[Path]) -> None:
    known = declared(code(root, files)) | OURS_ONLY
    known |= {word for path in files if path.suffix in (".h", ".c") for word in NAME.findall(path.read_text())}
    pages = {path: set(NAME.findall(path.read_text())) for path in files if path.suffix == ".md"}
    assert {f"{path.relative_to(root)}: {name}" for path, names in pages.items() for name in names - known} == set()


def test_an_undeclared_variable_is_found(tmp_path: Path) -> None:
    declaring = 'V = Variable("HETCCL_KNOWN", "text")\nO = base.Option(name="HETCCL_OTHER", text="")\n'
    (tmp_path / "config.py").write_text(declaring)
    (tmp_path / "reader.py").write_text('import os\nos.environ["HETCCL_KNOWN"], os.getenv("HETCCL_SECRET_DOOR")\n')
    (tmp_path / "reader.c").write_text('int f(void) { return getenv("HETCCL_C_DOOR") != HETCCL_OK; }\n')
    sources = sorted(tmp_path.iterdir())
    assert declared(sources) == {"HETCCL_KNOWN", "HETCCL_OTHER"}
    unknown = {name for path in sources for name in used(path)} - declared(sources)
    assert unknown == {"HETCCL_SECRET_DOOR", "HETCCL_C_DOOR"}


def code(root: Path, files: list[Path]) -> list[Path]:
    """Our programs: the package and the plug-ins, without tests and the skeleton."""
    found = []
    for path in files:
        parts = path.relative_to(root).parts
        mine = parts[0] in ("hetccl", "plugins") and "tests" not in parts and "_template" not in parts
        if mine and path.suffix in (".py", ".pyx", ".pxd", ".c", ".h"):
            found.append(path)
    return found


def declared(sources: list[Path]) -> set[str]:
    return {name for path in sources for name in declarations(path)}


def declarations(path: Path) -> list[str]:
    """First argument, or `name`, of every Variable(...) and Option(...)."""
    if path.suffix != ".py":
        return []
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in DECLARING:
            named = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
            for value in [*node.args[:1], *named]:
                if isinstance(value, ast.Constant) and NAME.fullmatch(str(value.value)):
                    found.append(str(value.value))
    return found


def used(path: Path) -> set[str]:
    """Names that stand alone in a string, or with '=' after them as in an advice to the user."""
    if path.suffix != ".py":
        return set(QUOTED.findall(path.read_text()))
    texts = {str(node.value) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    return {match[0].rstrip("=") for text in texts if (match := re.match(r"HETCCL_[A-Z0-9_]+(=|$)", text))}
