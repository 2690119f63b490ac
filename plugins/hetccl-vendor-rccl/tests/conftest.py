# SPDX-License-Identifier: Apache-2.0
"""These tests run on stand-ins of the vendor's libraries (tests/standins): host memory and deferred streams."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hetccl_vendor_rccl.driver import RcclDriver

BUILDER = Path(__file__).resolve().parents[3] / "tests" / "standins" / "build.py"


@pytest.fixture(scope="session", autouse=True)
def standins(tmp_path_factory: pytest.TempPathFactory, require: Callable[[object, str, str], None]) -> Iterator[Path]:
    """Folder of the built stand-ins, which this process and the ranks that it starts take for the real libraries."""
    require(shutil.which("gcc") and shutil.which("g++"), "a C and C++ compiler", "apt-get install g++")
    spec = importlib.util.spec_from_file_location("standins_build", BUILDER)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    folder = tmp_path_factory.mktemp("standins")
    build.build(folder, build.AMD)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in build.environment(folder).items():
            patch.setenv(name, value)
        for shape in ("runtime_shape", "ccl_shape"):
            patch.setattr(RcclDriver, shape, build.by_path(getattr(RcclDriver, shape), folder))
        yield folder
