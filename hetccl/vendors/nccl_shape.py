# SPDX-License-Identifier: Apache-2.0
"""The data by which one body of code (nccl_shaped) serves NCCL and every library that is shaped like it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hetccl.types import DType, RedOp

__all__ = ["NCCL_DTYPES", "NCCL_REDOPS", "Caps", "NcclShape", "Result", "Status"]


class Status(enum.IntEnum):
    """The numbers of hetccl_status in spi.h."""

    OK = 0
    IN_PROGRESS = 1
    UNSUPPORTED = 2
    INVALID = 3
    PEER_LOST = 4
    TIMED_OUT = 5
    ABORTED = 6
    MISMATCH = 7
    NO_MEMORY = 8
    SYSTEM = 9
    VENDOR = 10


class Caps(enum.IntFlag):
    """The bits HETCCL_CCL_* of spi.h."""

    BLOCKING = 1 << 0
    ABORT = 1 << 1
    STREAM_ORDERED = 1 << 2
    NAN_PROPAGATES = 1 << 3
    MULTI_COMM = 1 << 4
    GROUP = 1 << 5
    IN_PLACE = 1 << 6
    ONE_AT_A_TIME = 1 << 7


@dataclass(frozen=True)
class Result:
    """What one result code of a library means here, and the vendor's word for it."""

    status: Status
    name: str


# The numbers that NCCL, RCCL, oneCCL and most others share.
NCCL_DTYPES: Mapping[DType, int] = MappingProxyType({dtype: dtype.value for dtype in DType if dtype <= DType.BFLOAT16})
NCCL_REDOPS: Mapping[RedOp, int] = MappingProxyType({redop: redop.value for redop in RedOp if redop <= RedOp.AVG})


@dataclass(frozen=True)
class NcclShape:
    """How one vendor's library differs from the rest of the family. The defaults are NCCL's.

    Every collective has NCCL's order of arguments; the calls are named by NCCL's words without prefix: "AllReduce".
    """

    name: str  # for messages: "oneCCL"
    libraries: tuple[str, ...]  # full paths or sonames, tried in this order
    prefix: str  # of every symbol: "nccl"
    results: Mapping[int, Result]  # 0 must be OK; a code that is not here is a failure of the vendor
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # call -> full names, tried in order
    missing: frozenset[str] = frozenset()  # calls that are there in name only, or broken: never looked up

    id_bytes: int = 128  # by value: 128, 136 or 4096; by pointer: up to 4096
    id_by_pointer: bool = False
    ranks_are_size_t: bool = False  # type of the number of ranks in CommInitRank; else int
    config: bytes = b""  # if not empty, CommInitRankConfig gets a copy of this struct
    init_in_thread: bool = False  # CommInitRank blocks until all ranks are there, so it runs beside the caller

    caps: Caps = field(default=Caps(0))  # bits whose symbols are missing are taken away when the library is opened
    streams: bool = True  # False: the stream argument is there but must be NULL
    recv_on_all_ranks: bool = False  # Reduce writes or reads the receive buffer of ranks that are not the root

    dtypes: Mapping[DType, int] = field(default_factory=lambda: NCCL_DTYPES)
    redops: Mapping[RedOp, int] = field(default_factory=lambda: NCCL_REDOPS)
    not_reduced: frozenset[tuple[DType, RedOp]] = frozenset()  # pairs that are refused, or wrong

    remedy: str = ""  # what the user can do if the library does not open
