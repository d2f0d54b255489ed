"""`tangramctl top`: the GPU time of each run now. Two readings, and the difference between them.

Pure but for `top` itself, which reads and prints.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypedDict

import msgspec

from tangramctl import view
from tangramctl.swapping import ends_of, state_of
from tangramctl.view import RunView, StateRootView
from tangramctl.warmth import GpuRow, gpu_rows, link_notes, slowed_notes
from vgpu.protocol.status import UnenforcedStatus

PAUSED: Final = "paused"
PERIOD_S: Final = 1.0
"""The interval over which a share is computed. A second has twenty time slices."""


class TopRow(msgspec.Struct, frozen=True, rename={"service_class": "class"}):
    """One run or container in the time between two readings. Percent of that time; None where it was not there before."""

    key: str
    name: str
    pid: int | None
    """Of the run; None for a container."""
    service_class: str
    level: int
    state: str
    """runs, waits, capped, idle, or paused: some of its memory is in host memory; unknown of one that reports no GPU time and should"""
    requested_percent: int
    """Guaranteed; 0 = no cap"""
    got_percent: float | None
    """It had work and might run."""
    waited_percent: float | None
    """It had work and waited for others."""
    capped_percent: float | None
    """It had work and waited for its own cap."""
    wait_ms: float | None
    """What its work waited for others, on average each time that it came; None where none came."""
    suspends: int | None
    mode: str
    trouble: str
    command: str
    unreported: bool = False
    """It computes while it reports that it is idle."""
    stopped: bool = False
    """Something other than the arbiter seems to stop its work again and again."""
    unenforced: tuple[UnenforcedStatus, ...] = ()
    """Limits that are not enforced, and why."""
    limit_percent: int = 0
    """Above `requested_percent` where it may burst; 0 = no cap, or none that the arbiter reports"""
    burst_percent: float | None = None
    """The part of `got_percent` above its guarantee."""
    guarantee_bytes: int | None = None
    """GPU memory that is never taken away, of all its GPUs together; None = no arbiter reports it"""
    limit_bytes: int = 0
    """GPU memory in all"""
    excess_bytes: int | None = None
    """What it has above its guarantee, on the GPU or in host memory"""
    away_bytes: int = 0
    """What of it is in host memory"""
    swapping: tuple[str, ...] = ()
    """Lines on memory of it that is in host memory, or cannot be moved there."""
    ends: tuple[str, ...] = ()
    """Lines on a container that does not give way, or whose memory cannot come back."""

    @property
    def bursts(self) -> bool:
        """Whether it may have more memory than its guarantee."""
        return self.guarantee_bytes is not None and self.guarantee_bytes < self.limit_bytes


class TopTable(msgspec.Struct, frozen=True):
    """The document of `top --json`."""

    rows: tuple[TopRow, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    version: int = 1
    gpus: tuple[GpuRow, ...] = ()
    """Those that the runs and containers share, where an arbiter reports their sensors."""


def between(before: StateRootView, now: StateRootView, seconds: float) -> TopTable:
    """What each container that reports GPU time got. An arbiter that started anew counts from nothing: then nothing is known yet."""
    then = {entry.key: entry for entry in before.entries}
    rows = [_row(then.get(entry.key), entry, seconds) for entry in now.entries if entry.gpu_time is not None]
    rows += [
        _unknown(entry) for entry in now.entries if entry.gpu_time is None and (entry.unenforced or _paused(entry))
    ]
    gpus = gpu_rows(now, {row.key: row.got_percent for row in rows})
    rows.sort(key=lambda row: (-(row.got_percent or 0.0), row.name))
    notes = (*now.notes, *slowed_notes(gpus), *link_notes(gpus, before, now))
    return TopTable(tuple(rows), seconds, notes, gpus=gpus)


def _row(before: RunView | None, now: RunView, seconds: float) -> TopRow:
    gpu_time = now.gpu_time
    assert gpu_time is not None  # noqa: S101
    was = before.gpu_time if before is not None else None
    known = was is not None and was.on_s <= gpu_time.on_s and was.suspends <= gpu_time.suspends and seconds > 0
    got, waited, capped, burst = (
        min(100.0, max(0.0, (new - old) / seconds * 100)) if known else None
        for new, old in (
            (gpu_time.on_s, was.on_s if was else 0.0),
            (gpu_time.off_s, was.off_s if was else 0.0),
            (gpu_time.capped_s, was.capped_s if was else 0.0),
            (gpu_time.burst_s, was.burst_s if was else 0.0),
        )
    )
    arrivals = gpu_time.arrivals - was.arrivals if known and was is not None else 0
    waited_s = gpu_time.off_s + gpu_time.clearing_s - (was.off_s + was.clearing_s if was else 0.0)
    return TopRow(
        key=now.key,
        name=now.name,
        pid=now.pid,
        service_class=now.service_class,
        level=now.level,
        state=PAUSED
        if _paused(now)
        else _state(gpu_time.working, gpu_time.on, capped=(capped or 0.0) > (waited or 0.0)),
        requested_percent=gpu_time.requested_percent,
        got_percent=got,
        waited_percent=waited,
        capped_percent=capped,
        wait_ms=1000 * waited_s / arrivals if arrivals > 0 else None,
        suspends=gpu_time.suspends - was.suspends if known and was is not None else None,
        mode=gpu_time.mode,
        trouble=gpu_time.trouble,
        command=now.command,
        unreported=gpu_time.unreported,
        stopped=gpu_time.stopped,
        unenforced=now.unenforced,
        limit_percent=gpu_time.limit_percent,
        burst_percent=burst,
        **_memory(now),
    )


class _Memory(TypedDict):
    guarantee_bytes: int | None
    limit_bytes: int
    excess_bytes: int | None
    away_bytes: int
    swapping: tuple[str, ...]
    ends: tuple[str, ...]


def _memory(now: RunView) -> _Memory:
    """The part of a row about its memory."""
    return _Memory(
        guarantee_bytes=_sum(gpu.guarantee_bytes for gpu in now.gpus),
        limit_bytes=sum(gpu.limit_bytes for gpu in now.gpus),
        excess_bytes=_sum(gpu.excess_bytes for gpu in now.gpus),
        away_bytes=sum(gpu.away_bytes for gpu in now.gpus),
        swapping=tuple(state_of(now.name, now.swap, now.gpus)),
        ends=tuple(ends_of(now.name, now.swap)),
    )


def _sum(parts: Iterable[int | None]) -> int | None:
    known = list(parts)
    return None if not known or None in known else sum(part or 0 for part in known)


def _paused(entry: RunView) -> bool:
    return entry.swap is not None and entry.swap.paused


def _unknown(entry: RunView) -> TopRow:
    """One whose GPU time is unknown, for a reason that is shown."""
    return TopRow(
        key=entry.key,
        name=entry.name,
        pid=entry.pid,
        service_class=entry.service_class,
        level=entry.level,
        state=PAUSED if _paused(entry) else "unknown",
        requested_percent=max((gpu.core_percent for gpu in entry.gpus), default=0),
        got_percent=None,
        waited_percent=None,
        capped_percent=None,
        wait_ms=None,
        suspends=None,
        mode="suspend",
        trouble="",
        command=entry.command,
        unenforced=entry.unenforced,
        limit_percent=max((gpu.core_limit_percent for gpu in entry.gpus), default=0),
        **_memory(entry),
    )


def _state(working: bool, on: bool, *, capped: bool) -> str:
    if not working:
        return "idle"
    return "runs" if on else "capped" if capped else "waits"


def top(state: Path | None, *, json: bool, once: bool) -> None:
    """Show what the last second was like, each second until interrupted."""
    pause = threading.Event()
    before, before_s = view.seen_at(state), time.monotonic()

    def next_table() -> TopTable:
        nonlocal before, before_s
        pause.wait(PERIOD_S)
        now, now_s = view.seen_at(state), time.monotonic()
        table = between(before, now, now_s - before_s)
        before, before_s = now, now_s
        return table

    if json:
        _print_json(next_table())
        while not once:
            _print_json(next_table())
        return
    from tangramctl import screen

    console = screen.console()
    if once:
        screen.put(screen.drawn_top(next_table(), console.width), console)
        return
    with screen.live(console) as show:
        while True:
            show(screen.drawn_top(next_table(), console.width))


def _print_json(table: TopTable) -> None:
    sys.stdout.write(msgspec.json.encode(table).decode() + "\n")
    sys.stdout.flush()
