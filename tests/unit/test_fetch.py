# SPDX-License-Identifier: Apache-2.0
"""`hetccl fetch`, with a pip that copies wheels made here: nothing is downloaded."""

from __future__ import annotations

import errno
import hashlib
import json
import platform
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hetccl.cli import fetch as module
from hetccl.cli.fetch import FetchError, complete, fetch
from hetccl.errors import UnsupportedError


@dataclass(frozen=True)
class Wheel:
    requirement: str
    sha256: str
    nbytes: int
    libraries: tuple[str, ...]
    licenses: tuple[str, ...]


@dataclass(frozen=True)
class Download:
    title: str
    folder: str
    variable: str
    machine: str
    license: str
    wheels: tuple[Wheel, ...]


class Pip:
    """Stands for `subprocess.run([... "pip", "download" ...])`."""

    def __init__(self, wheels: dict[str, Path]) -> None:
        self.wheels, self.calls, self.stderr = wheels, 0, ""

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and options["timeout"]
        self.calls += 1
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        source = self.wheels[command[-1]]
        (folder / source.name).write_bytes(source.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    wheels = {}
    for name, library in (("foo", "libfoo.so.1"), ("bar", "libbar.so.2")):
        path = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}-1.0.data/data/lib/{library}", f"library {name}")
            archive.writestr(f"{name}-1.0.data/data/lib/libhuge.so", "not wanted")
            archive.writestr(f"{name}-1.0.dist-info/LICENSE.txt", f"license of {name}")
        wheels[f"{name}==1.0"] = path
    double = Pip(wheels)
    monkeypatch.setattr(module.subprocess, "run", double)
    return double


@pytest.fixture
def download(pip: Pip) -> Download:
    def wheel(name: str, library: str) -> Wheel:
        data = pip.wheels[f"{name}==1.0"].read_bytes()
        return Wheel(
            f"{name}==1.0", hashlib.sha256(data).hexdigest(), len(data), (library,), (".dist-info/LICENSE.txt",)
        )

    wheels = (wheel("foo", "libfoo.so.1"), wheel("bar", "libbar.so.2"))
    return Download("Foo 1.0", "foo-1.0", "FOO_PATH", platform.machine(), "Foo license", wheels)


def test_unpacks_what_is_wanted_and_no_more(
    pip: Pip, download: Download, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "home" / "foo-1.0"
    assert fetch(download, target)
    files = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    licenses = ["licenses/bar-LICENSE.txt", "licenses/foo-LICENSE.txt"]
    assert files == ["libbar.so.2", "libfoo.so.1", *licenses, "manifest.json"]
    assert (target / "libfoo.so.1").read_text() == "library foo"
    recorded = json.loads((target / "manifest.json").read_text())["files"]
    assert recorded["libfoo.so.1"] == hashlib.sha256(b"library foo").hexdigest()
    assert list(target.parent.iterdir()) == [target]
    printed = capsys.readouterr().out
    assert "Foo license" in printed and "licenses" in printed and "[2/2] bar==1.0" in printed


def test_the_second_time_does_nothing(pip: Pip, download: Download, tmp_path: Path) -> None:
    assert fetch(download, tmp_path / "x") and not fetch(download, tmp_path / "x")
    assert pip.calls == 2


@pytest.mark.parametrize("damage", ["remove", "change", "manifest"])
def test_a_damaged_folder_is_made_anew(pip: Pip, download: Download, tmp_path: Path, damage: str) -> None:
    target = tmp_path / "x"
    fetch(download, target)
    if damage == "remove":
        (target / "libfoo.so.1").unlink()
    elif damage == "change":
        (target / "libfoo.so.1").write_text("other")
    else:
        (target / "manifest.json").write_text("{")
    assert not complete(download, target)
    assert fetch(download, target) and complete(download, target)


def test_a_folder_of_somebody_else_is_left_alone(pip: Pip, download: Download, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "letter.txt").write_text("dear")
    with pytest.raises(FetchError, match="--to"):
        fetch(download, tmp_path / "x")
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["letter.txt"] and pip.calls == 0


def test_a_wheel_with_another_hash_is_not_used(pip: Pip, download: Download, tmp_path: Path) -> None:
    first, second = download.wheels
    tampered = replace(download, wheels=(first, replace(second, sha256="0" * 64)))
    with pytest.raises(FetchError, match="not the pinned 000"):
        fetch(tampered, tmp_path / "home" / "x")
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        ("ERROR: Could not find a version (from versions: none)\nERROR: No matching distribution found", "reachable"),
        ("OSError: [Errno 28] No space left on device\n", "disk is full"),
        ("WARNING: retrying\nERROR: Could not install: HTTPSConnectionPool\n", "HTTPSConnectionPool"),
    ],
)
def test_what_pip_says_becomes_one_line(pip: Pip, download: Download, tmp_path: Path, stderr: str, told: str) -> None:
    pip.stderr = stderr
    with pytest.raises(FetchError, match=told):
        fetch(download, tmp_path / "home" / "x")
    assert list((tmp_path / "home").iterdir()) == []


def test_too_small_a_disk_is_told_before_the_download(
    pip: Pip, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(FetchError, match="1 MiB free"):
        fetch(download, tmp_path / "home" / "x")
    assert pip.calls == 0


def test_a_disk_that_fills_up_is_told(
    pip: Pip, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfileobj", full)
    with pytest.raises(FetchError, match="disk is full"):
        fetch(download, tmp_path / "home" / "x")
    assert list((tmp_path / "home").iterdir()) == []


def test_another_machine_is_refused(pip: Pip, download: Download, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="s390"):
        fetch(replace(download, machine="s390"), tmp_path / "x")


def test_a_vendor_without_downloads_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from hetccl.cli.main import main

    assert main(["fetch", "host"]) == 2
    assert "nothing to fetch" in capsys.readouterr().err
