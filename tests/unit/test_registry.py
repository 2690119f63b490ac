# SPDX-License-Identifier: Apache-2.0
"""Drivers are found by entry point. Each test makes a folder of pretend packages and asks a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = """
from hetccl.vendors.base import Availability, Option, Vendor, VendorDriver
class Driver(VendorDriver):
    name = "{name}"
    {attributes}
    def probe(self):
        {probe}
    def open(self, request):
        raise AssertionError("not opened here")
"""
USABLE = 'return Availability(True, details={"version": "7"})'


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


class Site:
    """A folder on the path, with pretend packages in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site"
        self.folder.mkdir()
        self.cache = folder / "cache"

    def package(
        self, distribution: str, module: str, source: str, name: str, attribute: str = "Driver", group: str = "vendors"
    ) -> None:
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hetccl.{group}]\n{name} = {module}:{attribute}\n")

    def vendor(self, name: str, probe: str = USABLE, attributes: str = "", distribution: str = "") -> None:
        module = f"fake_{distribution or name}".replace("-", "_")
        source = DRIVER.format(name=name, probe=probe, attributes=attributes or "pass")
        self.package(distribution or f"hetccl-vendor-{name}", module, source, name)

    def ask(self, expression: str) -> Any:
        """What `expression` gives in a new process, or the class and text of what it raises, through JSON."""
        code = (
            "import json, sys\n"
            "from hetccl.core import registry as r\n"
            "try:\n"
            f"    value = {expression}\n"
            "except Exception as e:\n"
            "    value = [type(e).__name__, str(e)]\n"
            "print(json.dumps(value))\n"
        )
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{root}", "XDG_CACHE_HOME": str(self.cache)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def test_finds_a_foreign_driver_beside_ours(site: Site) -> None:
    site.vendor("foo")
    assert site.ask("type(r.vendor('foo').driver).__module__") == "fake_foo"
    found = site.ask("[[v.name, v.kind, v.distribution, v.availability.ok] for v in r.vendors()]")
    assert ["foo", "vendor", "hetccl-vendor-foo 1.0", True] in found
    assert {"host", "sim"} <= {row[0] for row in found}


def test_a_driver_is_made_once(site: Site) -> None:
    site.vendor("foo")
    assert site.ask("r.vendor('foo').driver is r.vendor('foo').driver") is True


def test_importing_the_registry_imports_no_plug_in_and_no_stevedore(site: Site) -> None:
    site.package("hetccl-vendor-loud", "fake_loud", "raise SystemExit('imported')", "loud")
    assert site.ask("[m for m in sys.modules if 'stevedore' in m or m.startswith('fake_')]") == []


def test_asking_for_one_driver_imports_no_other(site: Site) -> None:
    site.vendor("foo")
    site.package("hetccl-vendor-loud", "fake_loud", "raise SystemExit('imported')", "loud")
    assert site.ask("[r.vendor('foo').name, 'fake_loud' in sys.modules]") == ["foo", False]


def test_a_driver_that_is_not_installed(site: Site) -> None:
    site.vendor("foo")
    kind, text = site.ask("r.vendor('absent')")  # no real vendor: any of those may be installed here
    assert kind == "PluginNotFoundError"
    assert "'absent' is not installed" in text and "foo" in text and "host" in text
    assert text.endswith("pip install hetccl-vendor-absent")
    kind, text = site.ask("r.transport('warp')")
    assert kind == "PluginNotFoundError" and text.endswith("pip install hetccl-transport-warp") and "shm" in text


def test_variants(site: Site) -> None:
    site.vendor("foo", attributes="variants = True")
    site.vendor("bar")
    assert site.ask("r.vendor('foo-b')[::2]") == ["foo-b", "b"]
    assert site.ask("r.vendor('foo-b-2')[::2]") == ["foo-b-2", "b-2"]
    assert site.ask("r.vendor('foo')[::2]") == ["foo", ""]
    kind, text = site.ask("r.vendor('bar-a')")
    assert kind == "UsageError" and "has no variants" in text and "bar@a" in text
    kind, text = site.ask("r.vendor('none-a')")
    assert kind == "PluginNotFoundError" and "'none'" in text


def test_a_name_with_a_hyphen_is_looked_for_as_a_whole_first(site: Site) -> None:
    site.vendor("foo", attributes="variants = True")
    site.vendor("foo-x")
    assert site.ask("[r.vendor('foo-x').driver.name, r.vendor('foo-x').variant]") == ["foo-x", ""]


def test_two_packages_of_one_name_are_an_error_that_names_both(site: Site) -> None:
    site.vendor("foo", distribution="hetccl-vendor-foo")
    site.vendor("foo", distribution="other-foo")
    kind, text = site.ask("r.vendor('foo')")
    assert kind == "PluginConflictError"
    assert "hetccl-vendor-foo 1.0" in text and "other-foo 1.0" in text
    rows = site.ask("[[v.name, v.availability.ok, v.availability.reason] for v in r.vendors()]")
    assert [row for row in rows if row[0] == "foo"] == [["foo", False, text]]
    assert site.ask("r.vendor('host').name") == "host"  # the others go on


