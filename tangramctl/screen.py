"""What a person sees: the table of `ps`, and a spinner while a run waits. Nothing here decides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Final, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tangramctl.swapping import clock, ends_of, state_of
from tangramctl.top import TopRow, TopTable
from tangramctl.view import GpuView, RunView, StateRootView, unenforced_limit, why_unenforced
from tangramctl.warmth import GpuRow, clocks, degrees, slowed_by, watts
from vgpu.api.enforcement import Limit
from vgpu.protocol.status import UnenforcedStatus

GIB: Final = 2**30
MIB: Final = 2**20
UNREPORTED: Final = "computes while it reports that it is idle"
STOPPED: Final = "something other than the arbiter seems to stop its work again and again"
PLAIN_WIDTH: Final = 100_000
"""Columns where output is no terminal: more than a line has. The reader of the lines truncates them."""
GAP: Final = 2
COMMAND_LEAST: Final = 12
"""Columns that COMMAND has at least; it alone is cut. Guessed: an interpreter and the beginning of a script's name."""
LEFT: Final = frozenset({"PID", "RUN", "GPU", "CLASS", "STATE", "COMMAND", "HEAT", "SLOWED BY"})
"""Words; the others are numbers."""
PS_COLUMNS: Final = (
    "PID", "RUN", "GPU", "CLASS", "CORE", "TIME", "LIMIT", "EXCESS", "SWAPPED", "LEASED", "USED", "CONTEXT", "SHARED", "PROCS", "COMMAND",
)  # fmt: skip
PS_EXPENDABLE: Final = (
    "SHARED", "CONTEXT", "PROCS", "LEASED", "TIME", "CLASS", "CORE", "COMMAND", "RUN", "EXCESS", "USED", "SWAPPED", "LIMIT", "GPU",
)  # fmt: skip
"""What a narrow terminal does without, first first: which process has how much of which GPU stays longest."""
PS_OF_BURSTS: Final = frozenset({"EXCESS", "SWAPPED"})
"""Shown where something may burst."""
TOP_COLUMNS: Final = (
    "PID", "RUN", "CLASS", "STATE", "ASKED", "GOT", "WAITED", "CAPPED", "WAIT", "SUSPENDS", "LIMIT", "EXCESS", "SWAPPED", "COMMAND",
)  # fmt: skip
TOP_EXPENDABLE: Final = (
    "SUSPENDS", "WAIT", "CLASS", "CAPPED", "WAITED", "COMMAND", "EXCESS", "LIMIT", "SWAPPED", "STATE", "ASKED", "PID", "GOT",
)  # fmt: skip


GPU_COLUMNS: Final = ("GPU", "CLOCK", "POWER", "TEMPERATURE", "HEAT", "SLOWED BY")
GPU_EXPENDABLE: Final = ("SLOWED BY", "TEMPERATURE", "HEAT", "POWER")
TOP_OF_BURSTS: Final = frozenset({"LIMIT", *PS_OF_BURSTS})


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Shows the text of the moment on stderr until left."""
    console = Console(stderr=True)
    with console.status("waiting", spinner="dots") as status:
        yield lambda text: status.update(Text(f"waiting: {text}"))


def console() -> Console:
    """Stdout, as wide as any line where it is no terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=PLAIN_WIDTH, force_terminal=False)


def put(what: RenderableType, to: Console) -> None:
    """Prints it. Where output is no terminal, no line ends with blanks."""
    if to.is_terminal:
        to.print(what)
        return
    with to.capture() as printed:
        to.print(what)
    to.out("\n".join(line.rstrip() for line in printed.get().splitlines()), highlight=False)


def show(view: StateRootView, to: Console) -> None:
    """One table."""
    put(drawn(view, to.width), to)


@contextmanager
def watching(to: Console) -> Iterator[Callable[[StateRootView], None]]:
    """Shows each view in place of the one before; one after the other where output is no terminal."""
    with live(to) as shown:
        yield lambda view: shown(drawn(view, to.width))


