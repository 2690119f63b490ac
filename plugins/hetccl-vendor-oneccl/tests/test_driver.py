# SPDX-License-Identifier: Apache-2.0
"""The driver without the library: what it looks for, what it says, what it sets, what it cleans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from hetccl_vendor_oneccl import driver, leftovers
from hetccl_vendor_oneccl.driver import OneCclDriver
from hetccl_vendor_oneccl.wheels import FOLDER, LIBRARIES

from hetccl.errors import PluginLoadError
from hetccl.vendors.base import VendorRequest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETCCL_HOME", str(tmp_path))
    monkeypatch.delenv("HETCCL_ONECCL_PATH", raising=False)
    return tmp_path


def test_probe_without_the_folder_names_the_mending_line(home: Path) -> None:
    found = OneCclDriver().probe()
    assert not found.ok and found.remedy == "Run `hetccl fetch oneccl`"
    assert str(home / FOLDER) in found.reason and "libccl.so.2" in found.reason
    with pytest.raises(PluginLoadError, match="hetccl fetch oneccl"):
        OneCclDriver().open(VendorRequest())


def test_probe_finds_the_folder_without_loading_it(home: Path) -> None:
    (home / FOLDER).mkdir()
    for name in LIBRARIES:
        (home / FOLDER / name).write_text("not loaded")
    found = OneCclDriver().probe()
    assert found.ok and found.details["version"] == "2022.2.0"
    before = dict(os.environ)
    with pytest.raises(PluginLoadError, match="cannot load"):
        OneCclDriver().open(VendorRequest())
    assert dict(os.environ) == before  # a failure sets nothing


def test_a_folder_named_by_the_user_goes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / FOLDER).mkdir()
    for name in LIBRARIES:
        (home / FOLDER / name).touch()
    monkeypatch.setenv("HETCCL_ONECCL_PATH", str(home / "elsewhere"))
    found = OneCclDriver().probe()
    assert not found.ok and "elsewhere" in found.reason and "HETCCL_ONECCL_PATH" in found.remedy


def test_another_machine_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    found = OneCclDriver().probe()
    assert not found.ok and "aarch64" in found.reason


def test_what_the_user_has_set_is_kept_and_told(tmp_path: Path) -> None:
    settings = driver._settings(tmp_path, "eth7")
    rest = {name: value for name, value in os.environ.items() if name not in settings}
    with mock.patch.dict(os.environ, {**rest, "CCL_WORKER_OFFLOAD": "1", "CCL_ATL_SHM": "1"}, clear=True):
        assert driver._set_environment(settings)[1] == {"CCL_WORKER_OFFLOAD": "1"}
        assert os.environ["CCL_KVS_IFACE"] == os.environ["FI_TCP_IFACE"] == "eth7"


def test_leftovers_of_the_dead_only(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    dead, alive, own = child.pid, os.getppid(), os.getpid()
    kept = [f"{alive}:0:0", f"{dead}:0", f"{dead}:0:0x", f"x{dead}:0:0", f"0{dead}:0:0"]
    for name in [f"{dead}:0:0", f"{dead}:0:1", f"{own}:0:0", *kept]:
        (tmp_path / name).touch()
    (tmp_path / f"{dead}:0:2").symlink_to(tmp_path / kept[0])
    assert leftovers.remove([dead, alive, 0, -1], tmp_path) == [f"{dead}:0:0", f"{dead}:0:1"]
    assert leftovers.remove([own], tmp_path) == [f"{own}:0:0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, f"{dead}:0:2"])


def test_a_process_that_nobody_waited_for_counts_as_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # ends when the child does
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / f"{child.pid}:0:0").touch()
    try:
        assert leftovers.remove([child.pid], tmp_path) == [f"{child.pid}:0:0"]
    finally:
        child.stdout.close()
        child.wait(30)
