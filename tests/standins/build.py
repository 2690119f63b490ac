# SPDX-License-Identifier: Apache-2.0
"""Builds the stand-ins of CUDA, NCCL, HIP and RCCL with the system's compiler, into a folder of the caller's."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent
# file -> source and flags
NVIDIA = {
    "libcudart.so.13": ("runtime.c",),
    "libcuda.so.1": ("driver.c",),
    "libnvrtc.so.13": ("compiler.c",),
    "libnccl.so.2": ("ccl.c",),
}
AMD = {
    "libamdhip64.so.7": ("runtime.c", "-DHIP"),
    "libhiprtc.so.7": ("compiler.c", "-DHIP"),
    "librccl.so.1": ("ccl.c", "-DHIP"),
}


def build(folder: Path, libraries: dict[str, tuple[str, ...]] | None = None, *more: str) -> None:
    """`more`: further flags, e.g. -DOLD. Raises `CalledProcessError` with the compiler's words on stderr."""
    for name, (source, *flags) in (libraries or {**NVIDIA, **AMD}).items():
        command = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
        command += [*flags, *more, f"-Wl,-soname,{name}", "-o", str(folder / name), str(SOURCES / source)]
        subprocess.run([*command, "-lpthread", "-ldl", "-lrt"], check=True, timeout=60)
    topology(folder / "topology")


def topology(folder: Path, version: int = 90402, gpus: int = 8) -> None:
    """What the kernel driver of AMD's GPUs shows of `gpus` devices (and of the CPU, which has no target)."""
    for node in range(gpus + 1):
        (folder / str(node)).mkdir(parents=True, exist_ok=True)
        target = version if node else 0
        (folder / str(node) / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {target}\nlocation_id {node << 8}\ndomain 0\n"
        )


def environment(folder: Path) -> dict[str, str]:
    """For processes that shall find the stand-ins."""
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH", "")])]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "STANDIN_CACHE": str(folder),
        "HETCCL_KERNEL_CACHE": "off",
        "HETCCL_RCCL_TOPOLOGY": str(folder / "topology"),
    }


def by_path(shape: Any, folder: Path) -> Any:
    """A copy of a runtime's or a library's shape whose files are named by their paths in `folder`.

    By its bare name the loader would hand out the real library wherever this process has opened that before.
    """
    changes: dict[str, Any] = {"libraries": _paths(shape.libraries, folder)}
    for part in ("loader", "compiler"):
        inner = getattr(shape, part, None)
        if inner is not None:
            changes[part] = replace(inner, libraries=_paths(inner.libraries, folder))
    return replace(shape, **changes)


def _paths(names: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    return tuple(str(folder / name) for name in names if (folder / name).exists())
