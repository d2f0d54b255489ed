"""What a person sees: the table of `ps`, and a spinner while a run waits. Nothing here decides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tangramctl.top import Table as TimeTable
from tangramctl.view import CardView, Entry, View

GIB: Final = 2**30
MIB: Final = 2**20
UNTOLD: Final = "computes while it says it is idle"
PLAIN_WIDTH: Final = 240
"""Columns where output is no terminal: lines are cut by whoever reads them, not here. Guessed."""


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Shows the text of the moment on stderr until left."""
    console = Console(stderr=True)
    with console.status("waiting", spinner="dots") as status:
        yield lambda text: status.update(Text(f"waiting: {text}"))


def console() -> Console:
    """Stdout, wide where it is a file."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=PLAIN_WIDTH)


def show(view: View, to: Console) -> None:
    """One table."""
    to.print(drawn(view))


@contextmanager
def watching(to: Console) -> Iterator[Callable[[View], None]]:
    """Shows each view in place of the one before; one after the other where output is no terminal."""
    with live(to) as put:
        yield lambda view: put(drawn(view))


@contextmanager
def live(to: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Shows each in place of the one before; one after the other where output is no terminal."""
    if not to.is_terminal:
        yield to.print
        return
    with Live(console=to, auto_refresh=False, screen=False) as shown:
        yield lambda what: shown.update(what, refresh=True)


def drawn(view: View) -> RenderableType:
    """The table, and below it what could not be read."""
    notes = [Text(note, style="yellow") for note in view.notes]
    if not view.entries:
        return Group(Text("no run holds a share of a GPU"), *notes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("PID", "RUN", "GPU", "CLASS"):
        table.add_column(name, no_wrap=True)
    for name in ("CORE", "TIME", "LIMIT", "LEASED", "USED", "CONTEXT", "SHARED", "PROCS"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("COMMAND", no_wrap=True, overflow="ellipsis")
    for entry in view.entries:
        for card in entry.cards:
            table.add_row(*_row(entry, card))
    return Group(table, *notes)


def _row(entry: Entry, card: CardView) -> list[Text]:
    over = "bold red" if entry.over else ""
    klass = entry.klass if entry.level == 2 else f"{entry.klass}/{entry.level}"
    name = f"{card.index}" if card.index is not None else card.uuid[:12]
    return [
        Text(str(entry.pid) if entry.pid else "-"),
        Text(entry.name),
        Text(f"{name} fake" if entry.fake else name),
        Text(klass),
        Text(f"{card.core_percent}%" if card.core_percent else "-"),
        Text("-" if entry.turn is None else clock(entry.turn.on_s)),
        Text(amount(card.limit_bytes)),
        Text(amount(card.leased_bytes)),
        Text(amount(card.used_bytes), style=over),
        Text(amount(card.context_bytes)),
        Text(amount(card.shared_bytes)),
        Text("?" if entry.processes is None else str(len(entry.processes))),
        Text(entry.command),
    ]


def amount(size: int | None) -> str:
    """Bytes for a person: `8.0Gi`, `512Mi`, `0`; `?` where nobody knows."""
    if size is None:
        return "?"
    if size >= 10 * GIB or (size >= GIB and size % GIB == 0):
        return f"{size / GIB:.1f}Gi".replace(".0Gi", "Gi")
    return f"{-(-size // MIB)}Mi" if size else "0"


def clock(seconds: float) -> str:
    """Time for a person: `12.3s`, `4m05s`, `7h03m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds < 3600:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02}s"
    return f"{int(seconds) // 3600}h{int(seconds) % 3600 // 60:02}m"


def drawn_top(table: TimeTable) -> RenderableType:
    """What everybody got of the last second."""
    notes = [Text(note, style="yellow") for note in table.notes]
    notes += [Text(f"{row.name}: {row.trouble}", style="yellow") for row in table.rows if row.trouble]
    notes += [Text(f"{row.name}: {UNTOLD}", style="yellow") for row in table.rows if row.untold]
    if not table.rows:
        return Group(Text("nobody computes"), *notes)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("RUN", "CLASS", "STATE"):
        drawn.add_column(name, no_wrap=True)
    for name in ("ASKED", "GOT", "WAITED", "CAPPED", "WAIT", "SUSPENDS"):
        drawn.add_column(name, no_wrap=True, justify="right")
    drawn.add_column("COMMAND", no_wrap=True, overflow="ellipsis")
    for row in table.rows:
        drawn.add_row(
            Text(row.name),
            Text(row.klass if row.level == 2 else f"{row.klass}/{row.level}"),
            Text(row.state if row.mode == "suspend" else f"{row.state} (gate)"),
            Text(f"{row.asked_percent}%" if row.asked_percent else "-"),
            *(Text(percent(part)) for part in (row.got_percent, row.waited_percent, row.capped_percent)),
            Text("-" if row.wait_ms is None else f"{row.wait_ms:.2f} ms"),
            Text("?" if row.suspends is None else str(row.suspends)),
            Text(row.command),
        )
    return Group(drawn, *notes)


def percent(part: float | None) -> str:
    """`12.3%`; `?` where nobody knows."""
    return "?" if part is None else f"{part:.1f}%"
