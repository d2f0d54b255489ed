"""In which order a server begins work for its clients."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from observe.fairness import FORGET, AttainedService, FairQueue


@pytest.mark.parametrize("silent_s", [1, 3, 1_023, 1_024, 1_100, 86_400, 10**9])
def test_what_an_address_had_counts_half_each_second_however_long_it_is_silent(silent_s: int) -> None:
    attained = AttainedService(0.0)
    for _ in range(8):
        attained.charge("one")
    attained.decay(float(silent_s))
    expected = 8.0
    for _ in range(min(silent_s, 100)):
        expected /= 2
    assert attained.of("one") == (expected if expected > FORGET else 0.0)
    attained.charge("one")
    assert attained.of("one") >= 1


async def test_new_connections_are_begun_so_many_a_second_and_a_newcomers_comes_first() -> None:
    queue, begun = FairQueue(per_s=20, at_once=2), list[str]()
    done = asyncio.Event()
    for number in range(5):
        queue.submit("flood", lambda number=number: begun.append(f"flood {number}"))  # type: ignore[misc]
    while len(begun) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    began_s = asyncio.get_running_loop().time()
    queue.submit("other", lambda: (begun.append("other"), done.set()))
    await asyncio.wait_for(done.wait(), 10)
    assert begun == ["flood 0", "flood 1", "other"]
    assert asyncio.get_running_loop().time() - began_s >= 0.03


async def test_a_withdrawn_request_costs_its_address_nothing() -> None:
    queue, begun = FairQueue(per_s=10, at_once=1), list[str]()
    withdrawn = [queue.submit("flood", lambda: begun.append("dead")) for _ in range(100)]
    done = asyncio.Event()
    queue.submit("flood", done.set)
    for one in withdrawn:
        one()
        one()
    assert len(queue) == 1
    await asyncio.wait_for(done.wait(), 5)  # a hundred calls would take ten seconds
    assert begun == []


async def test_a_queue_that_ends_begins_what_waits_at_once() -> None:
    queue, begun = FairQueue(per_s=0.001, at_once=1), list[str]()
    for name in "abc":
        queue.submit(name, partial(begun.append, name))
    queue.begin_all()
    assert begun == ["a", "b", "c"]
    assert len(queue) == 0
    await asyncio.sleep(0)
    assert begun == ["a", "b", "c"]


async def test_a_piece_that_was_worth_it_does_not_count_among_those_of_a_second() -> None:
    queue, begun = FairQueue(per_s=0.001, at_once=1), list[str]()
    for name in "abc":
        queue.submit(name, partial(begun.append, name))
    for number in range(1, 4):
        async with asyncio.timeout(10):
            while len(begun) < number:  # noqa: ASYNC110
                await asyncio.sleep(0)
        queue.refund(begun[-1], piece=True)
        if queue._due:  # it waits for a thousand seconds to pass
            queue._due = False
            queue._arrange()
    assert begun == ["a", "b", "c"]
