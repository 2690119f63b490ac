# SPDX-License-Identifier: Apache-2.0
"""A device opened with kernels that were kept, on the stand-ins: one whose STANDIN_CACHE is missing cannot compile."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hetccl.testing.launch import run


def opened(rank: int, size: int) -> str:
    """Why the device has no kernels, or nothing."""
    from hetccl.core import registry
    from hetccl.vendors.base import VendorRequest

    vendor = registry.vendor("nccl").driver.open(VendorRequest())
    return str(vendor.device.no_kernels)  # type: ignore[attr-defined]


def test_kernels_are_compiled_once(environment: dict[str, str], tmp_path: Path) -> None:
    able = {**environment, "HETCCL_KERNEL_CACHE": str(tmp_path)}
    unable = {**able, "STANDIN_CACHE": str(tmp_path / "none")}

    def why(env: dict[str, str]) -> str:
        (found,) = run(opened, "nccl:1", timeout=100, env=env)
        return str(found)

    assert "does not compile" in why(unable)
    assert why(able) == ""
    assert why(unable) == ""
    (file,) = tmp_path.glob("kernels-*")
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    assert "does not compile" in why(unable)
    # an image that the device refuses, though it is whole
    head, image = good[: -len(good) + 17], b"/no/such/file"
    file.write_bytes(head + hashlib.sha256(image).digest() + image)
    assert why(able) == ""
    assert file.read_bytes() == good
