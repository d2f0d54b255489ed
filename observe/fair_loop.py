"""An event loop that reads from clients fairly: in each round a few of those that are ready, of the addresses that had least of late first.

asyncio by itself attends to every ready socket in each round. 640 connections of a flood then make a round of some hundred milliseconds, which a
client with one connection waits for at each step of its TLS handshake. What is not attended to waits in the kernel, which reports it again.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Final

from observe.fairness import AttainedService

CLIENTS_A_ROUND: Final = 4
"""Sockets of clients. A step of a handshake or a request takes 0.3 to 2 ms (measured). Others, such as the program's own connections, are attended to always."""

Ready = tuple[selectors.SelectorKey, int]


class FairSelector(selectors.EpollSelector):
    """With the address of each client's socket."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._address_of: dict[int, str] = {}
        self._pieces: dict[int, int] = {}
        """How often each client's socket was attended to, since a request on it was answered well."""
        self._attained, self._clock = AttainedService(clock()), clock

    def add_client(self, fd: int, address: str) -> None:
        """From now on the socket counts as this address's."""
        self._address_of[fd], self._pieces[fd] = address, 0

    def remove_client(self, fd: int) -> None:
        """No error for one that is not known."""
        self._address_of.pop(fd, None)
        self._pieces.pop(fd, None)

    def refund(self, fd: int) -> None:
        """What this socket sent was worth it: it counts a hundredth."""
        if fd in self._address_of:
            self._attained.refund(self._address_of[fd], self._pieces[fd])
            self._pieces[fd] = 0

    def select(self, timeout: float | None = None) -> list[Ready]:
        """As ever, without the clients that have to wait."""
        ready = super().select(timeout)
        chosen: list[Ready] = []
        waiting: defaultdict[str, list[Ready]] = defaultdict(list)
        for one in ready:
            address = self._address_of.get(one[0].fd)
            if address is None:
                chosen.append(one)
            else:
                waiting[address].append(one)
        if waiting:
            self._attained.decay(self._clock())
            chosen += self._choose(waiting)
        return chosen

    def _choose(self, waiting: dict[str, list[Ready]]) -> list[Ready]:
        """Of one address the socket comes first that was attended to least."""
        for pieces in waiting.values():
            pieces.sort(key=lambda one: -self._pieces[one[0].fd])
        order = [(self._attained.of(address), address) for address in waiting]
        heapq.heapify(order)
        chosen: list[Ready] = []
        while order and len(chosen) < CLIENTS_A_ROUND:
            had, address = order[0]
            one = waiting[address].pop()
            chosen.append(one)
            self._pieces[one[0].fd] += 1
            self._attained.charge(address)
            if waiting[address]:
                heapq.heapreplace(order, (had + 1, address))
            else:
                heapq.heappop(order)
        return chosen


class FairLoop(asyncio.SelectorEventLoop):
    """asyncio's own, with such a selector."""

    def __init__(self) -> None:
        self.clients = FairSelector()
        super().__init__(self.clients)


def run_fairly(work: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run."""
    with asyncio.Runner(loop_factory=FairLoop) as runner:
        runner.run(work)
