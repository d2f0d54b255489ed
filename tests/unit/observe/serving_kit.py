"""A server for the tests of `observe`: on a port of this machine, with a small program."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from observe.bounds import Bounds
from observe.ports import listen
from observe.protocol import UNREADABLE
from observe.serving import App, Message, Server

BOUNDS = Bounds(
    body_bytes=1000,
    header_bytes=4096,
    request_s=1,
    answer_s=1,
    idle_s=2,
    connections=20,
    per_address=10,
    held_bytes=50_000,
)
BIG = b"x" * 8_000_000


def app_of(bodies: list[bytes]) -> App:
    async def app(scope: Message, receive, send) -> None:  # type: ignore[no-untyped-def]
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        bodies.append(body)
        answer = BIG if scope["path"] == "/big" else b"ok"
        status = 404 if scope["path"] == "/missing" else 200
        scope[UNREADABLE] = scope["path"] == "/unreadable"
        headers = [(b"content-length", b"%d" % len(answer))] + [(b"long", BIG)] * (scope["path"] == "/big-head")
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


class Running:
    """A server on a port, and what its program was given."""

    def __init__(self, bounds: Bounds, **options: Any) -> None:
        self.bodies: list[bytes] = []
        self.server = Server(app_of(self.bodies), bounds, **options)
        self.sock = listen("127.0.0.1", 0)
        self.port: int = self.sock.getsockname()[1]

    async def connect(self, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """From an address of this machine, such as 127.0.0.2."""
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))

    async def send(self, data: bytes) -> bytes:
        """The first line of what comes back; empty when the connection just ends."""
        reader, writer = await self.connect()
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()
        line = await first_line(reader)
        writer.close()
        return line


async def first_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await asyncio.wait_for(reader.readline(), 10)).rstrip()
    except ConnectionError:
        return b""


@contextlib.asynccontextmanager
async def running(bounds: Bounds = BOUNDS, **options: Any) -> AsyncIterator[Running]:
    one = Running(bounds, **options)
    task = asyncio.create_task(one.server.serve([one.sock]))
    await asyncio.wait_for(one.server.up.wait(), 10)
    try:
        yield one
    finally:
        one.server.should_exit = True
        await asyncio.wait_for(task, 20)


def post(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"POST / HTTP/1.1", b"host: x", *headers, b"content-length: %d" % len(body), b"", body])
