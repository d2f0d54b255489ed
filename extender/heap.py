"""Keep the memory that a call has used for the next one.

A filter call of 10,000 nodes takes and gives back some ten blocks of 80 to 500 kB: its body, and arrays. glibc maps blocks of that size
anew each time, or cuts its heap behind them, and the kernel then clears every page again at its first touch: a third of the call's time
(measured). What is kept is at most what one call has used at once: 40 MiB where 10,000 nodes are each told why not (measured).
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""

LARGEST_KEPT: Final = 32 << 20
"""Bytes; the most that glibc allows."""

MOST_SPARE: Final = 64 << 20
"""Bytes free at the heap's end before they are given back. Pulled out of the air: above what a call uses at once."""


def keep() -> bool:
    """To be called once, early. Answers whether the C library could be told: only glibc can."""
    report = getattr(ctypes.CDLL(None), "mallopt", None)
    if report is None:
        return False
    return bool(report(_M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(report(_M_TRIM_THRESHOLD, MOST_SPARE))
