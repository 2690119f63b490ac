# SPDX-License-Identifier: Apache-2.0
"""The RCCL vendor: ranks on AMD GPUs. All code is shared with other vendors; what is here is data and names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hetccl.errors import PluginLoadError
from hetccl.vendors.base import Option, VendorRequest
from hetccl.vendors.cuda_driver import CudaShapedDriver, CudaShapedVendor
from hetccl_vendor_rccl.shape import RCCL, RUNTIME

if TYPE_CHECKING:
    from hetccl.vendors.cuda_shaped import CudaRuntime

__all__ = ["RcclDriver", "RcclVendor", "gfx_name"]

LIBRARY = Option("HETCCL_RCCL_LIBRARY", "File of RCCL to load. Unset: what the process has loaded, else librccl.so.1.")
TOPOLOGY = Option(
    "HETCCL_RCCL_TOPOLOGY",
    "Folder where the kernel driver describes the GPUs, for containers that mount it elsewhere.",
    "/sys/class/kfd/kfd/topology/nodes",
)


class RcclDriver(CudaShapedDriver):
    name: ClassVar[str] = "rccl"
    preference: ClassVar[int] = 20
    automatic: ClassVar[bool] = True
    simulated_only: ClassVar[bool] = True
    torch_device_types: ClassVar[tuple[str, ...]] = ("cuda",)  # as PyTorch for ROCm calls its devices
    options: ClassVar[tuple[Option, ...]] = (LIBRARY, TOPOLOGY)
    runtime_shape, ccl_shape, library = RUNTIME, RCCL, LIBRARY
    visible = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    lister, kernel_driver = "rocminfo", "amdgpu"

    def architecture(self, runtime: CudaRuntime, index: int, place: str) -> str:
        gfx = _nodes().get(place)
        if not gfx:
            raise PluginLoadError(
                f"rccl: device {index} at {place} is not described in {_topology()}, so its target is "
                f"unknown. Set {TOPOLOGY.name} to where the container has the kernel driver's topology",
                name=self.name,
            )
        return gfx

    def device_names(self) -> list[str]:
        return list(_nodes().values())

    def open(self, request: VendorRequest) -> RcclVendor:
        return RcclVendor(self, request)


class RcclVendor(CudaShapedVendor):
    one_target = True


def gfx_name(version: int) -> str:
    """The target's name of the kernel's number: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


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
