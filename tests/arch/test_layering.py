# SPDX-License-Identifier: Apache-2.0
"""The arrows between the folders. Reads .py, .pyx, .pxd and the includes of .c and .h, since import linters are blind
to Cython. Imports inside functions count as well: they are arrows too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LEAVES = ("errors", "types")  # import nothing of ours; anybody may use them
TOP = ("tables", "dynlib")  # every layer but native may use them

# Part of the package -> parts it may import, besides itself. "root" is the package itself (hetccl/__init__.py).
ARROWS: dict[str, set[str]] = {
    "spi": set(),  # spi.h and spi.pxd: types only
    "leaves": set(),
    "native": {"spi", "leaves"},
    "top": {"spi", "leaves", "native"},
    "vendors.base": {"spi", "leaves", "top", "native"},
    "transports.base": {"spi", "leaves", "top", "native", "vendors.base"},
    "vendors": {"spi", "leaves", "top", "native", "vendors.base"},
    "transports": {"spi", "leaves", "top", "native", "vendors.base", "transports.base"},
    "core": {"spi", "leaves", "top", "native", "vendors.base", "transports.base", "root"},
    "testing": {"spi", "leaves", "top", "native", "vendors.base", "transports.base", "core", "root"},
    "torch": {"spi", "leaves", "top", "native", "vendors.base", "core", "root"},
    "cli": {"spi", "leaves", "top", "native", "vendors.base", "transports.base", "core", "testing", "root"},
    "root": {"spi", "leaves", "top", "native", "vendors.base", "transports.base", "core"},
    # hetccl/demo and the like: programs of users, which see what users see
    "programs": {"leaves", "top", "root", "torch", "cli", "core"},
    "plugins": {"spi", "leaves", "top", "native", "vendors.base", "vendors", "transports.base", "root"},
}

_MODULES = {**dict.fromkeys(LEAVES, "leaves"), **dict.fromkeys(TOP, "top"), "spi": "spi", "__init__": "root"}

IMPORT = re.compile(r"^\s*(?:cimport|import)\s+([\w.]+(?:\s*,\s*[\w.]+)*)", re.M)
FROM = re.compile(r"^\s*from\s+(\.*[\w.]*)\s+c?import\s+(\([^)]*\)|[^\n#]+)", re.M)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
EXTERN = re.compile(r'^\s*cdef extern from\s+"([^"]+)"', re.M)


def test_arrows_hold(root: Path) -> None:
    assert violations(root) == []


def test_only_the_torch_back_end_imports_torch(root: Path) -> None:
    assert torch_importers(root) == []


@pytest.mark.parametrize(
    ("path", "text", "arrow"),
    [
        ("hetccl/core/bad.py", "from hetccl.vendors.sim import driver\n", "core -> vendors"),
        ("hetccl/core/lazy.py", "def f():\n    import hetccl.transports.shm.driver\n", "core -> transports"),
        ("hetccl/vendors/foo/bad.py", "from hetccl.core import communicator\n", "vendors -> core"),
        ("hetccl/vendors/foo/bad.pyx", "from hetccl.core.plan cimport Plan\n", "vendors -> core"),
        ("hetccl/vendors/foo/bad.pxd", "cimport hetccl.core.plan\n", "vendors -> core"),
        ("hetccl/vendors/foo/bad.py", "from hetccl.vendors.sim.driver import SimDriver\n", "vendors -> vendors"),
        ("hetccl/transports/foo/bad.py", "from ..shm import driver\n", "transports -> transports"),
        ("hetccl/transports/foo/bad.pyx", "from hetccl.vendors.shaped cimport (\n    A)\n", "transports -> vendors"),
        ("hetccl/native/bad.pxd", "from hetccl.tables cimport Table\n", "native -> top"),
        ("hetccl/native/bad.c", '#include "../core/plan.h"\n', "native -> core"),
        ("hetccl/vendors/foo/bad.pyx", 'cdef extern from "../../core/plan.h":\n    pass\n', "vendors -> core"),
        ("plugins/hetccl-vendor-foo/hetccl_vendor_foo/bad.py", "import hetccl.core.plan\n", "plugins -> core"),
        ("plugins/hetccl-vendor-foo/hetccl_vendor_foo/bad.py", "import hetccl_vendor_bar\n", "plugins -> plugins"),
        ("hetccl/cli/bad.py", "from hetccl_vendor_foo import driver\n", "cli -> plugins"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, text: str, arrow: str) -> None:
    for existing in ("core/plan.py", "core/plan.h", "vendors/sim/driver.py", "vendors/base.py", "vendors/shaped.pyx",
                     "transports/shm/driver.py", "tables.pyx"):
        _write(tmp_path / "hetccl" / existing, "")
    assert violations(tmp_path) == []
    _write(tmp_path / path, text)
    assert [found.split(": ")[1].split(" (")[0] for found in violations(tmp_path)] == [arrow]


def test_a_planted_torch_import_is_found(tmp_path: Path) -> None:
    _write(tmp_path / "hetccl/torch/good.py", "import torch\n")
    _write(tmp_path / "hetccl/cli/bad.py", "def f():\n    from torch import nn\n")
    assert torch_importers(tmp_path) == ["hetccl/cli/bad.py"]


def violations(root: Path) -> list[str]:
    """Every forbidden arrow as 'file: from -> to (module)'."""
    found = []
    for path in _sources(root):
        here = part_of(path.relative_to(root))
        for target, module in _targets(root, path):
            if target.part not in ARROWS[here.part] and not here.shares_folder(target):
                found.append(f"{path.relative_to(root)}: {here.part} -> {target.part} ({module})")
    return found


def torch_importers(root: Path) -> list[str]:
    return [
        str(path.relative_to(root))
        for path in _sources(root)
        if part_of(path.relative_to(root)).part not in ("torch", "programs")
        and any(module.split(".")[0] == "torch" for module in _modules(root, path))
    ]


class Part:
    """A layer, and inside `vendors`, `transports` and `plugins` the driver's own folder ("" for shared bodies)."""

    def __init__(self, part: str, folder: str = "") -> None:
        self.part, self.folder = part, folder

    def shares_folder(self, other: Part) -> bool:
        """Within one layer: the same driver, or a body that all drivers of the layer share."""
        return self.part == other.part and other.folder in ("", self.folder)


