"""What a refused request had in memory, and what comes before the answer to another request."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest

from observe.connections import Phase
from observe.ports import listen
from observe.protocol import PIPELINED, BoundedProtocol
from observe.serving import Server
from tests.unit.observe.serving_kit import Running, first_line, post, running
from tests.unit.observe.test_observe_bodies import LARGE, acceptor_of, until

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\nlong: " + b"h" * 2000 + b"\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b"186A0\r\n" + b"x" * 100_000 + b"\r\n"


def protocol_of(one: Running) -> Any:
    (protocol,) = one.server.server_state.connections
    return protocol


def stop_turns(one: Running) -> Any:
    """Requests wait in the queue from now on."""
    queue: Any = acceptor_of(one)._listener.queue
    queue._per_s, queue._left, queue._at_once = 1e-6, 0, 1
    return queue


@pytest.mark.parametrize(
    ("sent", "status"),
    [(CHUNKED + PIECE + b"no\r\n", 400), (CHUNKED + 11 * PIECE, 413), (post(b"p" * 20_000) * (PIPELINED + 2), 429)],
)
async def test_a_refused_request_has_nothing_in_memory_while_its_answer_is_read(sent: bytes, status: int) -> None:
    async with running(replace(LARGE, held_bytes=8_000_000)) as one:
        stop_turns(one)
        reader, writer = await one.connect()
        writer.write(sent)
        assert (await first_line(reader)).startswith(b"HTTP/1.1 %d " % status)
        protocol, connections = protocol_of(one), acceptor_of(one).connections
        assert len(connections) == 1, "it may be read for some time"
        assert connections.held_bytes == 0
        assert [protocol._body, protocol.headers, list(protocol.pipeline), protocol.cycle] == [[], [], [], None]
        assert not [
            each for each in gc.get_referents(protocol) if isinstance(each, bytes | bytearray) and len(each) > 1000
        ]
        assert len(acceptor_of(one)._listener.queue) == 0
        writer.close()


async def test_the_body_that_a_program_has_counts_until_the_connection_ends() -> None:
    async with running(LARGE) as one:
        reader, writer = await one.connect()
        writer.write(post(b"a" * 200_000).replace(b" / ", b" /big-head ", 1))
        connections = acceptor_of(one).connections
        await until(lambda: one.bodies)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n")
        await until(lambda: protocol_of(one)._refused)
        assert connections.held_bytes == 200_000
        writer.transport.abort()
        await until(lambda: connections.held_bytes == 0)
        del reader


async def test_what_comes_before_an_answer_is_read_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, received = list[bytes](), BoundedProtocol.data_received

    def counted(protocol: BoundedProtocol, data: bytes) -> None:
        pieces.append(data)
        received(protocol, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", counted)
    async with running(replace(LARGE, small_pieces=10)) as one:
        queue = stop_turns(one)
        reader, writer = await one.connect()
        writer.write(post(b"a"))
        await until(lambda: len(queue) == 1)
        for piece in (post(b"bbbbb")[at : at + 1] for at in range(len(post(b"bbbbb")))):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        assert len(pieces) <= 3
        queue._per_s, queue._left, queue._due = 1e6, 1, False
        queue._arrange()
        for _ in range(2):
            assert await first_line(reader) == b"HTTP/1.1 200 OK"
            await reader.readuntil(b"ok")
        assert one.bodies == [b"a", b"bbbbb"]
        writer.close()


async def test_a_request_that_comes_while_an_answer_is_not_read_is_answered_once_it_is() -> None:
    async with running(replace(LARGE, answer_s=20)) as one:
        reader, writer = await one.connect()
        writer.write(post(b"a").replace(b" / ", b" /big ", 1))
        await until(lambda: one.bodies)
        for _ in range(3):
            writer.write(post(b"b"))
            await asyncio.sleep(0.01)
        await reader.readuntil(b"\r\n\r\n")
        assert len(await reader.readexactly(8_000_000)) == 8_000_000
        for _ in range(3):
            assert await first_line(reader) == b"HTTP/1.1 200 OK"
            await reader.readuntil(b"ok")
        writer.close()


@pytest.mark.parametrize("header_bytes", [5000, 60_000])
async def test_a_header_that_comes_with_an_earlier_request_is_bounded_too(header_bytes: int) -> None:
    async with running(LARGE) as one:
        reader, writer = await one.connect()
        writer.write(post(b"a" * 60_000) + b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"h" * header_bytes)
        assert await first_line(reader) == b"HTTP/1.1 431 Request Header Fields Too Large"
        writer.close()


async def test_a_header_within_the_bound_that_comes_with_an_earlier_request_has_the_time_of_a_request() -> None:
    async with running(replace(LARGE, request_s=0.3, idle_s=60)) as one:
        reader, writer = await one.connect()
        writer.write(post(b"a" * 60_000) + b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"h" * 3000)
        assert await first_line(reader) == b"HTTP/1.1 200 OK"
        await reader.readuntil(b"ok")
        (connection,) = acceptor_of(one).connections
        assert connection.phase is Phase.REQUEST
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_what_comes_while_an_answer_is_sent_in_pieces_is_not_read_with_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_bytes, received = 0, BoundedProtocol.data_received

    def counted(protocol: BoundedProtocol, data: bytes) -> None:
        nonlocal read_bytes
        read_bytes += len(data)
        received(protocol, data)

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2000):
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
        at_end.append(read_bytes)
        await send({"type": "http.response.body", "body": b""})

    at_end = list[int]()
    monkeypatch.setattr(BoundedProtocol, "data_received", counted)
    server, sock = (
        Server(app, replace(LARGE, body_bytes=2**30, held_bytes=2**31, long_bytes=2**30)),
        listen("127.0.0.1", 0),
    )
    task = asyncio.create_task(server.serve([sock]))
    await server.up.wait()
    reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
    writer.write(post(b"a"))
    assert await first_line(reader) == b"HTTP/1.1 200 OK"
    writer.write(post(b"b" * 100_000_000)[:-1])
    async with asyncio.timeout(20):
        while not at_end:
            await reader.read(2**20)
    assert at_end[0] < 1_000_000, "one or two pieces"
    writer.transport.abort()
    server.should_exit = True
    await task


async def test_an_answer_that_is_not_read_counts_after_the_next_request_is_refused() -> None:
    async with running(replace(LARGE, held_bytes=30_000_000)) as one:
        _, writer = await one.connect()
        writer.write(post(b"a").replace(b" / ", b" /big ", 1))
        connections = acceptor_of(one).connections
        await until(lambda: connections.held_bytes > 1_000_000)
        unread_bytes = connections.held_bytes
        writer.write(b"nonsense\r\n\r\n")
        await until(lambda: protocol_of(one)._refused)
        assert connections.held_bytes == unread_bytes
        writer.transport.abort()
        await until(lambda: connections.held_bytes == 0)
