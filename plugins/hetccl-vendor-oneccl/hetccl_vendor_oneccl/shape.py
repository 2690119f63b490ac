# SPDX-License-Identifier: Apache-2.0
"""How oneCCL's C interface differs from NCCL's. Every line was tried on version 2022.2.0; see the README."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType

from hetccl.types import DType, RedOp
from hetccl.vendors.nccl_shape import NCCL_REDOPS, Caps, NcclShape, Result, Status

__all__ = ["shape"]

_UNSET = -(2**31)
_CPU_PLUGIN = 0xBAAAAAAE
_MAGIC = 0xCAFEBEEF
_VERSION = 20220200
# size, magic, version, four ints, a name, two ints, the plug-in that does the work; only the last is not left unset.
_CONFIG = struct.pack("QIIiiiiQiiI4x", 56, _MAGIC, _VERSION, *[_UNSET] * 4, 0, *[_UNSET] * 2, _CPU_PLUGIN)

_RESULTS: Mapping[int, Result] = MappingProxyType(
    {
        0: Result(Status.OK, "success"),
        1: Result(Status.VENDOR, "error"),
        2: Result(Status.SYSTEM, "system error"),
        3: Result(Status.VENDOR, "internal error"),
        4: Result(Status.INVALID, "invalid argument"),
        5: Result(Status.INVALID, "invalid usage"),
        6: Result(Status.IN_PROGRESS, "in progress"),
        7: Result(Status.VENDOR, "GPU failure"),
        8: Result(Status.VENDOR, "CPU failure"),
        9: Result(Status.NO_MEMORY, "no CPU memory"),
        10: Result(Status.NO_MEMORY, "no GPU memory"),
        11: Result(Status.VENDOR, "exception in its plug-in"),
        12: Result(Status.UNSUPPORTED, "not implemented"),
    }
)


def shape(library: str, remedy: str) -> NcclShape:
    """The data for the library at the path `library`."""
    return NcclShape(
        name="oneCCL",
        libraries=(library,),
        prefix="oneccl",
        results=_RESULTS,
        # CommSplit says "success" and gives a broken handle. A group prints an error line a call, though its results
        # are right, so hetccl never makes one.
        missing=frozenset({"CommSplit", "CommAbort", "GroupStart", "GroupEnd"}),
        id_bytes=4096,
        ranks_are_size_t=True,
        config=_CONFIG,
        init_in_thread=True,
        caps=Caps.BLOCKING | Caps.MULTI_COMM | Caps.IN_PLACE | Caps.ONE_AT_A_TIME,
        streams=False,
        recv_on_all_ranks=True,
        redops={redop: number for redop, number in NCCL_REDOPS.items() if redop != RedOp.AVG},
        not_reduced=_NOT_REDUCED,
        remedy=remedy,
    )


# All of sum, prod, max and min are right for all ten types.
_NOT_REDUCED: frozenset[tuple[DType, RedOp]] = frozenset()
