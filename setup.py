# SPDX-License-Identifier: Apache-2.0
"""The compiled modules. Everything else about the package is in pyproject.toml.

HETCCL_EXT=core,shm builds only the modules whose name contains one of these words (for development).
"""

import copy
import glob
import os

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DIRECTIVES = {
    "language_level": 3,
    "binding": True,
    "embedsignature": True,
    "auto_pickle": False,
    "autotestdict": False,
    "boundscheck": False,
    "wraparound": False,
}
INCLUDE = ["hetccl/include", "hetccl/native"]
HEADERS = glob.glob("hetccl/**/*.h", recursive=True)
NATIVE = "hetccl/native/"
# Not named as the .pyx beside them: Cython would write its output over them.
COMBINE = NATIVE + "combine_impl.c"
SIM = tuple(
    f"hetccl/vendors/sim/{name}.c" for name in ("memory", "stream", "event", "work", "device", "ccl", "conditions")
)
ISLAND = (*(NATIVE + f"island_{part}.c" for part in ("region", "impl", "small", "p2p", "team")), COMBINE)
ENGINE = tuple(
    f"hetccl/core/{name}.c"
    for name in (
        "executor",
        "memory",
        "awaited",
        "island_calls",
        "streamed",
        "flows",
        "windows",
        "direct",
        "direct_combine",
        "direct_p2p",
        "direct_wire",
        "team",
        "device_sum",
        "identity",
        "comm",
        "waiting",
        "lane",
        "progress",
        "p2p",
        "p2p_wire",
        "board",
        "turns",
        "trace",
    )
)


def extension(name: str, *c_sources: str, libraries: tuple[str, ...] = ()) -> Extension:
    """A module from its .pyx and the C files it is linked with."""
    path = name.replace(".", "/")
    return Extension(
        name,
        [f"{path}.pyx", *c_sources],
        include_dirs=[*INCLUDE, os.path.dirname(path)],
        extra_compile_args=[
            "-std=gnu11",
            "-O3",
            "-g0",
            "-ffp-contract=off",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Wno-cast-function-type",
        ],
        libraries=list(libraries),
        depends=HEADERS,
    )


EXTENSIONS = [
    extension("hetccl.dynlib", libraries=("dl",)),
    *(extension(f"hetccl.tables.{name}") for name in ("common", "device", "ccl", "transport")),
    extension("hetccl.native.combine", COMBINE),
    extension("hetccl.native.island", *ISLAND, libraries=("pthread",)),
    extension("hetccl.vendors.host_memory", COMBINE),
    extension("hetccl.vendors.nccl_calls", libraries=("pthread",)),
    extension("hetccl.vendors.nccl_shaped"),
    extension("hetccl.vendors.cuda_shaped", "hetccl/vendors/cuda_device.c", "hetccl/vendors/cuda_spin.c"),
    extension("hetccl.vendors.host._host", *ISLAND, libraries=("pthread",)),
    extension("hetccl.vendors.sim._sim", *SIM, *ISLAND, libraries=("pthread",)),
    extension(
        "hetccl.transports.shm._shm",
        "hetccl/transports/shm/ring.c",
        "hetccl/transports/shm/doorbell.c",
        "hetccl/transports/shm/link.c",
    ),
    extension("hetccl.core._plans"),
    extension("hetccl.core._board", "hetccl/core/board.c"),
    extension("hetccl.core._parting", "hetccl/core/parting.c", libraries=("pthread",)),
    extension("hetccl.core._shaping", "hetccl/core/shaping.c"),
    extension("hetccl.core._trace", libraries=("pthread",)),
    extension("hetccl.core._state", "hetccl/core/identity.c", COMBINE),
    extension("hetccl.core._engine", *ENGINE, COMBINE, libraries=("pthread",)),
    extension("hetccl.torch._glue"),
    extension("hetccl.torch._work"),
]


class ParallelBuild(build_ext):
    """Compiles the modules side by side, each in a folder of its own since some share a C file."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(own, ext)


only = os.environ.get("HETCCL_EXT")
if only:
    EXTENSIONS = [e for e in EXTENSIONS if any(word in e.name for word in only.split(","))]

setup(
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=cythonize(
        EXTENSIONS, compiler_directives=DIRECTIVES, build_dir="build/cython", nthreads=os.cpu_count() or 1
    ),
)
