"""When Python looks for garbage in cycles, so that it is never in the way of a scheduler that waits.

What the caches hold lives long and has no cycles, yet each full look walks all of it: 0.1 s and more with 10,000 nodes (measured).
So looks by allocation are made rare and young, and a full one is taken on a clock: each minute at what is new since the last, which is
then set aside (frozen); each hour at everything, for what was set aside and died in a cycle since.
"""

from __future__ import annotations

import gc
from typing import Final

YOUNG: Final = 20_000
"""New containers between looks by allocation: one takes 1 ms at most (measured), and a filter call makes some hundred that die at once."""

NEVER: Final = 1_000_000
"""Looks at the young before one at the old: leaves those to the clock."""

EACH_S: Final = 60
WHOLE_EACH_S: Final = 3_600


def begin() -> None:
    """Before anything is listed."""
    gc.set_threshold(YOUNG, NEVER, NEVER)


def tidy(uptime_s: int) -> None:
    """To be called each second. Does nothing most times."""
    if uptime_s % EACH_S:
        return
    if uptime_s % WHOLE_EACH_S == 0:
        gc.unfreeze()
    set_aside()


def set_aside() -> None:
    """Look for garbage in what is new, and never again at what is left of it until the hour."""
    gc.collect()
    gc.freeze()
