"""Say what is being done, how long it took, and what to do next.

On a terminal a spinner shows the step in progress; in CI each finished step is one plain line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
        began = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(escape(what)):
                yield
        else:
            self.console.print(f"  ... {what}", markup=False)
            yield
        self.console.print(f"  [green]ok[/] {escape(what)} [dim]({time.monotonic() - began:.1f} s)[/]")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)
