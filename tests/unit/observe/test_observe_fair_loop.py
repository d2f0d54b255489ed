"""In which order an event loop reads from clients."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from observe.fair_loop import CLIENTS_A_ROUND, FairLoop, FairSelector, run_fairly


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as one:
        yield one


def ready(selector: FairSelector, stack: ExitStack, address: str | None) -> int:
    """The number of a socket that has something to read, always."""
    ours, theirs = (stack.enter_context(one) for one in socket.socketpair())
    theirs.send(b"a")
    if address is not None:
        selector.add_client(ours.fileno(), address)
    selector.register(ours, selectors.EVENT_READ)
    return ours.fileno()


def chosen(selector: FairSelector) -> list[int]:
    return [key.fd for key, _ in selector.select(0)]


def test_a_flood_from_one_address_leaves_the_others_their_place_in_each_round(stack: ExitStack) -> None:
    selector = stack.enter_context(FairSelector(lambda: 0.0))
    flood = {ready(selector, stack, "flood") for _ in range(50)}
    own, honest = ready(selector, stack, None), ready(selector, stack, "honest")
    for _ in range(20):
        round_ = chosen(selector)
        assert own in round_
        assert honest in round_
        assert len(flood & set(round_)) == CLIENTS_A_ROUND - 1


def test_all_sockets_of_an_address_are_served(stack: ExitStack) -> None:
    selector = stack.enter_context(FairSelector(lambda: 0.0))
    flood = [ready(selector, stack, "flood") for _ in range(3 * CLIENTS_A_ROUND)]
    seen = Counter(fd for _ in range(6) for fd in chosen(selector))
    assert seen == dict.fromkeys(flood, 2)


def test_the_address_with_least_recent_use_comes_first_and_answered_requests_hardly_count(stack: ExitStack) -> None:
    selector = stack.enter_context(FairSelector(lambda: 0.0))
    api = ready(selector, stack, "api")
    for _ in range(100):
        assert chosen(selector) == [api]
    crowd = {ready(selector, stack, str(number)) for number in range(2 * CLIENTS_A_ROUND)}
    assert [api in chosen(selector) for _ in range(10)] == [False] * 10
    selector.refund(api)
    assert api in chosen(selector)
    assert crowd


def test_a_socket_without_a_client_does_not_wait(stack: ExitStack) -> None:
    selector = stack.enter_context(FairSelector(lambda: 0.0))
    many = [ready(selector, stack, "flood") for _ in range(3 * CLIENTS_A_ROUND)]
    for fd in many:
        selector.remove_client(fd)
        selector.remove_client(fd)
        selector.refund(fd)
    assert sorted(chosen(selector)) == sorted(many)


def test_work_runs_in_such_a_loop() -> None:
    loops = []

    async def work() -> None:
        loops.append(asyncio.get_running_loop())

    run_fairly(work())
    assert [type(one) for one in loops] == [FairLoop]