def test_asked_for_by_name_and_unusable(site: Site) -> None:
    site.vendor("foo", probe="return Availability(False, 'no libfoo.so', 'apt install libfoo')")
    kind, text = site.ask("r.vendor('foo')")
    assert kind == "PluginLoadError" and "no libfoo.so" in text and "apt install libfoo" in text
    assert site.ask("r.vendor('foo', probe=False).name") == "foo"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library\n", "No module named 'no_such_library'"),
        ("raise RuntimeError('broken')\n", "RuntimeError: broken"),
        ("x = 1\n", "has no attribute 'Driver'"),
        ("class Driver: pass\n", "makes a Driver, not a VendorDriver"),
        ("from hetccl.vendors.base import VendorDriver\nclass Driver(VendorDriver): pass\n", "abstract"),
    ],
)
def test_a_broken_module_is_loud_by_name_and_listed_otherwise(site: Site, source: str, reason: str) -> None:
    site.package("hetccl-vendor-foo", "fake_foo", source, "foo")
    kind, text = site.ask("r.vendor('foo')")
    assert kind == "PluginLoadError" and reason in text and "hetccl-vendor-foo 1.0" in text
    rows = site.ask("[[v.name, v.availability.ok, v.availability.reason] for v in r.vendors()]")
    (row,) = [row for row in rows if row[0] == "foo"]
    assert not row[1] and reason in row[2]
    assert {"host", "sim"} <= {row[0] for row in rows}


@pytest.mark.parametrize(
    ("probe", "reason"),
    [("raise OSError('boo')", "its probe failed: OSError: boo"), ("return True", "its probe answered True")],
)
def test_a_probe_that_breaks_its_promise(site: Site, probe: str, reason: str) -> None:
    site.vendor("foo", probe=probe)
    assert reason in site.ask("r.vendor('foo')")[1]
    rows = site.ask("[[v.name, v.availability.reason] for v in r.vendors()]")
    assert [reason in row[1] for row in rows if row[0] == "foo"] == [True]


def test_the_best_vendor_is_usable_automatic_and_preferred(site: Site) -> None:
    site.vendor("alpha", attributes="preference = 900")
    site.vendor("beta", attributes="preference = 990", probe="return Availability(False, 'gone')")
    site.vendor("gamma", attributes="preference = 999; automatic = False")
    site.vendor("delta", attributes="preference = 998; torch_device_types = ('npu',)")
    assert site.ask("r.best_vendor('cpu').name") == "alpha"
    assert site.ask("r.best_vendor('npu').name") == "delta"


def test_no_vendor_for_a_device_lists_the_reasons(site: Site) -> None:
    site.vendor("foo", attributes="torch_device_types = ('npu',)", probe="return Availability(False, 'no card', 'buy')")
    kind, text = site.ask("r.best_vendor('npu')")
    assert kind == "PluginLoadError" and "foo: no card (buy)" in text
    kind, text = site.ask("r.best_vendor('tpu')")
    assert kind == "PluginLoadError" and "no usable vendor takes tpu" in text


def test_transports_are_found_and_checked_alike(site: Site) -> None:
    site.package("hetccl-transport-foo", "fake_foo", "class Driver: pass\n", "foo", group="transports")
    kind, text = site.ask("r.transport('foo')")
    assert kind == "PluginLoadError" and "not a TransportDriver" in text
    assert site.ask("r.transport('shm').name") == "shm"
    rows = site.ask("[[t.name, t.kind] for t in r.transports()]")
    assert ["shm", "transport"] in rows and ["foo", "transport"] in rows


def test_hetccl_on_the_path_only_says_how_to_install_it(site: Site) -> None:
    """Without any entry point not even `host` is there."""
    kind, text = site.ask("(r._entry_names.update({r.VENDORS: []}), r.vendor('xyz'))")
    assert kind == "PluginNotFoundError" and "hetccl itself is not installed" in text and "pip install -e" in text


def test_what_is_part_of_hetccl_is_no_plug_in(site: Site) -> None:
    """A plug-in is installed, hetccl is only on the path: there is no package hetccl-vendor-host to install."""
    without = "setattr(r, '_distributions', lambda *_: [])"
    kind, text = site.ask(f"({without}, r._entry_names.update({{r.VENDORS: ['foo']}}), r.vendor('host'))")
    assert kind == "PluginNotFoundError" and "pip install -e" in text and "hetccl-vendor-host" not in text
    assert site.ask("r.install_hint('transport', 'shm')").startswith("pip install -e ")
    assert site.ask("r.install_hint('transport', 'rdma')") == "pip install hetccl-transport-rdma"
