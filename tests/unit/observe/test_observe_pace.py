"""Long requests are read in quanta, by source address and then by request."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf

import pytest

from observe.connections import Phase
from observe.pace import MOST_DEBT_BYTES, QUANTUM_BYTES, REMEMBERED, FairShares, Pace
from tests.unit.observe.serving_kit import Running, first_line, post, running
from tests.unit.observe.test_observe_bodies import LARGE, acceptor_of, until

KB, MB = 1000, 1_000_000
MOST = 6 * MB
"""Of others is read while a long request is: its own size as often as quanta pass waiting, and what was on its way."""
PACED = replace(
    LARGE, body_bytes=4 * MB, held_bytes=200 * MB, read_bytes=32_768, long_bytes=10_000, trusted=False, connections=200,
    per_address=200, long_bytes_per_s=60e6,
)  # fmt: skip


@asynccontextmanager
async def flood(one: Running, addresses: list[str], body_bytes: int) -> AsyncIterator[None]:
    """A long body from each, that is not complete."""
    writers = []
    try:
        for address in addresses:
            _, writer = await one.connect(address)
            writers.append(writer)
            writer.write(post(b"f" * body_bytes)[:-1])
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def read_meanwhile(one: Running, address: str, body_bytes: int) -> int:
    """How many bytes of others were read until a body of this address was answered."""
    connections = acceptor_of(one).connections
    before = connections.held_bytes
    reader, writer = await one.connect(address)
    writer.write(post(b"v" * body_bytes))
    assert await first_line(reader) == b"HTTP/1.1 200 OK"
    meanwhile = connections.held_bytes - before
    writer.close()
    return meanwhile


async def test_a_long_request_is_not_behind_those_of_an_address_that_sends_many() -> None:
    async with running(PACED) as one, flood(one, ["127.0.0.2"] * 30, 3 * MB):
        await until(lambda: acceptor_of(one).connections.held_bytes > 2 * MB)
        assert await read_meanwhile(one, "127.0.0.3", 900 * KB) < MOST  # in order of arrival it would be 27 MB


async def test_a_long_request_is_not_behind_those_of_many_addresses_that_had_much() -> None:
    async with running(PACED) as one, flood(one, [f"127.0.1.{at}" for at in range(1, 31)], 3 * MB):
        await until(lambda: acceptor_of(one).connections.held_bytes > 30 * MB)
        assert await read_meanwhile(one, "127.0.0.3", 900 * KB) < MOST  # in order of arrival it would be 27 MB


async def test_a_shorter_request_is_not_behind_many_long_ones_of_its_own_address() -> None:
    async with running(PACED) as one, flood(one, ["127.0.0.2"] * 30, 3 * MB):
        await until(lambda: acceptor_of(one).connections.held_bytes > 15 * MB)
        assert await read_meanwhile(one, "127.0.0.2", 400 * KB) < MOST  # in order of arrival it would be 12 MB


async def test_connections_that_end_while_their_requests_wait_leave_nothing_behind() -> None:
    """A connection that waits is not read, so its end is seen when its time is up."""
    async with running(replace(PACED, long_bytes_per_s=1, request_s=3)) as one:
        pace = acceptor_of(one)._listener.pace
        async with flood(one, ["127.0.0.2"] * 7 + ["127.0.0.3"], 3 * MB):
            await until(lambda: len(pace) == 8)
        await until(lambda: not pace._addresses and not pace._waiting and len(pace) == 0)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (post(b"x" * 300_000), b"HTTP/1.1 200 OK"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n186A0\r\n" + b"x" * 100_000 + b"\r\nno\r\n", b"HTTP/1.1 400 Bad Request"),
    ],
)  # fmt: skip
async def test_long_requests_that_are_answered_leave_nothing_behind(sent: bytes, answer: bytes) -> None:
    async with running(PACED) as one:
        pace = acceptor_of(one)._listener.pace
        reader, writer = await one.connect()
        writer.write(sent)
        assert await first_line(reader) == answer
        assert not pace._addresses
        assert not pace._waiting
        writer.close()


async def test_a_queued_long_request_that_is_refused_ends_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(replace(PACED, held_bytes=1 * MB, body_bytes=900 * KB)) as one:
        connections = acceptor_of(one).connections
        async with flood(one, ["127.0.0.2"] * 10, 800 * KB):
            await until(lambda: any(each.phase is Phase.ANSWER for each in connections))
        await until(lambda: len(connections) == 0)
        assert connections.held_bytes == 0
    assert caplog.records == []


async def quanta_of(pace: Pace, quanta: int, addresses: Iterable[str]) -> Counter[str]:
    """How many of the first quanta each of these had, with requests that never end."""
    had, done = Counter[str](), asyncio.Event()

    async def go_on(address: str) -> None:
        request = pace.enter(address)
        while True:
            begun = asyncio.Event()
            request.wait(begun.set)
            await begun.wait()
            assert not request.sent(QUANTUM_BYTES // 2)
            assert request.sent(QUANTUM_BYTES // 2)
            had[address] += not done.is_set()
            if had.total() >= quanta:
                done.set()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(go_on(address)) for address in addresses]
        await asyncio.wait_for(done.wait(), 20)
        for task in tasks:
            task.cancel()
    return had


async def test_addresses_have_equal_shares_whatever_the_number_of_their_requests() -> None:
    had = await quanta_of(Pace(1e12, inf), 400, ["one", *["many"] * 40])
    assert 0.8 < had["one"] / had["many"] < 1.25


def test_a_client_that_sent_much_is_not_kept_waiting_by_new_ones() -> None:
    shares, waiting = FairShares[int](inf), {0: None}
    shares.join(0)
    shares.charge(0, 100 * QUANTUM_BYTES)
    had = 0
    for new in range(1, 101):
        shares.join(new)
        waiting[new] = None
        chosen = shares.next_of(waiting)
        had += chosen == 0
        shares.charge(chosen, QUANTUM_BYTES)
        del waiting[chosen]
        waiting.setdefault(0, None)
    assert had > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_clients_bytes_count_up_to_its_credit(seed: int) -> None:
    """Against the slow version, which remembers every client."""
    random_ = random.Random(seed)
    shares, had, at = FairShares[int](50), dict[int, float](), 0.0
    for number in itertools.count():
        if number == 5 * REMEMBERED:
            break
        waiting = dict.fromkeys(random_.sample(range(2 * REMEMBERED), 5))
        for one in waiting:
            shares.join(one)
            had[one] = max(had.get(one, 0), at - 50, 0)
        chosen = shares.next_of(waiting)
        if number % 2 == 0:
            assert chosen == min(waiting, key=had.__getitem__)
            at = max(at, had[chosen])
        else:
            assert chosen == next(iter(waiting))
        more = random_.randrange(1, 30)
        shares.charge(chosen, more)
        had[chosen] += more
        if random_.random() < 0.1:
            shares.pass_by(20)
            at += 20


def test_clients_that_are_always_new_are_forgotten_and_those_that_had_much_are_not() -> None:
    shares = FairShares[int](inf)
    shares.join(-1)
    shares.charge(-1, 100 * QUANTUM_BYTES)
    for new in range(20 * REMEMBERED):
        shares.join(new)
        assert shares.next_of({new: None}) == new
        shares.charge(new, QUANTUM_BYTES)
        assert len(shares) <= 2 * REMEMBERED + 2
    shares.join(-1)
    assert shares._had_bytes[-1] == 100 * QUANTUM_BYTES


async def test_what_is_read_beyond_a_quantum_is_charged_and_delays_all_clients_by_little() -> None:
    pace = Pace(16 * 2**20, inf)
    requests = [pace.enter("many") for _ in range(1000)]
    for request in requests:
        assert request.sent(256 * 2**10)
    assert pace._left_bytes == -MOST_DEBT_BYTES
    assert pace._shares._had_bytes == {"many": 1000 * 256 * 2**10}
