# SPDX-License-Identifier: Apache-2.0
"""Element types and reduction operators. The numbers are those of `spi.h`."""

from __future__ import annotations

import enum

__all__ = ["DType", "Op", "RedOp"]


class DType(enum.IntEnum):
    """Element type. `itemsize` is in bytes."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    INT16 = 10
    UINT16 = 11
    BOOL = 12
    COMPLEX64 = 13
    COMPLEX128 = 14
    FLOAT8_E4M3FN = 15
    FLOAT8_E5M2 = 16
    FLOAT8_E4M3FNUZ = 17
    FLOAT8_E5M2FNUZ = 18

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The name in lower case, as NumPy and torch spell it: 'float32'."""
        return self.name.lower()


_ITEMSIZE = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 2, 2, 1, 8, 16, 1, 1, 1, 1)


class RedOp(enum.IntEnum):
    """Reduction operator."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4
    PREMUL_SUM = 5
    BAND = 6
    BOR = 7
    BXOR = 8

    @property
    def label(self) -> str:
        return self.name.lower()


class Op(enum.IntEnum):
    """Operations of a communicator."""

    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BARRIER = 4
    SEND = 5
    RECV = 6
    REDUCE = 7
    GATHER = 8
    SCATTER = 9
    ALL_TO_ALL = 10

    @property
    def label(self) -> str:
        return self.name.lower()
