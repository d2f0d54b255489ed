"""Writes over kept connections, to a server that answers as it is told to, byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from kube import kept
from kube.auth import Access
from kube.client import Client, connect
from kube.errors import ApiError
from kube.kept import Kept, Reply, Server, is_plain

OK = b"HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\nbody"


@dataclass
class Answers:
    """A server. `answers`: for each request the pieces of its answer; None ends the connection."""

    answers: list[list[bytes | None]]
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """A connection has ended."""
    served: set[asyncio.Future[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.served.add(done)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()
            self.ended.set()
            with suppress(ConnectionError):
                await writer.wait_closed()
            done.set_result(None)


@asynccontextmanager
async def answering(*answers: list[bytes | None]) -> AsyncIterator[tuple[Answers, Callable[..., object]]]:
    told = Answers(list(answers))
    server = await asyncio.start_server(told.serve, "127.0.0.1", 0)
    told.port = server.sockets[0].getsockname()[1]
    calls = Kept()

    async def call(path: str = "/x", body: bytes = b"{}", timeout_s: float = 10.0) -> Reply:
        headers = {"Accept": "application/json"}
        url = f"http://127.0.0.1:{told.port}"
        return await calls.call(Server(url, None, None), "POST", path, headers, body, timeout_s=timeout_s)

    try:
        yield told, call
    finally:
        calls.close()
        server.close()
        async with asyncio.timeout(10):
            await asyncio.gather(*told.served)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([OK], Reply(201, "", b"body")),
        ([OK[at : at + 1] for at in range(len(OK))], Reply(201, "", b"body")),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], Reply(201, "", b"body")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], Reply(204, "", b"")),
        ([b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"], Reply(429, "7", b"")),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n"], Reply(200, "", b"abc")),
    ],
    ids=["whole", "byte by byte", "after 100", "no content", "retry", "chunks"],
)  # fmt: skip
async def test_an_answer_is_read_however_it_comes_and_its_connection_is_kept(
    pieces: list[bytes | None], expected: Reply
) -> None:
    async with answering(pieces, [OK]) as (told, call):
        assert await call(body=b"one") == expected
        assert await call("/y", b"two") == Reply(201, "", b"body")
        assert told.connections == 1
        assert (
            told.requests[1]
            == (
                f"POST /y HTTP/1.1\r\nHost: 127.0.0.1:{told.port}\r\nAccept: application/json\r\nContent-Length: 3\r\n\r\ntwo"
            ).encode()
        )


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [OK[:-1], None],
        [b"HTTP/1.1 201 Created\r\nContent-", None],
        [b"no HTTP at all\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n", b"a" * 40000],
    ],
    ids=["no answer", "body cut off", "head cut off", "not HTTP", "too large"],
)
async def test_what_is_no_answer_is_an_error_and_the_call_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, pieces: list[bytes | None]
) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 30_000)
    async with answering(pieces, [OK]) as (told, call):
        with pytest.raises(ConnectionError):
            await call()
        assert len(told.requests) == 1
        assert await call() == Reply(201, "", b"body")
        assert told.connections == 2


async def test_an_answer_without_a_length_is_as_long_as_its_connection() -> None:
    async with answering([b"HTTP/1.1 200 OK\r\n\r\nab", b"c", None], [OK]) as (told, call):
        assert await call() == Reply(200, "", b"abc")
        await call()
        assert told.connections == 2


async def test_a_call_that_takes_too_long_is_given_up_with_its_connection() -> None:
    async with answering([], [OK]) as (told, call):
        with pytest.raises(TimeoutError):
            await call(timeout_s=0.05)
        await call()
        assert told.connections == 2


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async with answering([OK, None], [OK]) as (told, call):
        await call()
        await told.ended.wait()
        await asyncio.sleep(0.01)
        assert await call() == Reply(201, "", b"body")
        assert told.connections == 2


async def test_calls_at_a_time_have_a_connection_each_and_no_more_than_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "MOST", 3)
    async with answering(*[[OK] for _ in range(12)]) as (told, call):
        answers = await asyncio.gather(*(call() for _ in range(12)))
        assert answers == [Reply(201, "", b"body")] * 12
        assert told.connections <= 3


@pytest.mark.parametrize(
    ("path", "headers", "plain"),
    [
        ("/api/v1/namespaces/default/pods/a/binding", {"Authorization": "Bearer abc"}, True),
        ("/a b", {}, False),
        ("/a\r\nX: y", {}, False),
        ("/\u00e9", {}, False),
        ("a", {}, False),
        ("/a", {"Authorization": "Bearer a\r\nX: y"}, False),
    ],
)
def test_only_what_may_stand_in_a_request_is_written_as_it_is(path: str, headers: dict[str, str], plain: bool) -> None:
    assert is_plain(path, headers) is plain


@asynccontextmanager
async def client_of(told: Answers) -> AsyncIterator[Client]:
    async def load() -> Access:
        return Access(f"http://127.0.0.1:{told.port}/prefix", None, "Bearer abc")

    async with connect(load=load) as client:
        yield client


async def test_the_client_writes_so_and_a_redirect_is_an_error() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    async with answering([OK], [moved]) as (told, _), client_of(told) as client:
        assert await client.send("POST", "/api/v1/x", {"a": 1}) == b"body"
        assert told.requests[0].startswith(b"POST /prefix/api/v1/x HTTP/1.1\r\n")
        assert b"Authorization: Bearer abc\r\n" in told.requests[0]
        assert told.requests[0].endswith(b'\r\n\r\n{"a":1}')
        with pytest.raises(ApiError) as caught:
            await client.send("PATCH", "/api/v1/x", {})
        assert caught.value.status == 302
        assert told.connections == 1
