"""Long work on the event loop, a little at a time: the scheduler's calls have their turn in between.

A thread would keep the interpreter's lock from them, and another process would need the whole state, which changes hundreds of times a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final

SLICE_S: Final = 0.0005
"""Of work at a time. Its last step, of 1 ms or so, may take it beyond. A filter call waits for one slice, a bind call for some three: it writes in between."""


async def in_slices(steps: Iterator[None], *, until_s: float, clock: Callable[[], float]) -> bool:
    """Do all the steps, or those that there is time for: answers whether it was all. At least one slice is done."""
    began_s = time.perf_counter()
    for _ in steps:
        if time.perf_counter() - began_s >= SLICE_S:
            if clock() >= until_s:
                return False
            await asyncio.sleep(0)
            began_s = time.perf_counter()
    return True
