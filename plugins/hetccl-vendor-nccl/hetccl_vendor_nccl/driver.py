# SPDX-License-Identifier: Apache-2.0
"""The NCCL vendor: ranks on NVIDIA GPUs. All code is shared with other vendors; what is here is data and names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hetccl.vendors.base import Option, VendorRequest
from hetccl.vendors.cuda_driver import CudaShapedDriver, CudaShapedVendor
from hetccl_vendor_nccl.shape import NCCL, NCCL_FOLDERS, RUNTIME

if TYPE_CHECKING:
    from hetccl.vendors.cuda_shaped import CudaRuntime

__all__ = ["NcclDriver"]

LIBRARY = Option("HETCCL_NCCL_LIBRARY", "File of NCCL to load. Unset: what the process has loaded, else libnccl.so.2.")
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_MAJOR, _MINOR = 75, 76  # numbers of the attributes that make the architecture


class NcclDriver(CudaShapedDriver):
    name: ClassVar[str] = "nccl"
    preference: ClassVar[int] = 20
    automatic: ClassVar[bool] = True
    torch_device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    options: ClassVar[tuple[Option, ...]] = (LIBRARY,)
    runtime_shape, ccl_shape, ccl_folders, library = RUNTIME, NCCL, NCCL_FOLDERS, LIBRARY
    visible = ("CUDA_VISIBLE_DEVICES",)
    lister, kernel_driver = "nvidia-smi", "NVIDIA"

    def architecture(self, runtime: CudaRuntime, index: int, place: str) -> str:
        return "".join(str(runtime.attribute(number, index)) for number in (_MAJOR, _MINOR))

    def device_names(self) -> list[str]:
        """From the kernel driver: asking CUDA would start a device."""
        found = []
        for file in sorted(DRIVER_FOLDER.glob("*/information")):
            for line in file.read_text(errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key == "Model":
                    found.append(value.strip())
        return found

    def open(self, request: VendorRequest) -> CudaShapedVendor:
        return CudaShapedVendor(self, request)
