"""How much of the arbiter's loop each container gets, so that one container's flood does not delay another's request.

Each container's sockets have their own poller. The loop serves the containers with unread messages in small pieces, first the one with the least
recent service: a neighbour waits for one piece at most. A container that exceeds its part of a processor's time is throttled, and the messages of its
processes wait in their sockets, which the kernel bounds and counts as theirs.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Final

from arbiter.budget import MessageBudget

EVENTS_A_PIECE: Final = 4
"""Sockets served in one piece; the kernel returns others the next time."""
PIECE_S: Final = 0.0005
"""A piece that took this long serves no further socket."""
ROUND_S: Final = 0.001
"""A round of the loop that took this long begins no further piece: newer events may come first."""
MS_A_SECOND: Final = 200.0
"""A fifth of a processor. Messages of 1,024 processes once a second need a hundredth of one: 10 us for a USAGE (measured)."""
MS_AT_ONCE: Final = 1000.0
"""A connection with its HELLO and its end takes 0.35 ms (measured), so that 1,024 processes with two each start at once."""
MS_AGAIN: Final = 10.0
"""A throttled container is served again when its budget reaches this: after 50 ms at most."""


class Attention:
    """The poller and the time budget of one container. `acts`: the action for each of its descriptors."""

    def __init__(self, at_s: float, processor_s: Callable[[], float] = time.thread_time) -> None:
        self.acts: dict[int, Callable[[], None]] = {}
        self.resting = False
        """It has used its budget, and waits."""
        self.throttles = 0
        """How often it was throttled."""
        self._poll = select.epoll()
        self._budget = MessageBudget(at_s, MS_A_SECOND, MS_AT_ONCE, MS_AGAIN)
        self._processor_s = processor_s

    @property
    def fd(self) -> int:
        """Readable when the container has something to read."""
        return self._poll.fileno()

    @property
    def had(self) -> float:
        """For comparison with other containers: more = more recent service."""
        return -self._budget.left

    def add(self, fd: int, act: Callable[[], None]) -> None:
        """Call `act` when there is something to read."""
        self._poll.register(fd, select.EPOLLIN)
        self.acts[fd] = act

    def remove(self, fd: int) -> None:
        """No error for an unknown descriptor."""
        if self.acts.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def await_reader(self, fd: int, *, full: bool) -> None:
        """If `full`, call its action when the peer has read its messages, instead of when there is something to read."""
        self._poll.modify(fd, select.EPOLLOUT if full else select.EPOLLIN)

    def unread(self) -> bool:
        """Is there something to read?"""
        return bool(self._poll.poll(0, 1))

    def serve(self) -> None:
        """Serve some of its ready descriptors."""
        began_s = self._processor_s()
        for fd, _ in self._poll.poll(0, EVENTS_A_PIECE):
            act = self.acts.get(fd)
            if act is not None:
                act()
            if self._processor_s() - began_s > PIECE_S:
                break
        self._budget.spend((self._processor_s() - began_s) * 1000)

    def rest_s(self, at_s: float) -> float | None:
        """When to serve it again, if it has to wait from now on."""
        if self._budget.may(at_s):
            return None
        self.throttles += 1
        return self._budget.again_s(at_s)

    def close(self) -> None:
        """Remove all descriptors. Their owner closes them."""
        self.acts.clear()
        self._poll.close()
