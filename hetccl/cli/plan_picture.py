# SPDX-License-Identifier: Apache-2.0
"""A timeline as SVG: one row a rank and lane, one box a step of a segment. Needs no library."""

from __future__ import annotations

from xml.sax.saxutils import escape

from hetccl.core.simulate import STAGES, Span, Timeline
from hetccl.core.topology import Topology

__all__ = ["draw"]

COLOURS = dict(zip(STAGES, ("#4c78a8", "#bab0ab", "#e45756", "#f2a541", "#54a24b"), strict=True))
LEFT, WIDTH, ROW, TOP = 150, 800, 16, 64
INK, FAINT = "#222", "#ddd"


def draw(topology: Topology, timeline: Timeline, title: str) -> str:
    """The whole file's text. Rows of one island stand together; only ranks with spans are drawn."""
    rows: list[tuple[int, str]] = []
    for island in topology.islands:
        for rank in island.ranks:
            lanes = {s.lane for s in timeline.spans if s.rank == rank}
            rows += [(rank, lane) for lane in ("island", "border") if lane in lanes]
    where = {row: TOP + i * ROW for i, row in enumerate(rows)}
    end = max((s.end for s in timeline.spans), default=1.0) or 1.0
    height = TOP + len(rows) * ROW + 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        f'viewBox="0 0 {LEFT + WIDTH + 20} {height}" font-family="sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{LEFT + WIDTH + 20}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="13">{escape(title)}</text>',
        *_legend(timeline),
        *_axis(end, TOP + len(rows) * ROW),
    ]
    for (rank, lane), y in where.items():
        name = topology.island_of(rank).name
        label = f"rank {rank} {name}" if lane == "island" or (rank, "island") not in where else ""
        parts.append(f'<text x="10" y="{y + 11}">{escape(label)}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end" fill="#777">{lane}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y + ROW}" y2="{y + ROW}" stroke="{FAINT}"/>')
    parts += [_box(s, where[s.rank, s.lane], end) for s in timeline.spans]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: Span, y: int, end: float) -> str:
    x, w = LEFT + span.start / end * WIDTH, max(0.6, (span.end - span.start) / end * WIDTH)
    tip = f"{span.name}, segment {span.segment}: {_time(span.start)} to {_time(span.end)}, {span.nbytes} bytes"
    return (
        f'<rect x="{x:.1f}" y="{y + 2}" width="{w:.1f}" height="{ROW - 4}" fill="{COLOURS[span.stage]}" '
        f'stroke="white" stroke-width="0.4"><title>{escape(tip)}</title></rect>'
    )


def _legend(timeline: Timeline) -> list[str]:
    parts, x = [], 10
    for stage in STAGES:
        if stage not in timeline.stages:
            continue
        text = f"{stage} {_time(timeline.stages[stage])}" + (" (bottleneck)" if stage == timeline.bottleneck else "")
        parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{COLOURS[stage]}"/>')
        parts.append(f'<text x="{x + 14}" y="37">{escape(text)}</text>')
        x += 34 + 6 * len(text)
    return parts


def _axis(end: float, bottom: int) -> list[str]:
    parts = []
    for k in range(6):
        x = LEFT + WIDTH * k / 5
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom}" stroke="{FAINT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_time(end * k / 5)}</text>')
    return parts


def _time(t: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if t >= scale:
            return f"{t / scale:.3g} {unit}"
    return f"{t * 1e6:.3g} us"