@contextmanager
def live(to: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Shows each in place of the one before; one after the other where output is no terminal."""
    if not to.is_terminal:
        yield lambda what: put(what, to)
        return
    with Live(console=to, auto_refresh=False, screen=False) as shown:
        yield lambda what: shown.update(what, refresh=True)


def drawn(view: StateRootView, width: int) -> RenderableType:
    """The table in so many columns, and below it what could not be read."""
    notes = [Text(note, style="yellow") for note in view.notes]
    notes += [
        Text(one, style="yellow") for entry in view.entries for one in state_of(entry.name, entry.swap, entry.gpus)
    ]
    notes += [Text(why, style="red") for entry in view.entries for why in why_unenforced(entry.name, entry.unenforced)]
    notes += [Text(one, style="red") for entry in view.entries for one in ends_of(entry.name, entry.swap)]
    if not view.entries:
        return Group(Text("no run has a share of a GPU"), *notes)
    rows = [_row(entry, gpu) for entry in view.entries for gpu in entry.gpus]
    bursts = any(gpu.bursts for entry in view.entries for gpu in entry.gpus)
    return Group(
        _table(PS_COLUMNS, rows, PS_EXPENDABLE, width, without=frozenset() if bursts else PS_OF_BURSTS), *notes
    )


def _table(
    names: Sequence[str],
    rows: Sequence[Sequence[Text]],
    expendable: Sequence[str],
    width: int,
    without: Set[str] = frozenset(),
) -> Table:
    """As much of the rows as fits the width, but for some columns. COMMAND is cut, the others are there whole or not at all."""
    widths = {name: max(len(name), *(row[at].cell_len for row in rows)) for at, name in enumerate(names)}
    widths.setdefault("COMMAND", 0)
    least = widths | {"COMMAND": min(widths["COMMAND"], COMMAND_LEAST)}
    shown = [name for name in names if name not in without]
    for name in expendable:
        if name not in shown:
            continue
        if sum(least[one] + GAP for one in shown) - GAP <= width:
            break
        shown.remove(name)
    widths["COMMAND"] = min(widths["COMMAND"], width - sum(widths[one] + GAP for one in shown if one != "COMMAND"))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name in shown:
        justify: Literal["left", "right"] = "left" if name in LEFT else "right"
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify=justify, width=widths[name])
    for row in rows:
        table.add_row(*(cell for name, cell in zip(names, row, strict=True) if name in shown))
    return table


def _row(entry: RunView, gpu: GpuView) -> list[Text]:
    over = "bold red" if entry.over else ""
    service_class = entry.service_class if entry.level == 2 else f"{entry.service_class}/{entry.level}"
    name = f"{gpu.index}" if gpu.index is not None else gpu.uuid[:12]
    return [
        Text(str(entry.pid) if entry.pid else "-"),
        Text(entry.name),
        Text(f"{name} fake" if entry.fake else name),
        Text(service_class),
        marked(cap(gpu.core_percent, gpu.core_limit_percent), Limit.GPU_TIME, entry.unenforced),
        Text("-" if entry.gpu_time is None else clock(entry.gpu_time.on_s)),
        marked(sizes(gpu.guarantee_bytes, gpu.limit_bytes), Limit.MEMORY, entry.unenforced),
        Text(amount(gpu.excess_bytes)),
        Text(amount(gpu.away_bytes)),
        Text(amount(gpu.leased_bytes)),
        Text(amount(gpu.used_bytes), style=over),
        Text(amount(gpu.context_bytes)),
        Text(amount(gpu.shared_bytes)),
        Text("?" if entry.processes is None else str(len(entry.processes))),
        Text(entry.command),
    ]


def marked(text: str, limit: Limit, found: Iterable[UnenforcedStatus]) -> Text:
    """A limit, with a sign where it is not enforced."""
    return Text(f"{text}!", style="bold red") if unenforced_limit(limit, found) else Text(text)


def cap(guaranteed: int, limit: int) -> str:
    """`30%`; `30-100%` where it may burst; `-` without a cap."""
    if not guaranteed:
        return "-"
    return f"{guaranteed}-{limit}%" if limit > guaranteed else f"{guaranteed}%"


def sizes(guarantee_bytes: int | None, limit_bytes: int) -> str:
    """`8Gi`; `8-40Gi` where it may burst."""
    if guarantee_bytes is None or guarantee_bytes >= limit_bytes:
        return amount(limit_bytes)
    guaranteed, limit = amount(guarantee_bytes), amount(limit_bytes)
    return f"{guaranteed.removesuffix(limit[-2:])}-{limit}"


def amount(size: int | None) -> str:
    """Bytes for a person: `8.0Gi`, `512Mi`, `0`; `?` where unknown."""
    if size is None:
        return "?"
    if size >= 10 * GIB or (size >= GIB and size % GIB == 0):
        return f"{size / GIB:.1f}Gi".replace(".0Gi", "Gi")
    return f"{-(-size // MIB)}Mi" if size else "0"


def drawn_top(table: TopTable, width: int) -> RenderableType:
    """The part of the last second of each run, in `width` columns."""
    notes = [Text(note, style="yellow") for note in table.notes]
    notes += [Text(f"{row.name}: {row.trouble}", style="yellow") for row in table.rows if row.trouble]
    notes += [Text(f"{row.name}: {UNREPORTED}", style="yellow") for row in table.rows if row.unreported]
    notes += [Text(f"{row.name}: {STOPPED}", style="yellow") for row in table.rows if row.stopped]
    notes += [Text(one, style="yellow") for row in table.rows for one in row.swapping]
    notes += [Text(why, style="red") for row in table.rows for why in why_unenforced(row.name, row.unenforced)]
    notes += [Text(one, style="red") for row in table.rows for one in row.ends]
    gpus = [_table(GPU_COLUMNS, list(map(_gpu_row, table.gpus)), GPU_EXPENDABLE, width)] if table.gpus else []
    if not table.rows:
        return Group(Text("no run computes"), *gpus, *notes)
    first = 1 if all(row.pid is None for row in table.rows) else 0  # containers of pods have no PID here
    names, rows = TOP_COLUMNS[first:], [_top_row(row)[first:] for row in table.rows]
    bursts = any(row.bursts for row in table.rows)
    shown = _table(names, rows, TOP_EXPENDABLE, width, without=frozenset() if bursts else TOP_OF_BURSTS)
    return Group(shown, *gpus, *notes)


def _gpu_row(row: GpuRow) -> list[Text]:
    hot = "bold red" if row.heat == "hot" else ""
    return [
        Text(row.name),
        Text(clocks(row)),
        Text(watts(row)),
        Text(degrees(row)),
        Text(row.heat, style=hot),
        Text(slowed_by(row)),
    ]


def _top_row(row: TopRow) -> list[Text]:
    return [
        Text("-" if row.pid is None else str(row.pid)),
        Text(row.name),
        Text(row.service_class if row.level == 2 else f"{row.service_class}/{row.level}"),
        Text(row.state if row.mode == "suspend" else f"{row.state} (gate)"),
        marked(cap(row.requested_percent, row.limit_percent), Limit.GPU_TIME, row.unenforced),
        *(Text(percent(part)) for part in (row.got_percent, row.waited_percent, row.capped_percent)),
        Text("-" if row.wait_ms is None else f"{row.wait_ms:.2f} ms"),
        Text("?" if row.suspends is None else str(row.suspends)),
        Text(sizes(row.guarantee_bytes, row.limit_bytes)),
        Text(amount(row.excess_bytes)),
        Text(amount(row.away_bytes)),
        Text(row.command),
    ]


def percent(part: float | None) -> str:
    """`12.3%`; `?` where unknown."""
    return "?" if part is None else f"{part:.1f}%"
