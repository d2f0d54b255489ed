"""In which order work for clients is begun: the client that had the least of late comes first (least attained service).

A flood from one address, or from many, then delays an occasional client by one piece of work and not by the length of a queue.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

HALF_LIFE_S: Final = 1.0
"""What a client had counts half after so long. Guessed."""

WORTH: Final = 0.99
"""An API server makes many more requests than each client of a flood, and comes before it all the same where the flood's are refused. Guessed."""

FORGET: Final = 2.0**-6
"""Less than that is nothing."""


class AttainedService:
    """What each address had of late."""

    def __init__(self, at_s: float) -> None:
        self._had: dict[str, float] = {}
        self._decayed_s = at_s

    def of(self, address: str) -> float:
        """Pieces."""
        return self._had.get(address, 0.0)

    def charge(self, address: str) -> None:
        """It had one more."""
        self._had[address] = self._had.get(address, 0.0) + 1

    def refund(self, address: str, pieces: int = 1) -> None:
        """So many were worth it: they count a hundredth."""
        if address in self._had:
            self._had[address] = max(0.0, self._had[address] - WORTH * pieces)

    def decay(self, at_s: float) -> None:
        """To be called often, with the time."""
        halves = int((at_s - self._decayed_s) / HALF_LIFE_S)
        if halves > 0:
            self._decayed_s += halves * HALF_LIFE_S
            left = 0.5**halves  # 0 after a long silence
            self._had = {
                address: had * left for address, had in self._had.items() if had * left > FORGET
            }  # a client that waits and had little counts as one that had nothing


class PacedWork(ABC):
    """Begins what waits, one piece in each round of the event loop, whenever there may be one more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = False

    @abstractmethod
    def _any_waits(self) -> bool:
        """All may have been withdrawn."""

    @abstractmethod
    def _wait_s(self) -> float:
        """Until there may be one more."""

    @abstractmethod
    def _take(self) -> Callable[[], object]:
        """Remove the next piece of work; calling the result begins it."""

    def _arrange(self) -> None:
        if self._any_waits() and not self._due:
            self._due = True
            self._loop.call_soon(self._begin_one)

    def _begin_one(self) -> None:
        self._due = False
        if not self._any_waits():
            return
        if (wait_s := self._wait_s()) > 0:
            self._due = True
            self._loop.call_later(wait_s, self._begin_one)
            return
        begin = self._take()
        self._arrange()
        begin()


class FairQueue(PacedWork):
    """Begins one piece of work in each round of the event loop, and `per_s` of them after `at_once`. Keeps no more pieces than clients have
    connections."""

    def __init__(self, per_s: float = inf, at_once: float = inf) -> None:
        super().__init__()
        self._per_s, self._at_once = per_s, at_once
        self._left, self._filled_s = at_once, self._loop.time()
        self._waiting: dict[str, dict[int, Callable[[], object]]] = {}
        self._number = self._count = 0
        self._attained = AttainedService(self._loop.time())

    def submit(self, address: str, begin: Callable[[], object]) -> Callable[[], None]:
        """Call `begin` when this address is next, never at once. Returns what to call if it is no longer needed; it then costs nothing."""
        self._number += 1
        self._count += 1
        self._waiting.setdefault(address, {})[self._number] = begin
        self._arrange()
        return partial(self._withdraw, address, self._number)

    def __len__(self) -> int:
        return self._count

    def _withdraw(self, address: str, number: int) -> None:
        pieces = self._waiting.get(address, {})
        if pieces.pop(number, None) is None:
            return
        self._count -= 1
        if not pieces:
            del self._waiting[address]

    def refund(self, address: str, *, piece: bool = False) -> None:
        """The last piece of this address was worth it: it counts a hundredth. `piece`: nor does it count among those of a second."""
        self._attained.refund(address)
        if piece:
            self._left = min(self._at_once, self._left + 1)

    def begin_all(self) -> None:
        """All that waits, in any order."""
        waiting, self._waiting, self._count = self._waiting, {}, 0
        for pieces in waiting.values():
            for begin in pieces.values():
                begin()

    def _take(self) -> Callable[[], object]:
        self._left -= 1
        self._attained.decay(self._loop.time())
        address = min(self._waiting, key=self._attained.of)
        pieces = self._waiting[address]
        begin = pieces.pop(next(iter(pieces)))
        self._count -= 1
        if not pieces:
            del self._waiting[address]
        self._attained.charge(address)
        return begin

    def _any_waits(self) -> bool:
        return bool(self._waiting)

    def _wait_s(self) -> float:
        now_s = self._loop.time()
        if self._per_s < inf:
            self._left = min(self._at_once, self._left + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        return 0.0 if self._left >= 1 else (1 - self._left) / self._per_s
