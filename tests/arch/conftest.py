# SPDX-License-Identifier: Apache-2.0
"""The project's own files, for the tests that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {"build", "dist", "_build", "generated", "__pycache__", "node_modules", "shared"}


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Every text file of the project that a person wrote, absolute, sorted."""
    found = sorted(_walk(ROOT))
    assert any(path.name == "spi.h" for path in found)
    return found


def _walk(folder: Path) -> list[Path]:
    found = []
    for path in folder.iterdir():
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in (".ci", ".github")
            if not hidden and path.name not in SKIPPED and not path.name.endswith(".egg-info"):
                found += _walk(path)
        elif path.suffix not in (".so", ".o", ".pyc", ".png", ".gz", ".log"):
            found.append(path)
    return found
