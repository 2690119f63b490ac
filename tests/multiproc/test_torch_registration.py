# SPDX-License-Identifier: Apache-2.0
"""How torch finds hetccl, and that a broken hetccl never breaks `import torch`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def python(source: str, folder: Path | None = None, **env: str) -> str:
    """What a fresh interpreter prints. `folder` goes onto its path first."""
    path = os.pathsep.join([*([str(folder)] if folder else []), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": path, **env},
        timeout=90,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    """A folder that installs the entry point as a wheel of hetccl does, whether or not hetccl is installed here."""
    info = tmp_path / "hetccl_entry_point-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hetccl-entry-point\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nhetccl = hetccl.torch:_autoload\n")
    return tmp_path


def test_autoload_registers(entry_point: Path) -> None:
    out = python("import torch, torch.distributed as d; print('hetccl' in d.Backend.backend_list)", entry_point)
    assert out.split() == ["True"]


def test_without_autoload_an_import_registers(entry_point: Path) -> None:
    source = """
import torch, torch.distributed as d
before = "hetccl" in d.Backend.backend_list
import hetccl.torch
print(before, "hetccl" in d.Backend.backend_list)
"""
    assert python(source, entry_point, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split() == ["False", "True"]


def test_importing_hetccl_torch_first_works(entry_point: Path) -> None:
    source = "import hetccl.torch, torch.distributed as d; print(d.Backend.backend_list.count('hetccl'))"
    assert python(source, entry_point).split() == ["1"]


def test_registering_twice_and_other_defaults() -> None:
    source = """
import torch, torch.distributed as d
before = dict(d.Backend.default_device_backend_map)
import hetccl.torch
hetccl.torch.register(); hetccl.torch.register()
print(d.Backend.backend_list.count("hetccl"), before == d.Backend.default_device_backend_map, "npu" in before)
print(d.Backend.backend_capability["hetccl"])
"""
    lines = python(source, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert lines[0].split() == ["1", "True", "False"]
    assert lines[1] == "['cpu', 'cuda', 'xpu']"


def test_autoload_imports_no_core(entry_point: Path) -> None:
    source = """
import sys, torch
print([m for m in sys.modules if m.startswith(("hetccl.core", "hetccl.torch.", "hetccl.vendors", "stevedore"))])
"""
    assert python(source, entry_point).strip() == "[]"


def test_a_broken_core_does_not_break_torch(entry_point: Path) -> None:
    source = """
import sys
sys.modules["hetccl.core.communicator"] = None  # importing it now fails
import torch, torch.distributed as d
print(torch.ones(2).sum().item(), "hetccl" in d.Backend.backend_list)
try:
    d.init_process_group("hetccl", store=d.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print("refused", error)
"""
    lines = python(source, entry_point).splitlines()
    assert lines[0].split() == ["2.0", "True"]
    assert lines[1].startswith("refused")


def test_autoload_never_raises() -> None:
    source = """
import warnings, torch, hetccl.torch
def broken(): raise RuntimeError("no such thing")
hetccl.torch.register = broken
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    hetccl.torch._autoload()
print(seen[0].message)
"""
    assert "no such thing" in python(source)


def test_errors_are_torch_errors_too_and_can_be_pickled() -> None:
    source = """
import pickle, torch.distributed as dist
from hetccl import errors
from hetccl.torch._errors import for_torch
for name in errors.__all__:
    error = for_torch(getattr(errors, name)("what happened", ranks=[3]))
    back = pickle.loads(pickle.dumps(error))
    assert isinstance(back, getattr(errors, name)) and isinstance(back, dist.DistBackendError), name
    assert str(back) == "what happened" and back.ranks == [3]
assert for_torch(KeyError("x")).args == ("x",)
print("ok")
"""
    assert python(source).split() == ["ok"]


def test_wrong_options_are_named() -> None:
    source = """
import hetccl.torch, torch.distributed as d
from hetccl.errors import ConfigError
for options in ({"rank": "host"}, 7):
    try:
        d.init_process_group("hetccl", store=d.HashStore(), rank=0, world_size=1, pg_options=options)
    except ConfigError as error:
        print(isinstance(error, d.DistBackendError), "pg_options" in str(error))
"""
    assert python(source).split() == ["True"] * 4
