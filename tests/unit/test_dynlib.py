# SPDX-License-Identifier: Apache-2.0
"""Opening libraries: by handle, once, with local symbols, and with errors that say what to do."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hetccl.dynlib import Library, open_library
from hetccl.errors import PluginLoadError

Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path, require: Callable[[object, str, str], None]) -> Build:
    """build(name, source, *flags): a shared library in a folder of this test."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    require(compiler, "a C compiler", "install gcc")

    def make(name: str, source: str, *flags: str) -> Path:
        code, library = tmp_path / f"{name}.c", tmp_path / name
        code.write_text(source)
        subprocess.run(
            [str(compiler), "-shared", "-fPIC", "-o", str(library), str(code), *flags], check=True, timeout=60
        )
        return library

    return make


def test_opens_by_path_and_finds_symbols(build: Build) -> None:
    path = build("libone.so", "int answer(void) { return 42; }")
    library = open_library(str(path))
    address = library.symbol("answer")
    assert address and ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 42
    assert library.symbol("question") is None
    assert library.path == str(path) and not library.shared


def test_a_library_is_opened_once(build: Build) -> None:
    path = str(build("libonce.so", "int x;"))
    found: list[Library] = []
    threads = [threading.Thread(target=lambda: found.append(open_library(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8 and len({id(library) for library in found}) == 1


def test_a_copy_already_loaded_is_shared(build: Build) -> None:
    path = build("libshared.so", "int counter = 7;", "-Wl,-soname,libshared-of-hetccl-test.so")
    loaded = ctypes.CDLL(str(path))
    ctypes.c_int.in_dll(loaded, "counter").value = 8
    library = open_library(("/nonexistent/libshared.so", "libshared-of-hetccl-test.so"))
    address = library.symbol("counter")
    assert library.shared and address and ctypes.c_int.from_address(address).value == 8


def test_a_loaded_copy_goes_before_an_earlier_name(build: Build) -> None:
    first = build("libfirst.so", "int which = 1;", "-Wl,-soname,libfirst-of-hetccl-test.so")
    second = build("libsecond.so", "int which = 2;", "-Wl,-soname,libsecond-of-hetccl-test.so")
    ctypes.CDLL(str(second))
    library = open_library((str(first), "libsecond-of-hetccl-test.so"))
    address = library.symbol("which")
    assert address and ctypes.c_int.from_address(address).value == 2


def test_equal_symbols_of_two_libraries_stay_apart(build: Build) -> None:
    addresses = [
        open_library(str(build(f"lib{n}.so", f"int same(void) {{ return {n}; }}"))).symbol("same") for n in (1, 2)
    ]
    assert [ctypes.CFUNCTYPE(ctypes.c_int)(address)() for address in addresses if address] == [1, 2]
    with pytest.raises(AttributeError):
        _ = ctypes.CDLL(None).same  # nothing became global


def test_deepbind_prefers_a_librarys_own_symbols(build: Build) -> None:
    source = "int inner(void) {{ return {0}; }} int outer(void) {{ return inner(); }}"
    ctypes.CDLL(str(build("libglobal.so", source.format(1))), mode=ctypes.RTLD_GLOBAL)
    library = open_library(str(build("libdeep.so", source.format(2))), deepbind=True)
    address = library.symbol("outer")
    assert address and ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 2


def test_the_error_names_all_that_was_tried_and_the_remedy(tmp_path: Path) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_text("not a library")
    with pytest.raises(PluginLoadError) as caught:
        open_library((str(broken), "libnowhere-of-hetccl-test.so.9"), remedy="Run this", what="foo")
    text = str(caught.value)
    assert text.startswith("foo: cannot load") and text.endswith("Run this")
    assert str(broken) in text and "libnowhere-of-hetccl-test.so.9" in text
    assert len(caught.value.facts["failures"]) == 2


@pytest.mark.parametrize("name", ["", "lib\0x.so"])
def test_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(PluginLoadError):
        open_library(name)


def test_a_library_is_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="open_library"):
        Library()
