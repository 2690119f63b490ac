# SPDX-License-Identifier: Apache-2.0
"""What `hetccl doctor` says of the topology file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hetccl.core.explain_border import describe_borders, describe_relays, rate
from hetccl.core.topology_file import load_topology
from hetccl.errors import HetcclError
from hetccl.types import Op

__all__ = ["rows"]


def rows(environ: Mapping[str, str] | None = None) -> list[tuple[str, str, str, str]]:
    """(name, state, text, remedy) of each line."""
    path = (os.environ if environ is None else environ).get("HETCCL_TOPOLOGY", "").strip()
    if not path:
        return [("file", "info", "HETCCL_TOPOLOGY is not set: islands are found from the ranks, all at the border", "")]
    try:
        file = load_topology(os.path.expanduser(path))
    except HetcclError as error:
        return [("file", "unavailable", str(error), "`hetccl doctor --keys` lists what a topology file may say")]
    topology = file.topology()
    found = [("file", "ok", f"{file.path}: {topology.size} ranks in {len(topology.islands)} islands", "")]
    borders = describe_borders(topology, Op.ALL_REDUCE) or [""]
    for island, border in zip(topology.islands, borders, strict=True):
        words = [f"{island.size} rank(s)"]
        if file.order[island.index].hosts:
            words.append(f"{len({topology.hosts[r] for r in island.ranks})} host(s)")
        if island.border_rate:
            words.append(f"{rate(island.border_rate)} at the border")
        found.append((island.name, "ok", "; ".join(filter(None, [", ".join(words), border])), ""))
    found += [("relayed", "info", text, "") for text in describe_relays(topology)]
    if len(topology.islands) > 8:
        found.append(("islands", "warning", "more than 8 can be planned, but not run", "leave fewer in a running job"))
    found.append(("digest", "info", topology.digest[:16], ""))
    return found
