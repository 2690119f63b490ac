# SPDX-License-Identifier: Apache-2.0
"""The RCCL vendor: ranks on AMD GPUs. All code is shared with other vendors; what is here is data and a probe."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hetccl.errors import HetcclError, PluginLoadError
from hetccl.vendors.base import Availability, IslandKey, Option, Vendor, VendorDriver, VendorRequest
from hetccl_vendor_rccl.shape import RCCL, RUNTIME

if TYPE_CHECKING:
    from hetccl.vendors.cuda_shaped import CudaRuntime
    from hetccl.vendors.nccl_shaped import NcclShapedCcl

__all__ = ["RcclDriver", "RcclVendor", "gfx_name"]

LIBRARY = Option("HETCCL_RCCL_LIBRARY", "File of RCCL to load. Unset: what the process has loaded, else librccl.so.1.")
TOPOLOGY = Option(
    "HETCCL_RCCL_TOPOLOGY",
    "Folder where the kernel driver describes the GPUs, for containers that mount it elsewhere.",
    "/sys/class/kfd/kfd/topology/nodes",
)
_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class RcclDriver(VendorDriver):
    """Counts devices; makes none of them work before `open`."""

    name: ClassVar[str] = "rccl"
    preference: ClassVar[int] = 20
    automatic: ClassVar[bool] = True
    simulated_only: ClassVar[bool] = True
    torch_device_types: ClassVar[tuple[str, ...]] = ("cuda",)  # as PyTorch for ROCm calls its devices
    options: ClassVar[tuple[Option, ...]] = (LIBRARY, TOPOLOGY)

    def probe(self) -> Availability:
        details = {name: os.environ[name] for name in _VISIBLE if name in os.environ}
        try:
            runtime = _runtime()
            details["runtime"] = f"{runtime.library.path} ({runtime.version()})"
            count = runtime.count()
            ccl = _ccl()
        except HetcclError as error:
            remedy = getattr(error, "remedy", "") or "Is the amdgpu driver loaded (rocminfo)?"
            return Availability(False, str(error), remedy, details)
        if count == 0:
            return Availability(False, "HIP sees no device", f"Check {', '.join(_VISIBLE)} and rocminfo", details)
        names = ", ".join(gfx for gfx in _nodes().values() if gfx)
        details |= {"library": ccl.library.path, "version": _version(ccl.version())}
        details["devices"] = f"{count} ({names or 'no names'})"
        return Availability(True, details=details)

    def open(self, request: VendorRequest) -> RcclVendor:
        return RcclVendor(request)


class RcclVendor(Vendor):
    """One GPU and RCCL. A communicator holds GPUs of one target and reaches across hosts by itself."""

    name = "rccl"
    segment_bytes = 32 << 20

    def __init__(self, request: VendorRequest) -> None:
        from hetccl.vendors.cuda_shaped import CudaShapedDevice

        runtime = _runtime()
        count = runtime.count()
        if not 0 <= request.device_index < count:
            raise PluginLoadError(
                f"rccl: this rank should use device {request.device_index}, but HIP sees {count}. "
                f"Set HETCCL_DEVICE or LOCAL_RANK to 0 .. {count - 1}, or check {', '.join(_VISIBLE)}",
                name=self.name,
            )
        place = self.device_place = runtime.pci_bus_id(request.device_index)
        gfx = _nodes().get(place)
        if not gfx:
            raise PluginLoadError(
                f"rccl: device {request.device_index} at {place} is not described in {_topology()}, so its target is "
                f"unknown. Set {TOPOLOGY.name} to where the container has the kernel driver's topology",
                name=self.name,
            )
        self.device = CudaShapedDevice(runtime, request.device_index, gfx)
        if request.interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", request.interface)
        self.ccl = _ccl(self.device.table)
        self.island_key = IslandKey("rccl", _version(self.ccl.version()), gfx, "")
        self.device_table: Any = self.device.table
        self.ccl_table: Any = self.ccl.table

    def describe(self) -> str:
        shared = ", loaded before by somebody else" if self.ccl.library.shared else ""
        kernels = f"; no kernels: {self.device.no_kernels}" if self.device.no_kernels else ""
        return f"RCCL {self.island_key.version} on {self.island_key.unit} {self.ccl.library.path}{shared}{kernels}"


def gfx_name(version: int) -> str:
    """The target's name of the kernel's number: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _runtime() -> CudaRuntime:
    from hetccl.vendors.cuda_shaped import CudaRuntime

    return CudaRuntime(RUNTIME)


def _ccl(device_table: Any = None) -> NcclShapedCcl:
    from hetccl.dynlib import open_library
    from hetccl.vendors.nccl_shaped import NcclShapedCcl

    chosen = os.environ.get(LIBRARY.name, "")
    shape = replace(RCCL, libraries=(chosen,)) if chosen else RCCL
    return NcclShapedCcl(shape, open_library(shape.libraries, remedy=shape.remedy, what="rccl"), device_table)


def _version(number: int | None) -> str:
    """Major and minor of 22809 (2.28.9)."""
    if not number:
        raise PluginLoadError(f"rccl: the library does not say its version, so ranks cannot be matched. {RCCL.remedy}")
    return f"{number // 10000}.{number // 100 % 100}"


def _topology() -> Path:
    return Path(os.environ.get(TOPOLOGY.name, "") or TOPOLOGY.default)


def _nodes() -> dict[str, str]:
    """Target of each GPU by its place on the bus: {"0000:c1:00.0": "gfx942"}. Reading files starts no device."""
    found = {}
    for file in sorted(_topology().glob("*/properties")):
        try:
            words = dict(line.split(maxsplit=1) for line in file.read_text().splitlines() if " " in line)
        except OSError:
            continue
        version, place = int(words.get("gfx_target_version", 0)), int(words.get("location_id", 0))
        if version:
            where = f"{int(words.get('domain', 0)):04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.{place & 7}"
            found[where] = gfx_name(version)
    return found
