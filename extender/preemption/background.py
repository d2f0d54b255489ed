"""Run a long search on the event loop a little at a time, so that kube-scheduler's calls run in between.

A thread would compete with them for the interpreter's lock, and another process would need the whole state, which changes hundreds of times a
second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

WORK_S: Final = 0.0005
"""Of work at a time. Its last step, of about 1 ms, may exceed it: a filter call waits for so long."""

REST_S: Final = 0.001
"""Between two stretches of work while a call waits for the API server: its answer then finds the event loop idle, and the API server a CPU."""


class BackgroundWork:
    """The long work of one process. Calls that are `waiting` meanwhile slow it down to half, and are hardly slowed down themselves."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """During a call that waits: long work rests between its steps."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def run(self, steps: Iterator[None], *, until_s: float) -> bool:
        """Run the steps until `until_s`. Returns whether all were run; some always are."""
        began_s = time.perf_counter()
        for _ in steps:
            if time.perf_counter() - began_s >= WORK_S:
                if self._clock() >= until_s:
                    return False
                await asyncio.sleep(REST_S if self._waiting else 0)
                began_s = time.perf_counter()
        return True
