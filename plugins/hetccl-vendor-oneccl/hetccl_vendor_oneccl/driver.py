# SPDX-License-Identifier: Apache-2.0
"""The oneCCL vendor: CPU ranks of one host, served by Intel's library out of a folder of our own."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hetccl.errors import PluginLoadError
from hetccl.vendors.base import Availability, IslandKey, Option, Vendor, VendorDriver, VendorRequest
from hetccl_vendor_oneccl import leftovers
from hetccl_vendor_oneccl.wheels import DOWNLOAD, FOLDER, LIBRARIES, Download

if TYPE_CHECKING:
    from hetccl.vendors.nccl_shaped import NcclShapedCcl

__all__ = ["OneCclDriver", "OneCclVendor"]

PATH = Option(
    "HETCCL_ONECCL_PATH",
    "Folder with libccl.so.2, libccl.so.1 and libccl_legacy_cpu.so (and libfabric.so.1, unless the system has one). "
    "Unset: the folder that `hetccl fetch oneccl` makes.",
)
REMEDY = "Run `hetccl fetch oneccl`"
_NEEDED = ("libccl.so.2", "libccl.so.1", "libccl_legacy_cpu.so")


class OneCclDriver(VendorDriver):
    """Finds the private folder; nothing is loaded before `open`."""

    name: ClassVar[str] = "oneccl"
    preference: ClassVar[int] = 10
    automatic: ClassVar[bool] = True
    torch_device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    options: ClassVar[tuple[Option, ...]] = (PATH,)
    downloads: ClassVar[Download] = DOWNLOAD  # for `hetccl fetch`

    def probe(self) -> Availability:
        if platform.system() != "Linux" or platform.machine() != DOWNLOAD.machine:
            return Availability(
                False,
                f"oneCCL exists for Linux on {DOWNLOAD.machine}; this is {platform.system()} on {platform.machine()}",
                "use the vendor host",
            )
        folder, chosen = library_folder()
        missing = [name for name in _NEEDED if not (folder / name).is_file()]
        if missing:
            remedy = f"Set {PATH.name} to a folder that has them, or unset it" if chosen else REMEDY
            return Availability(False, f"{folder} has no {', '.join(missing)}", remedy)
        return Availability(True, details={"library": str(folder / "libccl.so.2"), "version": FOLDER.split("-")[1]})

    def open(self, request: VendorRequest) -> OneCclVendor:
        found = self.probe()
        if not found.ok:
            raise PluginLoadError(f"oneccl: {found.reason}. {found.remedy}", name=self.name)
        return OneCclVendor(request)

    def remove_leftovers(self, pids: list[int]) -> list[str]:
        return leftovers.remove(pids)


class OneCclVendor(Vendor):
    """oneCCL, opened for one rank. Its communicators work on one host: data goes through shared memory."""

    name = "oneccl"
    segment_bytes = 4 << 20

    def __init__(self, request: VendorRequest) -> None:
        from hetccl.vendors import host_memory

        folder, _ = library_folder()
        settings = _settings(folder, request.interface or "lo")
        ours, self._kept = _set_environment(settings)
        try:
            self._ccl = _load(folder)
        except BaseException:
            for name in ours:
                os.environ.pop(name, None)
            raise
        self.island_key = IslandKey("oneccl", _version(self._ccl.version()), "", request.host_id)
        self.device_table: Any = host_memory.device_table()
        self.ccl_table: Any = self._ccl.table
        leftovers.remove_at_exit()

    def remove_leftovers(self, pids: list[int]) -> list[str]:
        """Removes what ranks that died have left in shared memory: 64 MiB each. Returns the names of the files.

        A pid that is alive is passed over, except this process's own: it may be in the list just before the process
        leaves without unwinding.
        """
        return leftovers.remove(pids)

    def describe(self) -> str:
        kept = "".join(f", {name}={value} as set by you" for name, value in self._kept.items())
        library = self._ccl.library
        shared = ", loaded before by somebody else" if library.shared else ""
        return f"oneCCL {self.island_key.version} {library.path}{shared}{kept}"


def library_folder() -> tuple[Path, bool]:
    """Where the libraries should be, and whether the user named the place."""
    chosen = os.environ.get(PATH.name, "")
    if chosen:
        return Path(chosen).expanduser(), True
    home = os.environ.get("HETCCL_HOME") or "~/.cache/hetccl"
    return Path(home).expanduser() / FOLDER, False


def _settings(folder: Path, interface: str) -> dict[str, str]:
    """What the library reads from the environment. It must be there before the library is."""
    settings = {
        "CCL_WORKER_OFFLOAD": "0",  # with a worker thread a small call takes milliseconds where cores are few
        "CCL_ATL_SHM": "1",
        "CCL_LOG_LEVEL": "error",
        "CCL_KVS_IFACE": interface,  # of the sockets by which ranks find each other
        "FI_TCP_IFACE": interface,  # libfabric's tcp provider listens too, though no data goes that way
    }
    if any((folder / name).is_file() for name in LIBRARIES if name.endswith("-fi.so")):
        settings["FI_PROVIDER_PATH"] = str(folder)
    return settings


def _set_environment(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Sets what the user has not set. Returns the names set, and what the user has set otherwise."""
    kept = {name: os.environ[name] for name, value in settings.items() if os.environ.get(name, value) != value}
    ours = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in ours})
    return ours, kept


def _load(folder: Path) -> NcclShapedCcl:
    from hetccl.dynlib import open_library
    from hetccl.vendors.nccl_shaped import NcclShapedCcl
    from hetccl_vendor_oneccl.shape import shape

    # libccl finds its own parts beside itself, but asks for libfabric by its bare name: it has to be there before.
    fabric = folder / "libfabric.so.1"
    open_library(
        str(fabric) if fabric.is_file() else fabric.name,
        remedy=f"{REMEDY}, or install your system's libfabric",
        what="oneccl",
    )
    wanted = shape(str(folder / "libccl.so.2"), REMEDY)
    return NcclShapedCcl(wanted, open_library(wanted.libraries, remedy=wanted.remedy, what="oneccl"))


def _version(number: int | None) -> str:
    """Major and minor of 20220200."""
    if not number:
        raise PluginLoadError(f"oneccl: the library does not say its version, so ranks cannot be matched. {REMEDY}")
    return f"{number // 10000}.{number // 100 % 100}"
