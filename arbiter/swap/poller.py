"""What is called when a descriptor is readable: one epoll descriptor for all connections of the swapping."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

EVENTS_A_PIECE: Final = 4
"""Few at a time: the kernel returns the others first the next time."""
TURN_S: Final = 0.001
"""A turn that took this long calls nothing more: the arbiter's loop has other containers to serve. As a round of it (`arbiter.attention`)."""


class Poller:
    """Calls never wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._epoll, self._clock = select.epoll(), clock
        self._calls: dict[int, Callable[[], None]] = {}

    @property
    def fd(self) -> int:
        """Readable when a call is due."""
        return self._epoll.fileno()

    def add(self, fd: int, call: Callable[[], None]) -> None:
        """Call when it is readable, or has ended. Once for each descriptor."""
        self._epoll.register(fd, select.EPOLLIN)
        self._calls[fd] = call

    def remove(self, fd: int) -> None:
        """Before it is closed."""
        if self._calls.pop(fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(fd)

    def turn(self) -> None:
        """The calls that are due, or so many that the turn's time is over: `fd` is readable then. One may remove another."""
        until_s = self._clock() + TURN_S
        while events := self._epoll.poll(0, EVENTS_A_PIECE):
            for fd, _ in events:
                if (call := self._calls.get(fd)) is not None:
                    call()
            if self._clock() >= until_s:
                return

    def close(self) -> None:
        """Forget all."""
        self._epoll.close()
