# SPDX-License-Identifier: Apache-2.0
"""The foo vendor: its collective library has NCCL's calls under another prefix and works on ordinary host memory.

A device with memory of its own needs a `device_table` of its own too; see device_ops in hetccl/spi.h.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import ClassVar

from hetccl.errors import HetcclError, PluginLoadError
from hetccl.vendors.base import Availability, IslandKey, Option, Vendor, VendorDriver, VendorRequest
from hetccl.vendors.nccl_shape import Caps, NcclShape, Result, Status

__all__ = ["FooDriver", "FooVendor"]

LIBRARY = Option("HETCCL_FOO_LIBRARY", "Full path of libfoo.so; unset: the loader's search path.")
REMEDY = f"Install Foo's runtime, or set {LIBRARY.name} to the full path of libfoo.so"

# Numbers and names come from the vendor's documentation; see NcclShape for every field that can differ.
RESULTS = MappingProxyType(
    {
        0: Result(Status.OK, "fooSuccess"),
        1: Result(Status.VENDOR, "fooInternalError"),
        2: Result(Status.INVALID, "fooInvalidArgument"),
        3: Result(Status.IN_PROGRESS, "fooInProgress"),
    }
)


def shape() -> NcclShape:
    """How Foo's library differs from NCCL."""
    return NcclShape(
        name="Foo",
        libraries=(os.environ.get(LIBRARY.name) or "libfoo.so.1",),
        prefix="foo",
        results=RESULTS,
        missing=frozenset({"CommSplit"}),
        caps=Caps.BLOCKING | Caps.MULTI_COMM,
        remedy=REMEDY,
    )


class FooDriver(VendorDriver):
    """Finds Foo's library."""

    name: ClassVar[str] = "foo"
    torch_device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    options: ClassVar[tuple[Option, ...]] = (LIBRARY,)
    simulated_only: ClassVar[bool] = True  # until it has run on the real thing

    def probe(self) -> Availability:
        from hetccl.dynlib import open_library

        wanted = shape()
        try:
            library = open_library(wanted.libraries, what=wanted.name)
        except HetcclError as error:
            return Availability(False, str(error), REMEDY)
        return Availability(True, details={"library": library.path})

    def open(self, request: VendorRequest) -> FooVendor:
        return FooVendor(request)


class FooVendor(Vendor):
    """Foo's library, opened for one rank."""

    name = "foo"

    def __init__(self, request: VendorRequest) -> None:
        from hetccl.dynlib import open_library
        from hetccl.vendors import host_memory
        from hetccl.vendors.nccl_shaped import NcclShapedCcl

        wanted = shape()
        library = open_library(wanted.libraries, remedy=wanted.remedy, what=wanted.name)
        self._ccl = NcclShapedCcl(wanted, library)
        version = self._ccl.version()
        if version is None:
            raise PluginLoadError(f"foo: {library.path} does not say its version. {REMEDY}")
        self.device_table = host_memory.device_table()
        self.ccl_table = self._ccl.table
        # Major and minor: ranks of different versions do not form one island. The library works on one host only.
        self.island_key = IslandKey("foo", f"{version // 10000}.{version // 100 % 100}", "", request.host_id)
