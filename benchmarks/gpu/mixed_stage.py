# SPDX-License-Identifier: Apache-2.0
"""The stage `mixed_stages` of run.py: an all_reduce of two GPUs beside two CPU ranks, and what it consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WHOLE = ("all ranks", "gloo")


def mixed_stages(run: Any, report: Callable[..., Any], ranks: Callable[..., Any], spec: str) -> None:
    """64 MiB by threads of a CPU rank, tensors on huge pages: the whole, each stage alone, and what is asked: 5 times
    Gloo's bandwidth or 0.9 of the slowest stage's, whichever is less."""
    size = 64 << 20
    for threads in ("1", "2", "4"):
        env = {"HETCCL_CPU_THREADS": threads, "THP_MEM_ALLOC_ENABLE": "1"}
        make = ranks(run, "mixed_stages", spec, 60, str(size), env, cpus=2)
        found = report(run, f"mixed_stages_{threads}", make, show=False)
        if not found:
            continue
        us = found[0]["us"]
        alone = {name: t for name, t in us.items() if name not in WHOLE}
        slowest = max(alone, key=lambda name: alone[name])
        asked = max(us["gloo"] / 5, us[slowest] / 0.9)
        print(f"{threads} threads, {size} B   " + "   ".join(f"{name} {t / 1e3:.2f} ms" for name, t in us.items())
              + f"\n    whole {size / us['all ranks'] / 1e3:.2f} GB/s, {us['gloo'] / us['all ranks']:.2f} times Gloo, "
              f"{us[slowest] / us['all ranks']:.2f} of {slowest!r}; asked {size / asked / 1e3:.2f} GB/s: "
              + ("met" if us["all ranks"] <= asked else "not met"), flush=True)  # fmt: skip
