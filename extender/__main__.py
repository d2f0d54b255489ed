"""The program `tangram-extender`."""

from __future__ import annotations

import ctypes
from typing import Final

import uvloop

from extender.app import run
from extender.settings import Settings
from observe.program import run_program

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""

LARGEST_KEPT: Final = 32 << 20
"""Bytes; the most that glibc allows."""

MOST_FREE: Final = 64 << 20
"""Bytes free at the heap's end before glibc returns them to the kernel. Guessed: above what a call uses at once."""


def keep_heap() -> bool:
    """Have glibc keep the memory of one call for the next one. Returns whether it does: other C libraries cannot.

    A filter call of 10,000 nodes allocates and frees some ten blocks of 80 to 500 kB: its body, and arrays. By default glibc maps blocks of
    that size anew each time, or cuts its heap behind them, and the kernel then clears every page again at its first touch: a third of the
    call's time (measured). What is kept is at most what one call has used at once: 40 MiB where 10,000 nodes are each given a reason (measured).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, MOST_FREE))


def main() -> None:
    """Entry point of the container."""
    keep_heap()
    run_program(Settings, run, loop=uvloop.run)


if __name__ == "__main__":
    main()
