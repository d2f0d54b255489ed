"""Small calls to the API server over connections that are kept: one call at a time on each, its request in one write.

A binding or a nomination takes 20 us of processor time so, and 125 with aiohttp (measured), which knows cookies, redirects, compression and
streams; `kube.client` leaves to it all that needs more than this. An answer is parsed by httptools.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import SplitResult, urlsplit

import httptools

MOST: Final = 100
"""Connections at a time; others wait. As aiohttp by itself."""

IDLE_S: Final = 15.0
"""For so long a connection is kept without a call. The API server closes it after some minutes, a proxy between sooner. As aiohttp by itself."""

CONNECT_S: Final = 10.0
"""For a connection to be made, the TLS handshake included."""

MOST_BYTES: Final = 16 * 2**20
"""Of an answer, its head included. The largest, a pod, is 1.5 MiB in the API server's store."""

FINAL: Final = 200
"""Smaller statuses tell of an answer that is still to come."""

_PLAIN: Final = re.compile(r"/[!-~]*")
"""A path that may stand in a request as it is."""

_FIELD: Final = re.compile(r"[ -~]*")
"""A header's value that may, likewise."""


@dataclass(frozen=True, slots=True)
class Reply:
    """To one call."""

    status: int
    retry_after: str
    """The header of that name, or nothing."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Server:
    """Where to connect, and how. `tls` and `tls_name` as in `kube.auth.Access`."""

    url: str
    tls: ssl.SSLContext | None
    tls_name: str | None

    @property
    def parts(self) -> SplitResult:
        """Of the URL."""
        return urlsplit(self.url)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._reply: asyncio.Future[Reply] | None = None
        self._status = self._read_bytes = 0
        self._retry_after, self._has_length = "", False
        self._body: list[bytes] = []

    @property
    def usable(self) -> bool:
        """May another call be made on it?"""
        open_ = self.transport is not None and not self.transport.is_closing()
        return open_ and self._reply is None and time.monotonic() - self.idle_since_s < IDLE_S

    def abort(self) -> None:
        """Whatever it is about."""
        if self.transport is not None:
            self.transport.abort()

    async def call(self, request: bytes) -> Reply:
        """Raises OSError when the connection ends first or the answer cannot be read."""
        if self.transport is None:
            raise ConnectionError("it is not connected")
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self._read_bytes = 0
        self.transport.write(request)
        return await reply

    # --- what the transport tells ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._read_bytes += len(data)
        if self._reply is None or self._read_bytes > MOST_BYTES:
            self._fail(
                f"the answer has more than {MOST_BYTES} bytes" if self._reply else "an answer that nobody waits for"
            )
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer cannot be read: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._status >= FINAL and not self._has_length:
            self.on_message_complete()  # it is as long as the connection
        self._fail(str(exc) if exc is not None else "the server closed the connection")

    def _fail(self, why: str) -> None:
        self.abort()
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            reply.set_exception(ConnectionError(why))

    # --- what the parser tells ---

    def on_message_begin(self) -> None:
        self._status, self._retry_after, self._has_length, self._body = 0, "", False, []

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"retry-after":
                self._retry_after = value.decode("latin-1")
            case b"content-length" | b"transfer-encoding":
                self._has_length = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._status < FINAL or self._reply is None:
            return
        reply, self._reply = self._reply, None
        if not self._parser.should_keep_alive():
            self.abort()
        self.idle_since_s = time.monotonic()
        if not reply.done():
            reply.set_result(Reply(self._status, self._retry_after, b"".join(self._body)))
        self._status, self._body = 0, []


class Kept:
    """The connections to one API server."""

    def __init__(self) -> None:
        self._idle: list[_Connection] = []
        self._of: Server | None = None
        """Whom they lead to."""
        self._turns = asyncio.Semaphore(MOST)

    def close(self) -> None:
        """Those that are idle."""
        for one in self._idle:
            one.abort()
        self._idle.clear()

    async def call(
        self, server: Server, verb: str, path: str, headers: dict[str, str], body: bytes, *, timeout_s: float
    ) -> Reply:
        """One call, never made twice. Raises OSError (also ssl.SSLError), TimeoutError."""
        async with asyncio.timeout(timeout_s), self._turns:
            one = self._take(server) or await self._connect(server)
            try:
                reply = await one.call(_request(server, verb, path, headers, body))
            except BaseException:
                one.abort()
                raise
            if one.usable and server == self._of:
                self._idle.append(one)
            else:
                one.abort()
            return reply

    def _take(self, server: Server) -> _Connection | None:
        if server != self._of:  # credentials have changed: who calls is told by its connection, too
            self.close()
            self._of = server
        while self._idle:
            one = self._idle.pop()
            if one.usable:
                return one
            one.abort()
        return None

    async def _connect(self, server: Server) -> _Connection:
        parts = server.parts
        port = parts.port or (443 if server.tls is not None else 80)
        host = parts.hostname or ""
        name = (server.tls_name or host) if server.tls is not None else None
        async with asyncio.timeout(CONNECT_S):
            _, one = await asyncio.get_running_loop().create_connection(
                _Connection, host, port, ssl=server.tls, server_hostname=name
            )
        one.idle_since_s = time.monotonic()
        return one


def is_plain(path: str, headers: dict[str, str]) -> bool:
    """May they stand in a request as they are?"""
    return _PLAIN.fullmatch(path) is not None and all(map(_FIELD.fullmatch, headers.values()))


def _request(server: Server, verb: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    parts = server.parts
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"{verb} {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body
