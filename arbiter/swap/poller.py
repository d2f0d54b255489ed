"""What is called when a descriptor is readable: one epoll descriptor for all connections of the swapping."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from typing import Final

EVENTS_A_TURN: Final = 256


class Poller:
    """Calls never wait."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
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
        """The calls that are due. One may remove another."""
        for fd, _ in self._epoll.poll(0, EVENTS_A_TURN):
            if (call := self._calls.get(fd)) is not None:
                call()

    def close(self) -> None:
        """Forget all."""
        self._epoll.close()
