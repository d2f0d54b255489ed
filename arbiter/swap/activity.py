"""Whether containers have work, as other threads report it: thousands of times a second, of which the swap policy needs the last state of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import Final

from vgpu.memory.swap.events import Announced, Idle, Working

BUSY_S: Final = 0.01
"""How late a change may be known while something waits or moves. Guessed: the shortest time that the policy counts is 100 ms."""
QUIET_S: Final = 1.0
"""And otherwise: it is only a record of who was idle for how long."""


class ActivityChanges:
    """`take` is of one thread, the others of any."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._lock = threading.Lock()
        self._changes: dict[str, tuple[float, bool]] = {}
        self._announced: dict[str, tuple[float, float]] = {}
        self._since_s = inf
        """When the first change came that was not taken."""
        self._busy = False
        self._working: dict[str, bool] = {}

    def working(self, name: str, *, works: bool) -> None:
        """It has work, or no more."""
        with self._lock:
            self._changes[name] = self._clock(), works
            wakes = self._note()
        if wakes:
            self._wake()

    def announced(self, name: str, in_s: float) -> None:
        """It announces work."""
        with self._lock:
            self._announced[name] = self._clock(), in_s
            wakes = self._note()
        if wakes:
            self._wake()

    def take(self, now_s: float, *, everything: bool) -> list[Working | Idle | Announced]:
        """The changes, if they are due. `everything`: something waits or moves."""
        with self._lock:
            self._busy = everything
            if now_s < self._since_s + (BUSY_S if everything else QUIET_S):
                return []
            changes, self._changes = self._changes, {}
            announced, self._announced = self._announced, {}
            self._since_s = inf
        found: list[Working | Idle | Announced] = [
            Announced(at_s, name, in_s) for name, (at_s, in_s) in announced.items()
        ]
        for name, (at_s, works) in changes.items():
            if self._working.get(name) is not works:
                self._working[name] = works
                found.append(Working(at_s, name) if works else Idle(at_s, name))
        return sorted(found, key=lambda event: event.at_s)

    def works(self, name: str) -> bool:
        """As it was last taken."""
        return self._working.get(name, False)

    def forget(self, name: str) -> None:
        """The container is gone. What came of it and was not taken is dropped, so that no later `take` enters the name again."""
        with self._lock:
            self._changes.pop(name, None)
            self._announced.pop(name, None)
        self._working.pop(name, None)

    def deadline_s(self, *, busy: bool) -> float:
        """When changes are due."""
        return self._since_s + (BUSY_S if busy else QUIET_S)

    def _note(self) -> bool:
        """Locked. Whether the loop must be woken: it knows of no change yet, and must know soon."""
        first = self._since_s == inf
        if first:
            self._since_s = self._clock()
        return first and self._busy
