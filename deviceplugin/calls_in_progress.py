"""Which calls of the kubelet are being answered now, so that work that can wait does not compete with them for the interpreter.

An admission causes more work than its answers: grant directories are made for the next one, the pod's change is followed, the node's processes
are looked at. One thread runs at a time, so all of that would be time that the kubelet waits. Such work begins in a `lull`, and
in a thread it calls `give_way` now and then. Both are bounded: a call may itself wait for that work, and a node may never be calm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

LULL_S: Final = 0.01
"""Without a call. Guessed: the calls for one container follow each other within a millisecond or two."""
LULL_AT_MOST_S: Final = 0.1
"""So long work waits for a lull. Guessed: nobody notices it beside the second in which a container starts."""
GIVE_WAY_S: Final = 0.005
"""So long a thread gives way at a time. Guessed: longer than one call takes."""
STEP_S: Final = 0.0005


async def at_once() -> None:
    """A lull for whoever waits for none."""


class Calls:
    """Of all resources of the node. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answering = 0
        self._last_s = float("-inf")

    @property
    def kubelet_waits(self) -> bool:
        """For an answer that is being made now."""
        return self._answering > 0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The kubelet waits meanwhile."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            self._last_s = self._clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within `answering`: the call waits for other work meanwhile, and is in nobody's way."""
        self._answering -= 1
        try:
            yield
        finally:
            self._answering += 1

    async def lull(self) -> None:
        """Return when the kubelet has not waited for `LULL_S`, or after `LULL_AT_MOST_S`."""
        until_s = self._clock() + LULL_AT_MOST_S
        while (now_s := self._clock()) < until_s:
            since_s = 0.0 if self.kubelet_waits else now_s - self._last_s
            if since_s >= LULL_S:
                return
            await asyncio.sleep(min(LULL_S - since_s, until_s - now_s))

    def give_way(self) -> None:
        """In a thread: return when the kubelet does not wait, or after `GIVE_WAY_S`."""
        if not self.kubelet_waits:
            return
        until_s = self._clock() + GIVE_WAY_S
        while self.kubelet_waits and self._clock() < until_s:
            time.sleep(STEP_S)
