# SPDX-License-Identifier: Apache-2.0
"""What `hetccl fetch oneccl` downloads, as data: three wheels from PyPI, pinned by hash, and six files out of them.

No single package of Intel's works on a CPU alone: the C interface is in one wheel, the CPU build in the second, and the
libfabric that both need in the third.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DOWNLOAD", "FOLDER", "LIBRARIES", "Download", "Wheel"]

VERSION = "2022.2.0"
FOLDER = f"oneccl-{VERSION}"


@dataclass(frozen=True)
class Wheel:
    """One pinned wheel and what is taken out of it."""

    requirement: str  # as pip is asked
    sha256: str  # of the wheel
    nbytes: int
    libraries: tuple[str, ...]  # file names under lib/ of the wheel's data
    licenses: tuple[str, ...]  # path endings in the wheel


@dataclass(frozen=True)
class Download:
    """All that makes one usable folder."""

    title: str
    folder: str  # below the folder HETCCL_HOME
    variable: str  # names another folder to the driver
    machine: str  # as `uname -m` says
    license: str
    wheels: tuple[Wheel, ...]


DOWNLOAD = Download(
    title=f"Intel oneCCL {VERSION} for CPUs",
    folder=FOLDER,
    variable="HETCCL_ONECCL_PATH",
    machine="x86_64",
    license="Intel Simplified Software License (October 2022)",
    wheels=(
        Wheel(
            f"oneccl=={VERSION}",
            "02c2f52434bfad50cc2d00be6e97fd81e3f365d279ac7bdabd2e3b656194c19f",
            92213536,
            ("libccl.so.2", "libccl_legacy_cpu.so"),
            (".dist-info/LICENSE.txt", "ccl/licensing/third-party-programs.txt"),
        ),
        Wheel(
            f"oneccl-cpu=={VERSION}",
            "cc912935bd882b4328a569f70a475942e6e77994255775bde7de6452a982af54",
            6510184,
            ("libccl.so.1",),
            (".dist-info/LICENSE.txt", "ccl/licensing/third-party-programs.txt"),
        ),
        Wheel(
            "impi-rt==2021.15.0",
            "1e900c630d6396c8a33816de9866d74f06419903db454899045fadb05ab390f1",
            82633082,
            ("libfabric.so.1", "libshm-fi.so", "libtcp-fi.so"),
            (".dist-info/LICENSE.txt", "mpi/licensing/third-party-programs.txt"),
        ),
    ),
)

LIBRARIES = tuple(name for wheel in DOWNLOAD.wheels for name in wheel.libraries)
