# SPDX-License-Identifier: Apache-2.0
"""What a vendor driver is: the Python half of the plug-in boundary (the other half is `include/hetccl/spi.h`).

A driver is an object found under the entry-point group `hetccl.vendors`. It says whether its hardware and library are
usable (`probe`), opens them for one rank (`open`), and hands over two C tables as PyCapsules. Nothing here runs per
step.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

__all__ = ["Availability", "IslandKey", "Option", "Vendor", "VendorDriver", "VendorRequest"]


@dataclass(frozen=True)
class Availability:
    """Result of a probe: usable or not, why not, and the command or setting that mends it."""

    ok: bool
    reason: str = ""
    remedy: str = ""
    details: dict[str, str] = field(default_factory=dict)  # shown by doctor, e.g. {"version": "..."}


@dataclass(frozen=True)
class Option:
    """One environment variable of a driver, declared once: name, text and default."""

    name: str
    text: str
    default: str = ""


class IslandKey(NamedTuple):
    """What one vendor communicator can hold. Ranks with equal keys can form one island."""

    library: str  # "oneccl"
    version: str  # major.minor
    unit: str  # what one communicator holds: "" for all devices of the vendor, else e.g. a gfx target
    fabric: str  # ranks must share this: the host id where the library works on one host only, else ""


@dataclass(frozen=True)
class VendorRequest:
    """What a driver is told when a rank opens it."""

    variant: str = ""  # "a" in "sim-a"
    device_index: int = 0
    host_id: str = ""  # equal for ranks of one host
    interface: str = ""  # network interface that the library's own sockets should be bound to; "" = its choice


class VendorDriver(abc.ABC):
    """Entry object of a vendor plug-in. Constructing it must be cheap and must not open the vendor's library."""

    name: ClassVar[str]
    variants: ClassVar[bool] = False  # True: "name-anything" is a vendor too, with variant "anything"
    torch_device_types: ClassVar[tuple[str, ...]] = ("cpu",)  # torch devices whose tensors it takes directly
    automatic: ClassVar[bool] = True  # False: only used when named
    preference: ClassVar[int] = 0  # among automatic drivers of one device type the highest usable one is taken
    options: ClassVar[tuple[Option, ...]] = ()
    simulated_only: ClassVar[bool] = False  # never run on real hardware: doctor and docs say so

    @abc.abstractmethod
    def probe(self) -> Availability:
        """Looks for hardware and library. Never raises, never initialises a device, takes under a second."""

    @abc.abstractmethod
    def open(self, request: VendorRequest) -> Vendor:
        """Loads the library for one rank. Raises `PluginLoadError` with reason and remedy."""

    def remove_leftovers(self, pids: list[int]) -> list[str]:
        """Removes what the library of dead processes of this host has left behind; returns what."""
        return []


class Vendor(abc.ABC):
    """A vendor's library, opened for one rank. The core holds it for the life of the process."""

    name: str  # as users write it: "oneccl", "sim-a"
    island_key: IslandKey
    device_table: Any  # PyCapsule HETCCL_DEVICE_CAPSULE -> hetccl_table
    ccl_table: Any  # PyCapsule HETCCL_CCL_CAPSULE -> hetccl_table
    segment_bytes: int = 32 << 20  # how much one vendor call should carry at most when stages overlap
    inner_rate: float = 0.0  # bytes a second that a rank moves inside an island, for the cost model; 0: unknown
    max_island: int = 1 << 30  # ranks that one communicator can hold
    device_place: str = ""  # where the device sits (PCI address), equal only for ranks that share it; "": unknown
    cpu_threads: int = 1  # HETCCL_CPU_THREADS, set by the core before create_comm: what a library of the CPU may use
    local_ranks: int = 0  # ranks of the job on this host, set by the core before create_comm; 0: unknown

    def new_id(self) -> bytes:
        """Unique id for a new vendor communicator; called on one rank of the island."""
        from hetccl.tables import CclTable

        return CclTable(self.ccl_table).unique_id()

    def create_comm(
        self, rank: int, size: int, unique_id: bytes, timeout: float, check: Callable[[], None] | None = None
    ) -> int:
        """Joins a vendor communicator of `size` ranks and returns its handle (an address). Blocks until all joined.

        While it waits it calls `check` about twice a second; what that raises (a rank has died, or could not join) ends
        the wait and is raised.
        """
        from hetccl.tables import CclTable

        return CclTable(self.ccl_table).init(rank, size, unique_id, timeout, check)

    def describe(self) -> str:
        """One line for `explain` and doctor: library, version, file."""
        return f"{self.island_key.library} {self.island_key.version}"
