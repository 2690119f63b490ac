# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: found again, never believed when damaged, never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetccl.vendors import kernel_cache

PARTS = ["source", "sm_90", "--fmad=false", "nvrtc 13.0", "/lib/libnvrtc.so 1 2"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETCCL_KERNEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(image: bytes) -> tuple[list[int], object]:
    calls: list[int] = []

    def make() -> bytes:
        calls.append(1)
        return image

    return calls, make


def test_an_image_is_made_once(place: Path) -> None:
    calls, make = made(b"code")
    assert kernel_cache.cached(PARTS, make) == (b"code", False)  # type: ignore[arg-type]
    assert kernel_cache.cached(PARTS, make) == (b"code", True)  # type: ignore[arg-type]
    assert len(calls) == 1
    assert [p.name for p in place.iterdir() if p.name.startswith("new-")] == []


@pytest.mark.parametrize("changed", range(len(PARTS)))
def test_whatever_it_depends_on_makes_another(place: Path, changed: int) -> None:
    calls, make = made(b"code")
    kernel_cache.cached(PARTS, make)  # type: ignore[arg-type]
    other = [p + "x" if i == changed else p for i, p in enumerate(PARTS)]
    assert kernel_cache.cached(other, make)[1] is False  # type: ignore[arg-type]
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_made_anew(place: Path, damage: str) -> None:
    calls, make = made(b"code" * 100)
    kernel_cache.cached(PARTS, make)  # type: ignore[arg-type]
    (file,) = place.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    file.write_bytes({"cut": data[:-1], "flipped": data, "empty": b"", "foreign": b"x" * len(data)}[damage])
    assert kernel_cache.cached(PARTS, make) == (b"code" * 100, False)  # type: ignore[arg-type]
    assert kernel_cache.cached(PARTS, make) == (b"code" * 100, True)  # type: ignore[arg-type]
    assert len(calls) == 2


def test_off_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETCCL_KERNEL_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, make = made(b"code")
    for _ in range(2):
        assert kernel_cache.cached(PARTS, make) == (b"code", False)  # type: ignore[arg-type]
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_users_cache_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETCCL_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.folder() == tmp_path / "hetccl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_cache.folder() == tmp_path / ".cache" / "hetccl"


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETCCL_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    assert kernel_cache.cached(PARTS, made(b"code")[1]) == (b"code", False)  # type: ignore[arg-type]


def test_the_oldest_go(place: Path) -> None:
    for number in range(kernel_cache.MOST_FILES + 3):
        kernel_cache.cached([str(number)], made(b"code")[1])  # type: ignore[arg-type]
        for file in place.iterdir():
            os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9))
    assert len(list(place.iterdir())) == kernel_cache.MOST_FILES
    assert kernel_cache.cached(["0"], made(b"code")[1])[1] is False  # type: ignore[arg-type]


def test_forget(place: Path) -> None:
    kernel_cache.cached(PARTS, made(b"code")[1])  # type: ignore[arg-type]
    kernel_cache.forget(PARTS)
    assert kernel_cache.cached(PARTS, made(b"code")[1])[1] is False  # type: ignore[arg-type]


def test_a_new_release_of_a_file_is_another(tmp_path: Path) -> None:
    file = tmp_path / "lib"
    file.write_bytes(b"1")
    first = kernel_cache.identity(str(file))
    file.write_bytes(b"22")
    assert kernel_cache.identity(str(file)) != first
    assert kernel_cache.identity(str(tmp_path / "none")) == str(tmp_path / "none")
