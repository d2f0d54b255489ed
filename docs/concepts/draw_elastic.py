"""Draw docs/concepts/elastic-memory.svg: `python -m docs.concepts.draw_elastic` writes it beside this file, and a test compares the two.

The picture explains, it does not measure. Two containers have a guarantee of 20 GiB and a limit of 60 GiB each, on a GPU of 80 GiB. Heights are
memory, at one pixel a GiB; time runs to the right, and lengths are not to scale: a quantum is at least 20 times the time of a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

PICTURE: Final = Path(__file__).with_name("elastic-memory.svg")
TITLE: Final = (
    "Two containers on a GPU of 80 GiB, each with a guarantee of 20 GiB and 60 GiB in use. While one runs, a part of the other's excess is in "
    "host memory, and the other is paused. When a quantum ends, that memory changes places."
)
WIDTH, HEIGHT, LEFT, START, END = 760, 418, 10, 150, 730
GPU_GIB, GUARANTEE_GIB, USED_GIB = 80, 20, 60
AWAY_GIB: Final = 2 * USED_GIB - GPU_GIB
"""Of the container that is paused: exactly what is short."""
CHANGES: Final = ((240, 280), (440, 480))
"""The stretches in which memory moves. Before the first, only A uses its excess."""
ENDS: Final = 640
"""B ends: its memory, also that in host memory, is released."""
STYLE: Final = (
    ".guarantee{fill:#0b5394}.excess{fill:#9aa5b1}.away{fill:none;stroke:#9aa5b1;stroke-dasharray:3 3}.move{fill:#e69138}"
    ".run{fill:#0b5394}.pause{fill:none;stroke:#9aa5b1;stroke-dasharray:3 3}.note{fill:#52606d}.light{fill:#fff}"
    ".line{stroke:#cbd2d9}.mark{stroke:#1f2933;stroke-width:1.2;fill:none}"
)


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "", bold: bool = False) -> str:
    style = (f' class="{kind}"' if kind else "") + (' font-weight="600"' if bold else "")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def _box(kind: str, start: int, end: int, top: int, high: int) -> str:
    return f'<rect class="{kind}" x="{start}" y="{top}" width="{end - start}" height="{high}"/>'


def _memory(y: int, name: str, used: tuple[tuple[int, int, int, int], ...]) -> Iterator[str]:
    """A container's memory from bottom `y` upwards. `used`: (start, end, GiB of it on the GPU, GiB in all)."""
    yield _text(LEFT, y - 34, name, bold=True)
    yield _text(LEFT, y - 18, "excess", kind="note")
    yield _text(LEFT, y - 4, "guarantee, 20 GiB", kind="note")
    for start, end, gib, in_all in used:
        yield _box("guarantee", start, end, y - GUARANTEE_GIB, GUARANTEE_GIB)
        if gib > GUARANTEE_GIB:
            yield _box("excess", start, end, y - gib, gib - GUARANTEE_GIB)
        if gib < in_all:
            yield _box("away", start, end, y - in_all, in_all - gib)


def _moves(y: int, *changes: tuple[int, int]) -> Iterator[str]:
    """The excess that moves, over the memory drawn before."""
    for start, end in changes:
        yield _box("move", start, end, y - USED_GIB, AWAY_GIB)


def _work(y: int, name: str, parts: tuple[tuple[int, int, str], ...]) -> Iterator[str]:
    yield _text(LEFT, y + 15, name)
    for start, end, kind in parts:
        yield _box("run" if kind == "run" else "pause", start, end, y, 22)
        words = {"run": "runs", "pause": "paused", "wait": "waits"}[kind]
        if len(words) * 7 < end - start:
            yield _text((start + end) / 2, y + 15, words, anchor="middle", kind="light" if kind == "run" else "note")


def picture() -> str:
    """The whole SVG document."""
    (one, two), (three, four), five = *CHANGES, ENDS
    away = USED_GIB - AWAY_GIB
    body = [
        _text(LEFT, 24, "One GPU of 80 GiB, two containers that use 60 GiB each", bold=True),
        *(line for x, words in ((one, "B allocates"), (three, "A's turn"), (five, "B ends")) for line in _moment(x, words)),
        *_memory(150, "container A", ((START, one, USED_GIB, USED_GIB), (one, four, away, USED_GIB), (four, END, USED_GIB, USED_GIB))),
        *_moves(150, *CHANGES),
        *_memory(260, "container B", ((START, two, GUARANTEE_GIB, GUARANTEE_GIB), (two, three, USED_GIB, USED_GIB), (three, five, away, USED_GIB))),
        *_moves(260, CHANGES[1]),
        *_work(284, "A's GPU work", ((START, one, "run"), (one, four, "pause"), (four, END, "run"))),
        *_work(314, "B's GPU work", ((START, one, "run"), (one, two, "wait"), (two, three, "run"), (three, five, "pause"))),
        f'<path class="mark" d="M{two} 344 v5 H{three} v-5"/>',
        _text((two + three) / 2, 363, "quantum of B", anchor="middle"),
        f'<path class="mark" d="M{four} 344 v5 H{five} v-5"/>',
        _text((four + five) / 2, 363, "quantum of A", anchor="middle"),
        _box("move", LEFT, LEFT + 22, 380, 12), _text(LEFT + 28, 391, "moves between GPU and host memory"),
        _box("away", 300, 322, 380, 12), _text(328, 391, "in host memory"),
        _box("excess", 450, 472, 380, 12), _text(478, 391, "above the guarantee, on the GPU"),
        _text(LEFT, 411, "Time runs to the right; not to scale. Only what is short moves: 2 x 60 - 80 = 40 GiB.", kind="note"),
    ]  # fmt: skip
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="#1f2933" role="img" aria-labelledby="title">'
    start = [head, f'<title id="title">{escape(TITLE)}</title>', f"<style>{STYLE}</style>"]
    return "\n".join([*start, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *body, "</svg>"]) + "\n"


def _moment(x: int, words: str) -> Iterator[str]:
    yield f'<path class="mark" d="M{x} 62 v278"/>'
    yield _text(x, 56, words, anchor="middle")


if __name__ == "__main__":
    PICTURE.write_text(picture())
