"""Say what is being done, how long it took, and what to do next.

On a terminal a spinner shows the step in progress; in CI each finished step is one plain line. Where TANGRAM_STEPS_CSV names a file,
each step adds a row to it: what, wall seconds, processor seconds of the programs that it ran and waited for.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape


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
        if self.console.is_terminal:
            with self.console.status(escape(what)):
                yield
        else:
            self.console.print(f"  ... {what}", markup=False)
            yield
        self._record(what, time.monotonic() - began, os.times().children_user + os.times().children_system - worked)
        self.console.print(f"  [green]ok[/] {escape(what)} [dim]({time.monotonic() - began:.1f} s)[/]")

    def _record(self, what: str, wall_s: float, processor_s: float) -> None:
        named = os.environ.get("TANGRAM_STEPS_CSV")
        if named:
            with Path(named).open("a", newline="") as out:
                csv.writer(out).writerow([what, round(wall_s, 1), round(processor_s, 1)])

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)
