# SPDX-License-Identifier: Apache-2.0
from typing import Any, final

from hetccl.dynlib import Library
from hetccl.vendors.nccl_shape import NcclShape

__all__ = ["NcclShapedCcl"]

@final
class NcclShapedCcl:
    library: Library
    shape: NcclShape
    table: Any
    def __init__(self, shape: NcclShape, library: Library, device: Any = None) -> None: ...
    def version(self) -> int | None: ...
