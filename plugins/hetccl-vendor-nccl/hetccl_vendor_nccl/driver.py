# SPDX-License-Identifier: Apache-2.0
"""The NCCL vendor: ranks on NVIDIA GPUs. All code is shared with other vendors; what is here is data and a probe."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hetccl.errors import HetcclError, PluginLoadError
from hetccl.vendors.base import Availability, IslandKey, Option, Vendor, VendorDriver, VendorRequest
from hetccl_vendor_nccl.shape import NCCL, NCCL_FOLDERS, RUNTIME

if TYPE_CHECKING:
    from hetccl.vendors.cuda_shaped import CudaRuntime
    from hetccl.vendors.nccl_shaped import NcclShapedCcl

__all__ = ["NcclDriver", "NcclVendor"]

LIBRARY = Option("HETCCL_NCCL_LIBRARY", "File of NCCL to load. Unset: what the process has loaded, else libnccl.so.2.")
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAJOR, _MINOR = 75, 76  # numbers of the attributes that make the architecture


class NcclDriver(VendorDriver):
    """Counts devices; makes none of them work before `open`."""

    name: ClassVar[str] = "nccl"
    preference: ClassVar[int] = 20
    automatic: ClassVar[bool] = True
    torch_device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    options: ClassVar[tuple[Option, ...]] = (LIBRARY,)

    def probe(self) -> Availability:
        details: dict[str, str] = {}
        if _VISIBLE in os.environ:
            details[_VISIBLE] = os.environ[_VISIBLE]
        try:
            runtime = _runtime()
            details["runtime"] = f"{runtime.library.path} ({runtime.version()})"
            count = runtime.count()
            ccl = _ccl()
        except HetcclError as error:
            remedy = getattr(error, "remedy", "") or "Is the NVIDIA driver loaded (nvidia-smi)?"
            return Availability(False, str(error), remedy, details)
        if count == 0:
            return Availability(False, "CUDA sees no device", f"Check {_VISIBLE} and nvidia-smi", details)
        version = _version(ccl.version())
        details |= {"library": ccl.library.path, "version": version, "devices": f"{count} ({_names() or 'no names'})"}
        return Availability(True, details=details)

    def open(self, request: VendorRequest) -> NcclVendor:
        return NcclVendor(request)


class NcclVendor(Vendor):
    """One GPU and NCCL. Its communicators reach across hosts by themselves."""

    name = "nccl"
    segment_bytes = 32 << 20

    def __init__(self, request: VendorRequest) -> None:
        from hetccl.vendors.cuda_shaped import CudaShapedDevice

        runtime = _runtime()
        count = runtime.count()
        if not 0 <= request.device_index < count:
            raise PluginLoadError(
                f"nccl: this rank should use device {request.device_index}, but CUDA sees {count}. "
                f"Set HETCCL_DEVICE or LOCAL_RANK to 0 .. {count - 1}, or check {_VISIBLE}",
                name=self.name,
            )
        major, minor = (runtime.attribute(number, request.device_index) for number in (_MAJOR, _MINOR))
        self.device = CudaShapedDevice(runtime, request.device_index, f"{major}{minor}")
        self.device_place = runtime.pci_bus_id(request.device_index)
        if request.interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", request.interface)
        self.ccl = _ccl(self.device.table)
        self.island_key = IslandKey("nccl", _version(self.ccl.version()), "", "")
        self.device_table: Any = self.device.table
        self.ccl_table: Any = self.ccl.table

    def describe(self) -> str:
        shared = ", loaded before by somebody else" if self.ccl.library.shared else ""
        kernels = f"; no kernels: {self.device.no_kernels}" if self.device.no_kernels else ""
        return f"NCCL {self.island_key.version} {self.ccl.library.path}{shared}{kernels}"


def _runtime() -> CudaRuntime:
    from hetccl.vendors.cuda_shaped import CudaRuntime

    return CudaRuntime(RUNTIME)


def _ccl(device_table: Any = None) -> NcclShapedCcl:
    from hetccl.dynlib import open_library
    from hetccl.vendors.cuda_shaped import library_names
    from hetccl.vendors.nccl_shaped import NcclShapedCcl

    chosen = os.environ.get(LIBRARY.name, "")
    shape = replace(NCCL, libraries=(chosen,)) if chosen else NCCL
    names = library_names(shape.libraries, NCCL_FOLDERS)
    return NcclShapedCcl(shape, open_library(names, remedy=shape.remedy, what="nccl"), device_table)


def _version(number: int | None) -> str:
    """Major and minor of 22809 (2.28.9)."""
    if not number:
        raise PluginLoadError(f"nccl: the library does not say its version, so ranks cannot be matched. {NCCL.remedy}")
    return f"{number // 10000}.{number // 100 % 100}"


def _names() -> str:
    """Names of the host's GPUs, from the kernel driver: asking CUDA would start a device."""
    found = []
    for file in sorted(DRIVER_FOLDER.glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                found.append(value.strip())
    return ", ".join(found)
