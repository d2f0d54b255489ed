"""Draw docs/concepts/gpu-time.svg: `python -m docs.concepts.draw` writes it beside this file, and a test compares the two.

The picture explains, it does not measure: one unit is one pixel, time runs to the right, and lengths are not to scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

PICTURE: Final = Path(__file__).with_name("gpu-time.svg")
TITLE: Final = (
    "A latency-critical request beside a busy best-effort container: found by the library, and announced 1.5 ms ahead. "
    "Below, a container with gpu-core 30 alone on the GPU."
)
WIDTH, HEIGHT, LEFT, BAR = 760, 430, 10, 22
STYLE: Final = (
    ".work{fill:#9aa5b1}.urgent{fill:#0b5394}.off{fill:none;stroke:#9aa5b1;stroke-dasharray:3 3}.switch{fill:#e69138}"
    ".note{fill:#52606d}.light{fill:#fff}.line{stroke:#cbd2d9}.mark{stroke:#1f2933;stroke-width:1.2;fill:none}"
)


def _text(x: float, y: int, words: str, *, anchor: str = "start", kind: str = "", bold: bool = False) -> str:
    style = (f' class="{kind}"' if kind else "") + (' font-weight="600"' if bold else "")
    return f'<text x="{x:g}" y="{y}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def _bar(kind: str, start: int, end: int, y: int, words: str = "") -> Iterator[str]:
    """A stretch of time. Words that are wider than it stand after it."""
    yield f'<rect class="{kind}" x="{start}" y="{y}" width="{end - start}" height="{BAR}"/>'
    if len(words) * 6.5 <= end - start:
        yield _text((start + end) / 2, y + 15, words, anchor="middle", kind="light" if kind == "urgent" else "")
    elif words:
        yield _text(end + 5, y + 15, words)


def _moment(x: int, y: int, words: str) -> Iterator[str]:
    yield f'<path class="mark" d="M{x} {y + 5} v85"/>'
    yield _text(x, y, words, anchor="middle")


def _rows(y: int, *names: str) -> Iterator[str]:
    for row, name in enumerate(names):
        yield _text(LEFT, y + 16 + 29 * row, name)


def _found() -> Iterator[str]:
    yield _text(LEFT, 24, "Found by the library", bold=True)
    yield from _moment(350, 47, "request: first launch")
    yield from _rows(58, "best-effort", "arbiter", "latency-critical")
    yield from _bar("work", 150, 410, 58, "kernel of 60 ms")
    yield from _bar("off", 410, 525, 58, "suspended")
    yield from _bar("work", 525, 730, 58, "the same kernel continues")
    yield from _bar("switch", 355, 410, 87, "suspend")
    yield from _bar("switch", 495, 525, 87, "resume")
    yield from _bar("off", 350, 410, 116, "waits")
    yield from _bar("urgent", 410, 470, 116, "runs")
    yield '<path class="mark" d="M470 142 v5 H495 v-5"/>'
    yield _text(500, 152, "grace period", kind="note")


def _announced() -> Iterator[str]:
    yield _text(LEFT, 184, "Announced 1.5 ms ahead", bold=True)
    yield from _moment(200, 207, "tangram_hint(1500)")
    yield from _moment(350, 207, "request: first launch")
    yield from _rows(218, "best-effort", "arbiter", "latency-critical")
    yield from _bar("work", 150, 260, 218, "kernel of 60 ms")
    yield from _bar("off", 260, 465, 218, "suspended")
    yield from _bar("work", 465, 730, 218, "the same kernel continues")
    yield from _bar("switch", 205, 260, 247, "suspend")
    yield from _bar("switch", 435, 465, 247, "resume")
    yield from _bar("urgent", 260, 272, 276)
    yield _text(230, 312, "empty kernel", kind="note")
    yield from _bar("urgent", 350, 410, 276, "runs")


def _limited() -> Iterator[str]:
    yield _text(LEFT, 342, "gpu-core: 30, alone on the GPU", bold=True)
    yield from _rows(352, "kernels")
    for frame in range(150, 750, 150):
        yield from _bar("work", frame, frame + 45, 352, "runs")
        yield from _bar("off", frame + 45, min(frame + 150, 730), 352, "suspended")
    yield '<path class="mark" d="M150 378 v5 H300 v-5"/>'
    yield _text(150, 398, "one frame: 50 ms")
    yield _text(350, 398, "30 % of each frame; a late suspend is repaid in the next frame", kind="note")
    yield _text(LEFT, 422, "Time runs to the right; not to scale.", kind="note")


def picture() -> str:
    """The whole SVG document."""
    lines = [f'<path class="line" d="M{LEFT} {y} H{WIDTH - LEFT}"/>' for y in (164, 322)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="#1f2933" role="img" aria-labelledby="title">'
    start = [head, f'<title id="title">{escape(TITLE)}</title>', f"<style>{STYLE}</style>"]
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join([*start, back, *_found(), *_announced(), *_limited(), *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
