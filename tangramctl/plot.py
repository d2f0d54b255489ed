"""A curve of a simulation as SVG, written by hand: matplotlib would be 100 MiB for one picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 400, 56, 44, 32
COLOURS: Final = ("#1f6feb", "#d1242f")


def curve_svg(title: str, curve: Sequence[tuple[float, ...]]) -> str:
    """Allocation and fragmentation over what arrived, all in percent of the capacity: (arrived, allocated, fragmented)."""
    most = max((point[0] for point in curve), default=100)

    def at(x: float, y: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 16) * x / most:.1f},{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y / 100:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for y in range(0, 101, 20):
        x0, y0 = at(0, y).split(",")
        parts.append(f'<polyline points="{at(0, y)} {at(most, y)}" stroke="#dddddd" fill="none"/>')
        parts.append(f'<text x="{float(x0) - 8}" y="{float(y0) + 4}" text-anchor="end">{y}</text>')
    for x in range(0, int(most) + 1, 10):
        x0, y0 = at(x, 0).split(",")
        parts.append(f'<text x="{x0}" y="{float(y0) + 16}" text-anchor="middle">{x}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">arrived, percent of the GPU capacity</text>'
    )
    for column, (name, colour) in enumerate(zip(("allocated", "fragmented"), COLOURS, strict=True), 1):
        points = " ".join(at(point[0], point[column]) for point in curve)
        parts.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="2" fill="none"/>')
        parts.append(f'<text x="{LEFT + 12}" y="{TOP + 16 * column}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
