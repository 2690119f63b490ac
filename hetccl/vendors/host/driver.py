# SPDX-License-Identifier: Apache-2.0
"""The `host` vendor: CPU ranks of one host, served by hetccl itself. The reference that other vendors are measured by.

Memory is ordinary memory, streams do everything at once, and the collective library is `hetccl.native.island`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar

from hetccl.errors import PluginLoadError
from hetccl.vendors.base import Availability, IslandKey, Vendor, VendorDriver, VendorRequest

__all__ = ["HostDriver", "HostVendor"]

VERSION = "0.1"


class HostDriver(VendorDriver):
    """Always usable where hetccl itself is; any other usable driver for CPU tensors is preferred."""

    name: ClassVar[str] = "host"
    preference: ClassVar[int] = 0
    automatic: ClassVar[bool] = True
    torch_device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def probe(self) -> Availability:
        try:
            import hetccl.vendors.host._host  # noqa: F401
        except ImportError as error:
            return Availability(False, f"its compiled module does not load: {error}", "reinstall hetccl")
        return Availability(True, details={"library": "hetccl island", "version": VERSION})

    def open(self, request: VendorRequest) -> HostVendor:
        return HostVendor(request)


class HostVendor(Vendor):
    """The CPU of one rank. Communicators are made by `create_comm`; the tables hold no state of their own."""

    name = "host"
    segment_bytes = 4 << 20  # what a host combines fastest still lies in its caches

    def __init__(self, request: VendorRequest) -> None:
        try:
            from hetccl.native import island
            from hetccl.vendors import host_memory
            from hetccl.vendors.host import _host
        except ImportError as error:
            raise PluginLoadError(f"host: its compiled module does not load ({error}); reinstall hetccl") from error
        self.island_key = IslandKey("host", VERSION, "", request.host_id)
        self.max_island = island.RANKS_MAX
        self.device_table = host_memory.device_table()
        self.ccl_table = _host.ccl_table()

    def new_id(self) -> bytes:
        from hetccl.native import island

        return island.new_id()

    def create_comm(
        self, rank: int, size: int, unique_id: bytes, timeout: float, check: Callable[[], None] | None = None
    ) -> int:
        """Also the longest wait without progress in later calls. Raises `TimedOutError` with the missing ranks."""
        from hetccl.native import island

        # Threads without a core of their own wait for each other in turns of the scheduler.
        most = len(os.sched_getaffinity(0)) // max(self.local_ranks, size)
        threads = max(1, min(self.cpu_threads, most))
        return island.join(unique_id, rank, size, timeout, self.local_ranks, check, threads)

    def describe(self) -> str:
        return f"host {VERSION} (hetccl's own shared-memory collectives)"
