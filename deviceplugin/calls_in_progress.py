"""Which calls of the kubelet are being answered now, so that work that can wait does not compete with them for the interpreter.

An admission causes more work than its answers: grant directories are made for the next one, the pod's change is followed, the node's processes
are examined. One thread runs at a time, so all of that would be time that the kubelet waits. Such work begins after `until_idle`, and
in a thread it calls `yield_to_kubelet` now and then. Both are bounded: a call may itself wait for that work, and a node may never be calm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

IDLE_S: Final = 0.01
"""Without a call. Guessed: the calls for one container follow each other within a millisecond or two."""
IDLE_WAIT_S: Final = 0.1
"""Work waits at most this long until no call is in progress. Guessed: short beside the second that a container takes to start."""
YIELD_S: Final = 0.005
"""A thread pauses this long at a time. Guessed: longer than one call takes."""
STEP_S: Final = 0.0005


async def without_waiting() -> None:
    """Stands for `CallsInProgress.until_idle` where work begins at once."""


class CallsInProgress:
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
        """Within `answering`: the call waits for other work meanwhile, and delays nothing."""
        self._answering -= 1
        try:
            yield
        finally:
            self._answering += 1

    async def until_idle(self) -> None:
        """Return when the kubelet has not waited for `IDLE_S`, or after `IDLE_WAIT_S`."""
        until_s = self._clock() + IDLE_WAIT_S
        while (now_s := self._clock()) < until_s:
            since_s = 0.0 if self.kubelet_waits else now_s - self._last_s
            if since_s >= IDLE_S:
                return
            await asyncio.sleep(min(IDLE_S - since_s, until_s - now_s))

    def yield_to_kubelet(self) -> None:
        """In a thread: return when the kubelet does not wait, or after `YIELD_S`."""
        if not self.kubelet_waits:
            return
        until_s = self._clock() + YIELD_S
        while self.kubelet_waits and self._clock() < until_s:
            time.sleep(STEP_S)
