# SPDX-License-Identifier: Apache-2.0
"""Sphinx settings. Made at build time: the page of each plug-in, and the references of all variables and of the keys of
a topology file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import hetccl

HERE = Path(__file__).parent
ROOT = HERE.parent

project = "hetccl"
author = "the hetccl authors"
project_copyright = author
release = hetccl.__version__
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "hetccl"
nitpicky = True


def setup(app: Any) -> None:
    app.connect("builder-inited", _generate)


def _generate(_app: Any) -> None:
    generated = HERE / "generated"
    shutil.rmtree(generated, ignore_errors=True)
    generated.mkdir()
    for readme in sorted(ROOT.glob("plugins/*/README.md")):
        if readme.parent.name != "_template":
            shutil.copy(readme, generated / f"{readme.parent.name}.md")
    (generated / "tuning-keys.md").write_text(_tuning_keys())
    (generated / "variables.md").write_text(_variables())
    (generated / "topology-keys.md").write_text(_topology_keys())


def _variables() -> str:
    from hetccl.core import config

    return f"# Variables\n\nAll are read when a communicator is made.\n\n{config.render(config.variables())}"


def _tuning_keys() -> str:
    from hetccl.core.tuning import KEYS
    from hetccl.core.yaml_keys import render_keys

    return f"# Keys of the tuning file\n\n`hetccl tune` writes it, HETCCL_TUNING names it.\n\n{render_keys(KEYS)}"


def _topology_keys() -> str:
    from hetccl.core.topology_keys import KEYS
    from hetccl.core.yaml_keys import render_keys

    return (
        "# Topology file\n\nKeys of the file that `HETCCL_TOPOLOGY` names. A `*` is a name of yours, `[]` an entry of "
        f"a list. See [](../guide/topology.md) for examples.\n\n{render_keys(KEYS)}"
    )
