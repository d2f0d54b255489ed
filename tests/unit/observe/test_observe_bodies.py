"""How an HTTP server reads bodies: how much memory they may use together, which is read first, and what is left of a connection that ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import uvloop

from observe.acceptor import Acceptor
from observe.connections import Phase
from observe.protocol import ROUND_BYTES
from tests.unit.observe.serving_kit import BIG, BOUNDS, Running, first_line, post, running

LARGE = replace(
    BOUNDS, body_bytes=1_000_000, held_bytes=1_000_000, read_bytes=0, request_s=60, answer_s=60, trusted=True
)


def acceptor_of(one: Running) -> Acceptor:
    (acceptor,) = cast(list[Acceptor], one.server.servers)
    return acceptor


async def until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_body_for_which_there_is_no_memory_is_answered_503_and_not_that_of_a_client_that_was_answered_well() -> (
    None
):
    async with running(LARGE) as one:
        kept_reader, kept = await one.connect()
        kept.write(post(b"first"))
        assert await first_line(kept_reader) == b"HTTP/1.1 200 OK"
        kept.write(post(b"a" * 900_000)[:-1])
        connections = acceptor_of(one).connections
        await until(lambda: connections.held_bytes == 899_999)
        reader, writer = await one.connect()
        writer.write(post(b"b" * 300_000)[:-1])
        answer = await asyncio.wait_for(reader.readuntil(b"retry\n"), 10)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"the requests of all clients together are larger than 1000000 bytes: retry\n" in answer
        assert connections.held_bytes == 899_999
        await kept_reader.readuntil(b"ok")
        kept.write(b"a")
        assert await first_line(kept_reader) == b"HTTP/1.1 200 OK"
        assert [len(body) for body in one.bodies] == [5, 900_000]
        await until(lambda: connections.held_bytes == 0)
        for stream in (kept, writer):
            stream.close()


async def test_bodies_of_unknown_clients_are_dropped_for_that_of_a_client_that_was_answered_well() -> None:
    async with running(LARGE) as one:
        kept_reader, kept = await one.connect()
        kept.write(post(b"first"))
        assert await first_line(kept_reader) == b"HTTP/1.1 200 OK"
        await kept_reader.readuntil(b"ok")
        connections = acceptor_of(one).connections
        unproven = [await one.connect() for _ in range(3)]
        for number, (_, writer) in enumerate(unproven, 1):
            writer.write(post(b"b" * 300_001)[:-1])
            await until(lambda number=number: connections.held_bytes == number * 300_000)  # type: ignore[misc]
        kept.write(post(b"a" * 600_000))
        assert await first_line(kept_reader) == b"HTTP/1.1 200 OK"
        for reader, _ in unproven[:2]:
            assert await first_line(reader) == b"HTTP/1.1 503 Service Unavailable"
        unproven[2][1].write(b"b")
        assert await first_line(unproven[2][0]) == b"HTTP/1.1 200 OK"
        for _, writer in (*unproven, (None, kept)):
            writer.close()


async def test_a_body_is_complete_whatever_pieces_it_comes_in() -> None:
    body = bytes(range(256)) * 3000
    async with running(LARGE) as one:
        reader, writer = await one.connect()
        chunks = [body[at : at + 1000 * (1 + at % 7)] for at in range(0, 7000, 1000)]
        request = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        request += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        writer.write(post(body) + request)
        for _ in range(2):
            assert await first_line(reader) == b"HTTP/1.1 200 OK"
            await reader.readuntil(b"ok")
        assert one.bodies == [body, b"".join(chunks)]
        await until(lambda: acceptor_of(one).connections.held_bytes == 0)
        writer.close()


async def test_an_unproven_client_waits_for_what_is_long_and_a_client_that_was_answered_well_does_not(
    rests: list[float],
) -> None:
    bounds = replace(LARGE, long_bytes=10_000, long_bytes_per_s=1e7, read_bytes=32_768)
    async with running(bounds) as one:
        reader, writer = await one.connect()

        async def waited(path: bytes) -> bool:
            """Of a long body."""
            rests.clear()
            writer.write(post(b"a" * 50_000).replace(b" / ", b" %b " % path, 1))
            assert await first_line(reader) == b"HTTP/1.1 200 OK"
            await reader.readuntil(b"ok")
            return any(seconds > 0 for seconds in rests)

        assert [await waited(path) for path in (b"/", b"/", b"/unreadable", b"/", b"/")] == [
            True, False, False, True, False,
        ]  # fmt: skip
        writer.close()


async def test_a_request_after_one_that_was_answered_well_does_not_wait_in_the_queue() -> None:
    async with running(LARGE) as one:
        queue: Any = acceptor_of(one)._listener.queue
        reader, writer = await one.connect()
        _, other_writer = await one.connect()
        writer.write(post(b"a"))
        assert await first_line(reader) == b"HTTP/1.1 200 OK"
        queue._per_s, queue._left, queue._at_once = 1e-6, 0, 1
        other_writer.write(post(b"b"))
        await until(lambda: len(queue) == 1)
        had = dict(queue._attained._had)
        for body in (b"c", b"d"):
            writer.write(post(body))
            await until(lambda body=body: one.bodies[-1] == body)
        await until(lambda: [each.phase for each in acceptor_of(one).connections].count(Phase.IDLE) == 1)
        assert (len(queue), queue._attained._had) == (1, had)  # nor does it count there
        for each in (writer, other_writer):
            each.close()


async def test_what_an_answered_request_had_in_memory_is_free_while_the_next_one_waits() -> None:
    async with running(replace(LARGE, trusted=False)) as one:
        queue: Any = acceptor_of(one)._listener.queue
        queue._per_s, queue._left, queue._at_once = 1e-6, 1, 1
        reader, writer = await one.connect()
        writer.write(post(b"a" * 200_000) + post(b"b" * 10_000))
        assert await first_line(reader) == b"HTTP/1.1 200 OK"
        connections = acceptor_of(one).connections
        await until(lambda: connections.held_bytes == 10_000 and len(queue) == 1)
        writer.transport.abort()
        await until(lambda: connections.held_bytes == 0)


async def test_a_client_that_does_not_read_the_head_of_an_answer_keeps_no_memory_beyond_the_time_for_the_answer() -> (
    None
):
    async with running(replace(LARGE, answer_s=1)) as one:
        reader, writer = await one.connect()
        writer.write(post(b"a" * 200_000).replace(b" / ", b" /big-head ", 1))
        connections = acceptor_of(one).connections
        await until(lambda: one.bodies)
        assert connections.held_bytes == 200_000
        await until(lambda: connections.held_bytes == 0 and len(connections) == 0)
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < len(BIG)
        writer.close()


async def test_an_answer_whose_head_was_read_late_is_complete() -> None:
    async with running(LARGE) as one:
        reader, writer = await one.connect()
        connections = acceptor_of(one).connections
        for _ in range(2):
            writer.write(post(b"a").replace(b" / ", b" /big-head ", 1))
            await until(lambda: [each.phase for each in connections] == [Phase.ANSWER])
            assert (await reader.readexactly(8_000_000)).startswith(b"HTTP/1.1 200 OK")
            await reader.readuntil(b"\r\n\r\nok")
            await until(lambda: [each.phase for each in connections] == [Phase.IDLE])
        writer.close()


async def test_a_queued_request_is_closed_for_one_that_arrives() -> None:
    async with running(LARGE) as one:
        listener: Any = acceptor_of(one)._listener
        listener.queue._per_s, listener.queue._left, listener.queue._at_once = 1e-6, 0, 1
        waiting_reader, waiting = await one.connect()
        waiting.write(post(b"a" * 600_000))
        await until(lambda: len(listener.queue) == 1)
        _, writer = await one.connect()
        writer.write(post(b"b" * 600_000))
        assert await first_line(waiting_reader) == b""
        await until(lambda: len(listener.queue) == 1 and listener.connections.held_bytes == 600_000)
        for stream in (waiting, writer):
            stream.transport.abort()
        await until(lambda: listener.connections.held_bytes == 0)


async def test_an_answer_larger_than_all_that_may_be_held_is_sent() -> None:
    async with running(LARGE) as one:
        reader, writer = await one.connect()
        writer.write(post(b"a").replace(b" / ", b" /big ", 1))
        connections = acceptor_of(one).connections
        await until(lambda: connections.held_bytes == LARGE.held_bytes // 2)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(BIG)) == BIG
        await until(lambda: connections.held_bytes == 0)
        writer.close()


async def test_where_any_client_is_served_a_long_request_waits_after_one_too(rests: list[float]) -> None:
    async with running(replace(LARGE, long_bytes=10_000, trusted=False)) as one:
        reader, writer = await one.connect()
        for body in (b"a", b"a" * 50_000):
            writer.write(post(body))
            assert await first_line(reader) == b"HTTP/1.1 200 OK"
            await reader.readuntil(b"ok")
        assert max(rests) > 0
        writer.close()


async def test_after_a_large_piece_of_a_request_other_connections_are_read(rests: list[float]) -> None:
    async with running(LARGE) as one:
        assert await one.send(post(b"a" * 8 * ROUND_BYTES)) == b"HTTP/1.1 200 OK"
        assert 0 in rests


def test_a_queued_request_is_withdrawn_when_its_connection_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        async with running() as one:
            queue: Any = acceptor_of(one)._listener.queue
            queue._per_s, queue._left, queue._at_once = 1e-6, 1, 1
            reader, writer = await one.connect()
            writer.write(post(b"a") + post(b"b") + post(b"c"))
            assert await first_line(reader) == b"HTTP/1.1 200 OK"
            await until(lambda: len(queue) == 1)
            writer.transport.abort()
            await until(lambda: len(acceptor_of(one).connections) == 0)
            assert len(queue) == 0
            queue._per_s, queue._left, queue._due = 1e6, 1, False
            assert await one.send(post(b"d")) == b"HTTP/1.1 200 OK"
            assert one.bodies == [b"a", b"d"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert caplog.records == []
