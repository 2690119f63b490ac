# SPDX-License-Identifier: Apache-2.0
"""The closing table: what was measured, in rows of (what, value). Rich draws it where it is installed."""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["comparison", "show", "single"]

Rows = list[tuple[str, str]]


def comparison(
    mixed: dict[str, Any],
    gloo: dict[str, Any],
    parts: list[dict[str, Any]],
    remark: str,
    setup_seconds: float | None,
    seconds: float,
) -> Rows:
    """Rows for the whole demo: the mixed run, beside Gloo and beside each island as a job of its own."""
    rows = [("oneCCL", remark)] if remark else []
    rows += _layout(mixed) + _vendor_calls(mixed)
    rows.append(("loss, first and last step", f"{mixed['first_loss']:.4f} -> {mixed['last_loss']:.4f}"))
    difference = mixed["last_loss"] - gloo["last_loss"]
    rows.append(("last loss on Gloo", f"{gloo['last_loss']:.4f} (difference {difference:+.2e})"))
    speed = mixed["tokens_per_second"]
    rows.append(("tokens/s, all ranks", f"{speed:.0f}"))
    times = speed / gloo["tokens_per_second"]
    rows.append(("tokens/s on Gloo", f"{gloo['tokens_per_second']:.0f} (hetccl is {times:.2f} times as fast)"))
    rows += _halves(speed, parts)
    rows += _border(mixed)
    rows.append(("parameters identical on all ranks", _yes(mixed["identical"])))
    if setup_seconds is not None:
        rows.append(("time of set-up", f"{setup_seconds:.0f} s"))
    runs = [("mixed", mixed), ("gloo", gloo), *((part["label"], part) for part in parts)]
    rows.append(("time of training", ", ".join(f"{name} {run['train_seconds']:.1f} s" for name, run in runs)))
    rows.append(("time of all runs", f"{seconds:.0f} s, starting processes included"))
    return rows


def single(run: dict[str, Any]) -> Rows:
    """Rows for one run by itself, as under an external torchrun."""
    return [
        *_layout(run),
        *_vendor_calls(run),
        ("loss, first and last step", f"{run['first_loss']:.4f} -> {run['last_loss']:.4f}"),
        ("tokens/s, all ranks", f"{run['tokens_per_second']:.0f}"),
        *_border(run),
        ("parameters identical on all ranks", _yes(run["identical"])),
        ("time of joining", f"{run['join_seconds']:.1f} s"),
        ("time of training", f"{run['train_seconds']:.1f} s"),
    ]


def show(rows: Rows) -> None:
    """Prints the rows as a table."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max(len(what) for what, _ in rows)
        previous = None
        print()
        for what, value in rows:
            print(f"{'' if what == previous else what:<{width}}  {value}")
            previous = what
        return
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    previous = None
    for what, value in rows:
        table.add_row("" if what == previous else what, value)
        previous = what
    Console(markup=False).print(table)


def _layout(run: dict[str, Any]) -> Rows:
    """Each island with its ranks, then each pair's path; pairs of one path together."""
    islands: dict[Any, list[dict[str, Any]]] = {}
    for member in run["members"]:
        islands.setdefault(member["island"], []).append(member)
    rows: Rows = []
    for island, members in sorted(islands.items()):
        hosts = ", ".join(dict.fromkeys(str(member["host"]) for member in members))
        ranks = ", ".join(str(member["rank"]) for member in members)
        rows.append(("islands", f"{island}: {members[0]['vendor']}, ranks {ranks} on {hosts}"))
    pairs: dict[str, list[str]] = {}
    for a, b, path in run["paths"]:
        pairs.setdefault(path, []).append(f"{a}-{b}")
    rows += [("paths", f"{path}: {' '.join(which)}") for path, which in pairs.items()]
    return rows


def _vendor_calls(run: dict[str, Any]) -> Rows:
    """What each island's vendor library carried: calls of all its ranks together."""
    member_of = {member["rank"]: member for member in run["members"]}
    carried: dict[tuple[int, str], Counter[str]] = {}
    for rank, calls in enumerate(run["vendor_calls"]):
        if rank in member_of:
            key = (member_of[rank]["island"], member_of[rank]["vendor"])
            carried.setdefault(key, Counter()).update(calls)
    rows: Rows = []
    for (island, vendor), calls in sorted(carried.items()):
        counts = ", ".join(f"{call} {n}" for call, n in sorted(calls.items()) if n)
        rows.append(("vendor calls", f"{island}: {vendor}: {counts or 'none'}"))
    return rows


def _halves(speed: float, parts: list[dict[str, Any]]) -> Rows:
    """Throughput of the islands as jobs of their own, within the time in which all of them ran."""
    if not parts:
        return []
    start = max(part["ends"][0] for part in parts)
    end = min(part["ends"][-1] for part in parts)
    speeds = []
    for part in parts:
        steps = [moment for moment in part["ends"] if start <= moment <= end]
        if len(steps) < 2:
            return [("tokens/s of the islands alone", "not measured: the jobs did not run at the same time")]
        speeds.append((len(steps) - 1) * part["tokens_per_step"] / (steps[-1] - steps[0]))
    total = sum(speeds)
    each = ", ".join(f"{part['label']} {one:.0f}" for part, one in zip(parts, speeds, strict=True))
    return [
        ("tokens/s of the islands alone", f"{each}; sum {total:.0f} (at the same time)"),
        ("mixed efficiency", f"{100 * speed / total:.0f} % of that sum (on shared cores)"),
    ]


def _border(run: dict[str, Any]) -> Rows:
    """Bytes that crossed between islands while the clock ran, beside the least that the operations need."""
    islands = len({member["island"] for member in run["members"]})
    if islands < 2:
        return []
    sent = sum(traffic["border_bytes"] for traffic in run["traffic"])
    bound = 2 * (islands - 1) * run["reduced_bytes"]
    share = f"bound 2(C-1)S = {bound / 1e6:.2f} MB ({sent / bound:.3f} of it)"
    return [("border bytes", f"{sent / 1e6:.2f} MB sent, {share}")]


def _yes(answer: bool) -> str:
    return "yes" if answer else "NO"
