"""The descriptors of all swapping are served in turns that end, and each is served in time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from arbiter.swap.poller import EVENTS_A_PIECE, TURN_S, Poller


def test_a_flood_of_one_container_ends_no_turn_late_and_delays_no_other_for_long() -> None:
    now_s, calls = 0.0, Counter[int]()
    poller = Poller(lambda: now_s)
    fds = [os.eventfd(1, os.EFD_NONBLOCK) for _ in range(100)]

    def flooding(fd: int) -> Callable[[], None]:
        def call() -> None:
            nonlocal now_s
            now_s += TURN_S / 2
            calls[fd] += 1

        return call

    for fd in fds:
        poller.add(fd, flooding(fd))
    turns = 2 * len(fds) // EVENTS_A_PIECE
    for _ in range(turns):
        before_s = now_s
        poller.turn()
        assert now_s - before_s < TURN_S / 2 * (EVENTS_A_PIECE + 1)
    assert set(calls) == set(fds), "all that are readable come in turn"
    assert max(calls.values()) == min(calls.values()) == 2
    poller.close()
    for fd in fds:
        os.close(fd)


def reading(fd: int) -> Callable[[], None]:
    def call() -> None:
        os.eventfd_read(fd)

    return call


def test_a_turn_goes_on_until_nothing_is_readable() -> None:
    poller = Poller(lambda: 0.0)
    fds = [os.eventfd(1, os.EFD_NONBLOCK) for _ in range(3 * EVENTS_A_PIECE)]
    for fd in fds:
        poller.add(fd, reading(fd))
    poller.turn()
    for fd in fds:
        os.eventfd_write(fd, 1)
    poller.remove(fds[0])
    poller.turn()
    assert os.eventfd_read(fds[0]) == 1
    poller.close()
    for fd in fds:
        os.close(fd)
