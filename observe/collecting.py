"""When Python collects garbage in cycles, so that it never delays an answer.

The objects of a program live long and have no cycles, yet each full collection walks all of it: 30 ms in a device plugin, 0.1 s and more in an
extender with 10,000 nodes (measured). So collections by allocation are made rare and young, and a full one is taken on a clock: each minute
at what is new since the last, which is then set aside (frozen); each hour at everything, for what was set aside and died in a cycle
since.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final

YOUNG: Final = 20_000
"""New containers between collections by allocation: one takes 1 ms at most (measured), and a call makes some hundred that die at once."""

NEVER: Final = 1_000_000
"""Looks at the young before one at the old: leaves those to the clock."""

EACH_S: Final = 60
WHOLE_EACH: Final = 60
"""Looks on the clock before one at everything."""


async def keep_tidy(lull: Callable[[], Awaitable[None]] | None = None) -> None:
    """Until cancelled. For the whole life of a program that answers others. `lull` returns when no client waits for an answer, or one has waited for long."""
    gc.set_threshold(YOUNG, NEVER, NEVER)
    for look in count(1):
        await asyncio.sleep(EACH_S)
        if lull is not None:
            await lull()
        tidy(look)


def tidy(look: int) -> None:
    """The look of this number on the clock."""
    if look % WHOLE_EACH == 0:
        gc.unfreeze()
    set_aside()


def set_aside() -> None:
    """Look for garbage in what is new, and never again at what is left of it until the hour. Also worth it once a program is set up."""
    gc.collect()
    gc.freeze()
