# SPDX-License-Identifier: Apache-2.0
"""Gives every folder under plugins/ a tox environment named after its driver, so that adding one edits no file here."""

from __future__ import annotations

from pathlib import Path

from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.config.types import Command
from tox.plugin import impl
from tox.session.state import State

ROOT = Path(__file__).parent
PREFIXES = ("hetccl-vendor-", "hetccl-transport-")


@impl
def tox_extend_envs() -> tuple[str, ...]:
    return tuple(_plugins())


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    python = str(ROOT / ".venv" / "bin" / "python")
    for name, folder in _plugins().items():
        tests = Command([python, "-m", "pytest", str(folder.relative_to(ROOT))])
        state.conf.memory_seed_loaders[name].append(
            MemoryLoader(description=f"plug-in {folder.name}", commands=[tests])
        )


def _plugins() -> dict[str, Path]:
    """Driver name to folder: plugins/hetccl-vendor-oneccl is 'oneccl'."""
    found: dict[str, Path] = {}
    for metadata in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        folder = metadata.parent
        for prefix in PREFIXES:
            if folder.name.startswith(prefix):
                found[folder.name.removeprefix(prefix)] = folder
    return found
