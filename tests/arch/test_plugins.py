# SPDX-License-Identifier: Apache-2.0
"""A plug-in's folder, package and driver bear one name, so that no table of plug-ins is needed anywhere."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
FOLDERS = sorted(metadata.parent for metadata in PLUGINS.glob("*/pyproject.toml"))
GROUPS = {"vendor": "hetccl.vendors", "transport": "hetccl.transports"}


def test_there_are_plugins() -> None:
    assert "_template" in [folder.name for folder in FOLDERS]
    assert len(FOLDERS) > 1


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plugin_follows_the_naming_rule(folder: Path) -> None:
    assert faults(folder.name.replace("_template", "hetccl-vendor-foo"), metadata(folder)) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plugin_has_a_page_and_tests(folder: Path) -> None:
    page = (folder / "README.md").read_text().splitlines()
    assert any(line.startswith("# ") for line in page), "its page of the manual needs a heading"
    assert list((folder / "tests").glob("test_*.py")), "a plug-in brings its tests"


def test_a_wrong_name_is_found() -> None:
    project = {"name": "hetccl-vendor-foo", "entry-points": {"hetccl.vendors": {"fu": "hetccl_vendor_foo.driver:Foo"}}}
    assert faults("hetccl-vendor-foo", project) == ["hetccl.vendors offers ['fu'], not 'foo'"]
    assert faults("hetccl-vendor-bar", project) != []
    assert faults("hetccl-foo", project) == ["folder hetccl-foo is neither hetccl-vendor-* nor hetccl-transport-*"]


def faults(folder: str, project: dict[str, Any]) -> list[str]:
    kind, _, name = folder.removeprefix("hetccl-").partition("-")
    if kind not in GROUPS:
        return [f"folder {folder} is neither hetccl-vendor-* nor hetccl-transport-*"]
    found = []
    if project["name"] != folder:
        found.append(f"package {project['name']} lies in {folder}")
    offered = project.get("entry-points", {}).get(GROUPS[kind], {})
    if name not in offered:
        found.append(f"{GROUPS[kind]} offers {sorted(offered)}, not {name!r}")
    elif not offered[name].startswith(folder.replace("-", "_") + "."):
        found.append(f"driver {offered[name]} is not in {folder.replace('-', '_')}")
    return found


def metadata(folder: Path) -> dict[str, Any]:
    with open(folder / "pyproject.toml", "rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def test_the_skeleton_probes_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(PLUGINS / "_template")
    monkeypatch.setenv("HETCCL_FOO_LIBRARY", str(tmp_path / "libfoo.so"))
    from hetccl.errors import PluginLoadError
    from hetccl.vendors.base import VendorRequest

    driver = importlib.import_module("hetccl_vendor_foo.driver").FooDriver()
    found = driver.probe()
    assert not found.ok
    assert str(tmp_path / "libfoo.so") in found.reason
    assert "HETCCL_FOO_LIBRARY" in found.remedy
    with pytest.raises(PluginLoadError, match="HETCCL_FOO_LIBRARY"):
        driver.open(VendorRequest())
