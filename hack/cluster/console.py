"""Print what is being done, how long it took, and what to do next.

On a terminal a spinner shows the step in progress; elsewhere its begin and its end are one plain line each. A long step prints
that twice a minute. Where TANGRAM_STEPS_CSV names a file,
each step adds a row to it: what, wall seconds, processor seconds of the programs that it ran and waited for.
"""

from __future__ import annotations

import csv
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

SAY_EVERY_S: Final = 30.0
"""How long a step may be silent. Guessed."""


class Steps:
    """Steps in the order in which they run; each is timed."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(highlight=False, soft_wrap=True, stderr=True, quiet=quiet)
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        began, worked = time.monotonic(), os.times().children_user + os.times().children_system

        def lasting() -> str:
            return f"{escape(what)} [dim](for {time.monotonic() - began:.0f} s)[/]"

        if self.console.is_terminal:
            with self.console.status(escape(what)) as status, _each(SAY_EVERY_S, lambda: status.update(lasting())):
                yield
        else:
            self.console.print(f"  ... {what}", markup=False)
            with _each(SAY_EVERY_S, lambda: self.console.print(f"  ... {lasting()}")):
                yield
        self._record(what, time.monotonic() - began, os.times().children_user + os.times().children_system - worked)
        self.console.print(f"  [green]ok[/] {escape(what)} [dim]({time.monotonic() - began:.1f} s)[/]")

    def _record(self, what: str, wall_s: float, processor_s: float) -> None:
        named = os.environ.get("TANGRAM_STEPS_CSV")
        if named:
            with Path(named).open("a", newline="") as out:
                csv.writer(out).writerow([what, round(wall_s, 1), round(processor_s, 1)])

    def print(self, text: str) -> None:
        self.console.print(text, markup=False)


@contextmanager
def _each(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Calls again and again, so many seconds apart, until left."""
    left = threading.Event()

    def calling() -> None:
        while not left.wait(seconds):
            call()

    thread = threading.Thread(target=calling, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
