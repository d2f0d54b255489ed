"""How much of the arbiter's loop each container gets, so that one container's flood does not delay another's request.

Each container's sockets have a poller of their own. The loop attends to the containers that have something to read in small pieces, first to
the one that had least of late: a neighbour waits for one piece at most. Beyond a part of a processor's time a container waits, and what its processes
send meanwhile waits in their sockets, which the kernel bounds and counts as theirs.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Final

from arbiter.budget import Budget

EVENTS_A_PIECE: Final = 4
"""Sockets that are looked at in one piece; the kernel names others the next time."""
PIECE_S: Final = 0.0005
"""No further socket is looked at in a piece that took so long."""
ROUND_S: Final = 0.001
"""No further piece is begun in a round of the loop that took so long: what came meanwhile may come first."""
MS_A_SECOND: Final = 200.0
"""A fifth of a processor. What 1,024 processes say once a second takes a hundredth of one: 10 us for a USAGE (measured)."""
MS_AT_ONCE: Final = 1000.0
"""A connection with its HELLO and its end takes 0.35 ms (measured), so that 1,024 processes with two each start at once."""
MS_AGAIN: Final = 10.0
"""A container that used all up is attended to again when it has so much: after 50 ms at most."""


class Attention:
    """Of one container. `acts` has what to do for each of its descriptors."""

    def __init__(self, at_s: float, processor_s: Callable[[], float] = time.thread_time) -> None:
        self.acts: dict[int, Callable[[], None]] = {}
        self.resting = False
        """It has had its part, and waits."""
        self.throttles = 0
        """How often it had to wait."""
        self._poll = select.epoll()
        self._budget = Budget(at_s, MS_A_SECOND, MS_AT_ONCE, MS_AGAIN)
        self._processor_s = processor_s

    @property
    def fd(self) -> int:
        """Readable when the container has something to read."""
        return self._poll.fileno()

    @property
    def had(self) -> float:
        """For comparison with other containers: more = it had more of late."""
        return -self._budget.left

    def add(self, fd: int, act: Callable[[], None]) -> None:
        """Call `act` when there is something to read."""
        self._poll.register(fd, select.EPOLLIN)
        self.acts[fd] = act

    def remove(self, fd: int) -> None:
        """No error for one that is not known."""
        if self.acts.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def await_room(self, fd: int, *, room: bool) -> None:
        """Call its act when the peer has read what it was sent, instead of when there is something to read; or the other way round again."""
        self._poll.modify(fd, select.EPOLLOUT if room else select.EPOLLIN)

    def unread(self) -> bool:
        """Is there something to read?"""
        return bool(self._poll.poll(0, 1))

    def piece(self) -> None:
        """Do a little of what is to be done."""
        began_s = self._processor_s()
        for fd, _ in self._poll.poll(0, EVENTS_A_PIECE):
            act = self.acts.get(fd)
            if act is not None:
                act()
            if self._processor_s() - began_s > PIECE_S:
                break
        self._budget.spend((self._processor_s() - began_s) * 1000)

    def rest_s(self, at_s: float) -> float | None:
        """When to attend to it again, if it has to wait from now on."""
        if self._budget.may(at_s):
            return None
        self.throttles += 1
        return self._budget.again_s(at_s)

    def close(self) -> None:
        """Forget all descriptors. They are somebody else's to close."""
        self.acts.clear()
        self._poll.close()
