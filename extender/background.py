"""Long work on the event loop, a little at a time: the scheduler's calls have their turn in between.

A thread would keep the interpreter's lock from them, and another process would need the whole state, which changes hundreds of times a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

SLICE_S: Final = 0.0005
"""Of work at a time. Its last step, of 1 ms or so, may take it beyond: a filter call waits for so long."""

REST_S: Final = 0.001
"""Between two slices while a call waits for the API server: its answer then finds the event loop at rest, and the API server a processor."""


class Slices:
    """Long work of one process. Calls that wait in between (`waiting`) slow it down to half, and are hardly slowed down themselves."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A call that others are to make way for."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def do(self, steps: Iterator[None], *, until_s: float) -> bool:
        """Do all the steps, or those that there is time for: answers whether it was all. At least one slice is done."""
        began_s = time.perf_counter()
        for _ in steps:
            if time.perf_counter() - began_s >= SLICE_S:
                if self._clock() >= until_s:
                    return False
                await asyncio.sleep(REST_S if self._waiting else 0)
                began_s = time.perf_counter()
        return True
