# SPDX-License-Identifier: Apache-2.0
"""The compiled module. Everything else about the package is in pyproject.toml.

The headers come from the installed hetccl (also with build isolation: it is a build requirement); without one,
from the repository around this folder.
"""

import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

try:
    import hetccl
except ImportError:
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir))
    import hetccl

INCLUDE = hetccl.get_include()
FOLDER = "hetccl_transport_tcp"

module = Extension(
    f"{FOLDER}._tcp",
    [f"{FOLDER}/_tcp.pyx", f"{FOLDER}/stream.c", f"{FOLDER}/endpoint.c", f"{FOLDER}/window.c", f"{FOLDER}/bulk.c"],
    include_dirs=[INCLUDE, FOLDER],
    extra_compile_args=["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    libraries=["pthread"],
    depends=[f"{FOLDER}/stream.h", f"{FOLDER}/window.h"],
)

setup(
    ext_modules=cythonize(
        [module],
        # The folder that holds the package `hetccl`, for `from hetccl.spi cimport ...`.
        include_path=[os.path.dirname(os.path.dirname(INCLUDE))],
        compiler_directives={"language_level": 3, "binding": True, "embedsignature": True, "auto_pickle": False},
        build_dir="build/cython",
    )
)
