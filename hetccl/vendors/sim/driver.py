# SPDX-License-Identifier: Apache-2.0
"""The pretend accelerator: with it anyone can run a job of several vendors on a laptop.

"sim-a", "sim-b", "sim-anything" are vendors of their own, each with an island of its own. Their memory faults when the
host touches it, their streams run later and in order, and their libraries differ in what they can reduce, so a program
that works with them makes none of the mistakes that only real devices punish. How orderly and how fast they are, their
options say (`conditions.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hetccl.errors import ConfigError, PluginLoadError, UsageError, VendorError
from hetccl.types import DType, RedOp
from hetccl.vendors.base import Availability, IslandKey, Vendor, VendorDriver, VendorRequest
from hetccl.vendors.sim.conditions import OPTIONS, Conditions

if TYPE_CHECKING:
    from hetccl.vendors.sim._sim import SimDevice

__all__ = ["PERSONALITIES", "Personality", "SimDriver", "SimVendor", "personality_of"]

VERSION = "1.0"

log = logging.getLogger("hetccl.vendors.sim")


@dataclass(frozen=True)
class Personality:
    """What a pretend library can reduce. It moves every element type."""

    text: str
    operators: frozenset[RedOp]
    missing: frozenset[DType] = frozenset()

    def reduce_masks(self) -> list[int]:
        """One mask an element type: bit `operator` is set if the library claims that pair."""
        mask = sum(1 << op for op in self.operators)
        return [0 if dtype in self.missing else mask for dtype in DType]


# A rank's own factor does not travel in a vendor call: premul_sum is scaled beforehand and is then a sum.
_ALL = frozenset(RedOp) - {RedOp.PREMUL_SUM}

# By the first letter of the variant; "" is everybody else.
PERSONALITIES: dict[str, Personality] = {
    "a": Personality("reduces everything", _ALL),
    "b": Personality(
        "no prod; no float64, int8, uint8 or bool reductions",
        _ALL - {RedOp.PROD},
        frozenset({DType.FLOAT64, DType.INT8, DType.UINT8, DType.BOOL}),
    ),
    "c": Personality("only sum; no bfloat16 reductions", frozenset({RedOp.SUM}), frozenset({DType.BFLOAT16})),
    "": Personality("everything but avg", _ALL - {RedOp.AVG}),
}


def personality_of(variant: str) -> Personality:
    """The personality of "sim-<variant>"."""
    return PERSONALITIES.get(variant[:1], PERSONALITIES[""])


class SimDriver(VendorDriver):
    """Opens "sim-<variant>". It needs no hardware and is never chosen unless named."""

    name: ClassVar[str] = "sim"
    variants: ClassVar[bool] = True
    automatic: ClassVar[bool] = False
    simulated_only: ClassVar[bool] = True
    options = OPTIONS

    def probe(self) -> Availability:
        try:
            import hetccl.vendors.sim._sim  # noqa: F401
        except ImportError as error:
            return Availability(False, f"its compiled module does not load: {error}", "reinstall hetccl")
        try:
            conditions = Conditions.from_env()
        except ConfigError as error:
            return Availability(False, str(error), "correct or unset the variable")
        details = {"library": "sim", "version": VERSION}
        if conditions.describe():
            details["conditions"] = conditions.describe().removeprefix("; ")
        return Availability(True, details=details)

    def open(self, request: VendorRequest) -> SimVendor:
        return SimVendor(request)


class SimVendor(Vendor):
    """One pretend device and its collective library. Opening the same one twice in a process shares the device."""

    def __init__(self, request: VendorRequest) -> None:
        try:
            from hetccl.native.island import RANKS_MAX
            from hetccl.vendors.sim import _sim
        except ImportError as error:
            raise PluginLoadError(f"sim: its compiled module does not load ({error}); reinstall hetccl") from error
        self.name = f"sim-{request.variant}" if request.variant else "sim"
        self.personality = personality_of(request.variant)
        self.conditions = Conditions.from_env()
        masks = self.personality.reduce_masks()
        self.device: SimDevice = _sim.open_device(self.name, request.device_index, masks, self.conditions)
        self.segment_bytes = self.conditions.segment_bytes
        self.inner_rate = float(self.conditions.rate)
        if self.conditions.describe():
            log.debug("%s:%d runs under conditions%s", self.name, request.device_index, self.conditions.describe())
        self.island_key = IslandKey(self.name, VERSION, "", request.host_id)
        self.max_island = RANKS_MAX
        self.device_table = self.device.device_table
        self.ccl_table = self.device.ccl_table

    def new_id(self) -> bytes:
        from hetccl.native.island import new_id

        return self._label() + new_id()

    def create_comm(
        self, rank: int, size: int, unique_id: bytes, timeout: float, check: Callable[[], None] | None = None
    ) -> int:
        """Raises `VendorError` for an id of another vendor, and what the island raises when a rank stays away."""
        name, mark, island_id = unique_id.partition(b"\0")
        if not mark:
            raise UsageError(f"{self.name}: create_comm got an id of {len(unique_id)} bytes that names no vendor; "
                             "take one from new_id() of the same vendor")
        if name + mark != self._label():
            found = name.decode(errors="replace")
            raise VendorError(f"{self.name}: create_comm got an id that {found} made; a communicator holds ranks of "
                              f"{self._label()[:-1].decode()} only", vendor=self.name, call="create_comm",
                              code=_INVALID)
        return self.device.create_comm(rank, size, island_id, timeout, check)

    def describe(self) -> str:
        return f"{self.name} {VERSION} (pretend accelerator; {self.personality.text}{self.conditions.describe()})"

    def _label(self) -> bytes:
        """Goes before every id. Ranks at different speeds would not meet in the same calls, so it says the speed."""
        rate = f" at {self.conditions.rate / 1e6:g} MB/s" if self.conditions.rate else ""
        return f"{self.name}{rate}".encode() + b"\0"


_INVALID = 3  # HETCCL_INVALID of spi.h
