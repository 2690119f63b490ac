# SPDX-License-Identifier: Apache-2.0
"""Driver and vendor for GPUs whose runtime is shaped like CUDA's and whose library is shaped like NCCL.

A plug-in derives from both, gives its data, and says what only its vendor knows: the architecture that kernels are
compiled for, and the names of the host's devices.
"""

from __future__ import annotations

import abc
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hetccl.errors import HetcclError, PluginLoadError
from hetccl.vendors.base import Availability, IslandKey, Option, Vendor, VendorDriver, VendorRequest
from hetccl.vendors.cuda_shape import CudaShape
from hetccl.vendors.nccl_shape import NcclShape

if TYPE_CHECKING:
    from hetccl.vendors.cuda_shaped import CudaRuntime
    from hetccl.vendors.nccl_shaped import NcclShapedCcl

__all__ = ["CudaShapedDriver", "CudaShapedVendor"]


class CudaShapedDriver(VendorDriver):
    """Counts devices; makes none of them work before `open`."""

    runtime_shape: ClassVar[CudaShape]
    ccl_shape: ClassVar[NcclShape]
    ccl_folders: ClassVar[tuple[str, ...]] = ()  # below each folder of Python packages, where wheels put the library
    library: ClassVar[Option]  # the variable that names the library's file
    visible: ClassVar[tuple[str, ...]]  # variables that hide devices
    lister: ClassVar[str]  # the vendor's program that lists devices, for remedies: "nvidia-smi"
    kernel_driver: ClassVar[str]  # its name, for remedies: "NVIDIA"

    @abc.abstractmethod
    def architecture(self, runtime: CudaRuntime, index: int, place: str) -> str:
        """What kernels for device `index`, at `place` on the bus, are compiled for. Raises `PluginLoadError`."""

    @abc.abstractmethod
    def device_names(self) -> list[str]:
        """Of the host's devices. Must not start one."""

    @abc.abstractmethod
    def open(self, request: VendorRequest) -> CudaShapedVendor: ...

    def probe(self) -> Availability:
        api = self.runtime_shape.name
        details = {name: os.environ[name] for name in self.visible if name in os.environ}
        try:
            runtime = self.runtime()
            details["runtime"] = f"{runtime.library.path} ({runtime.version()})"
            count = runtime.count()
            ccl = self.ccl()
            version = self.version(ccl)
        except HetcclError as error:
            remedy = getattr(error, "remedy", "") or f"Is the {self.kernel_driver} driver loaded ({self.lister})?"
            return Availability(False, str(error), remedy, details)
        if count == 0:
            remedy = f"Check {', '.join(self.visible)} and {self.lister}"
            return Availability(False, f"{api} sees no device", remedy, details)
        details |= {"library": ccl.library.path, "version": version}
        details["devices"] = f"{count} ({', '.join(self.device_names()) or 'no names'})"
        return Availability(True, details=details)

    def runtime(self) -> CudaRuntime:
        from hetccl.vendors.cuda_shaped import CudaRuntime

        return CudaRuntime(self.runtime_shape)

    def ccl(self, device_table: Any = None) -> NcclShapedCcl:
        """The library: what `library` names, else what the process has loaded, else what is installed."""
        from hetccl.dynlib import open_library
        from hetccl.vendors.cuda_shaped import library_names
        from hetccl.vendors.nccl_shaped import NcclShapedCcl

        chosen = os.environ.get(self.library.name, "")
        shape = replace(self.ccl_shape, libraries=(chosen,)) if chosen else self.ccl_shape
        names = library_names(shape.libraries, self.ccl_folders)
        return NcclShapedCcl(shape, open_library(names, remedy=shape.remedy, what=self.name), device_table)

    def version(self, ccl: NcclShapedCcl) -> str:
        """Major and minor of 22809 (2.28.9)."""
        number = ccl.version()
        if not number:
            raise PluginLoadError(
                f"{self.name}: the library does not say its version, so ranks cannot be matched. "
                f"{self.ccl_shape.remedy}",
                name=self.name,
            )
        return f"{number // 10000}.{number // 100 % 100}"


class CudaShapedVendor(Vendor):
    """One GPU and its library, whose communicators reach across hosts by themselves."""

    segment_bytes = 32 << 20
    one_target: ClassVar[bool] = False  # a communicator holds devices of one architecture only

    def __init__(self, driver: CudaShapedDriver, request: VendorRequest) -> None:
        from hetccl.vendors.cuda_shaped import CudaShapedDevice

        self.name = driver.name
        runtime = driver.runtime()
        count = runtime.count()
        if not 0 <= request.device_index < count:
            raise PluginLoadError(
                f"{self.name}: this rank should use device {request.device_index}, but {driver.runtime_shape.name} "
                f"sees {count}. Set HETCCL_DEVICE or LOCAL_RANK to 0 .. {count - 1}, or check "
                f"{', '.join(driver.visible)}",
                name=self.name,
            )
        self.device_place = runtime.pci_bus_id(request.device_index)
        target = driver.architecture(runtime, request.device_index, self.device_place)
        self.device = CudaShapedDevice(runtime, request.device_index, target)
        if request.interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", request.interface)
        self.ccl = driver.ccl(self.device.table)
        unit = target if self.one_target else ""
        self.island_key = IslandKey(self.name, driver.version(self.ccl), unit, "")
        self.device_table: Any = self.device.table
        self.ccl_table: Any = self.ccl.table
        self._title = driver.ccl_shape.name

    def describe(self) -> str:
        unit = f" on {self.island_key.unit}" if self.island_key.unit else ""
        shared = ", loaded before by somebody else" if self.ccl.library.shared else ""
        kernels = f"; no kernels: {self.device.no_kernels}" if self.device.no_kernels else ""
        return f"{self._title} {self.island_key.version}{unit} {self.ccl.library.path}{shared}{kernels}"