def part_of(path: Path) -> Part:
    """The part that a file, relative to the root, belongs to."""
    parts = path.parts
    if parts[0] == "plugins":
        return Part("plugins", parts[1])
    if len(parts) == 2:
        name = path.name.split(".")[0]
        return Part(_MODULES.get(name, "programs"))
    layer = parts[1]
    if layer in _MODULES:
        return Part(_MODULES[layer])
    if layer == "include":
        return Part("spi")
    if layer in _MODULES:
        return Part(_MODULES[layer])
    if layer in ("vendors", "transports"):
        if parts[2].split(".")[0] == "base":
            return Part(f"{layer}.base")
        return Part(layer, parts[2] if len(parts) > 3 else "")
    return Part(layer if layer in ARROWS else "programs")


def _targets(root: Path, path: Path) -> list[tuple[Part, str]]:
    """Parts of ours that a file uses, with the name under which it does."""
    found = []
    for module in _modules(root, path):
        file = _file_of(root, module)
        if file is not None:
            found.append((part_of(file), module))
    for header in INCLUDE.findall(_text(path)) + EXTERN.findall(_text(path)):
        for folder in (path.parent, root / "hetccl/include", root / "hetccl/native"):
            if (folder / header).is_file():
                found.append((part_of((folder / header).resolve().relative_to(root.resolve())), header))
                break
    return found


def _modules(root: Path, path: Path) -> list[str]:
    """Dotted names that a file imports, cimports included. `from a import b` is a.b where that is a module, else a."""
    if path.suffix in (".c", ".h"):
        return []
    found: list[str] = []
    for base, names in _imports(path):
        if base.startswith("."):
            up = len(base) - len(base.lstrip("."))
            package = path.relative_to(root).parts[:-up]
            base = ".".join([*package, *filter(None, [base.lstrip(".")])])
        inner = [f"{base}.{name}" for name in names if _file_of(root, f"{base}.{name}") is not None]
        found += inner if inner and len(inner) == len(names) else [base, *inner]
    return found


def _imports(path: Path) -> list[tuple[str, list[str]]]:
    """(module, names taken from it) of each import statement."""
    text = _text(path)
    if path.suffix == ".py":
        found: list[tuple[str, list[str]]] = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found += [(alias.name, []) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append(("." * node.level + (node.module or ""), [alias.name for alias in node.names]))
        return found
    found = [(name.strip(), []) for names in IMPORT.findall(text) for name in names.split(",")]
    for base, names in FROM.findall(text):
        words = [name.split(" as ")[0].strip() for name in names.strip("()\n ").split(",")]
        found.append((base, [word for word in words if word.isidentifier()]))
    return found


def _file_of(root: Path, module: str) -> Path | None:
    """The file of one of our modules, relative to the root, or None for somebody else's."""
    parts = module.split(".")
    if parts[0].startswith(("hetccl_vendor_", "hetccl_transport_")):
        return Path("plugins", parts[0].replace("_", "-"), *parts)
    if parts[0] != "hetccl":
        return None
    if parts == ["hetccl"]:
        return Path("hetccl/__init__.py")
    for suffix in (".py", ".pyx", ".pxd"):
        if root.joinpath(*parts).with_suffix(suffix).is_file():
            return Path(*parts).with_suffix(suffix)
    return Path(*parts, "__init__.py") if root.joinpath(*parts).is_dir() else None


def _sources(root: Path) -> list[Path]:
    found = []
    for path in sorted([*(root / "hetccl").rglob("*"), *(root / "plugins").rglob("*")]):
        inner = path.relative_to(root).parts
        tests = inner[0] == "plugins" and ("tests" in inner or path.name == "setup.py")
        if path.suffix in (".py", ".pyx", ".pxd", ".c", ".h") and not tests and "build" not in inner:
            found.append(path)
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
