# SPDX-License-Identifier: Apache-2.0
"""The stand-in libraries of devices, built once for all tests of this folder."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BUILDER = Path(__file__).parents[1] / "standins" / "build.py"


@pytest.fixture(scope="session")
def build(require: Callable[[object, str, str], None]) -> Any:
    """tests/standins/build.py, which builds them."""
    require(shutil.which("gcc") and shutil.which("g++"), "a C and C++ compiler", "apt-get install g++")
    spec = importlib.util.spec_from_file_location("standins_build", BUILDER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def environment(build: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which ranks find the stand-ins of both vendors."""
    folder = tmp_path_factory.mktemp("standins")
    build.build(folder)
    return dict(build.environment(folder))
