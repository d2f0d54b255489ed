"""uvicorn's HTTP protocol within bounds: by itself it buffers headers, trailers and requests for as long as a client sends them."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from observe.bounds import Connection, Connections, Phase

PIPELINED: Final = 4
"""Requests that wait on one connection for the answer to an earlier one. No client of ours sends any."""

CHUNKED: Final = 2
"""A body in chunks may be so many times as large on the wire as it is."""

CLOSING_S: Final = 2.0
"""After a refusal the client may read it for so long. What it sends meanwhile is not read."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `close` closes any connection of the same listener."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        one: Connection,
        connections: Connections,
        close: Callable[[Connection], None],
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._one, self._connections, self._close = one, connections, close
        self._bounds = connections.bounds
        self._in_body = self._refused = self._unread = False
        self._header_bytes = self._body_bytes = self._wire_bytes = 0

    def connection_made(self, transport: Any) -> None:
        transport.set_write_buffer_limits(
            high=1, low=0
        )  # pause_writing tells of what the client has not read; asyncio's TLS confuses 0
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self._one)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._one.phase is Phase.IDLE:
            self._enter(Phase.REQUEST)
        self._wire_bytes += len(data)
        super().data_received(data)
        if self._refused or self._one.phase is not Phase.REQUEST:
            return
        if self._in_body and self._wire_bytes > self._bounds.header_bytes + CHUNKED * self._bounds.body_bytes:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif not self._in_body and self._wire_bytes > self._bounds.header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            raise self._refusal(HTTPStatus.TOO_MANY_REQUESTS)
        self._header_bytes = self._body_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        if name.lower() == b"content-length" and int(value) > self._bounds.body_bytes:
            raise self._refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if not self._in_body:  # else a trailer, which no program of ours reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._bounds.body_bytes:
            raise self._refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        self._hold(len(body))
        if self._one in self._connections:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._wire_bytes = 0
        if self._one.phase is Phase.REQUEST:
            self._enter(Phase.WORK)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unread = self.transport.get_write_buffer_size() > 0
        if self._unread or self.transport.is_closing():
            self._enter(Phase.ANSWER)
            self._hold(self.transport.get_write_buffer_size())
        else:
            self._enter(Phase.WORK if self.pipeline else Phase.IDLE)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread = False
            self._enter(Phase.IDLE)

    def send_400_response(self, _msg: str) -> None:
        if not self._refused and not self.transport.is_closing():
            self._refuse(HTTPStatus.BAD_REQUEST)

    def _enter(self, phase: Phase) -> None:
        self._connections.enter(self._one, phase, time.monotonic())

    def _hold(self, more_bytes: int) -> None:
        found = self._connections.hold(self._one, more_bytes)
        if found is not None:
            self._close(found)

    def _count_header(self, more_bytes: int) -> None:
        self._header_bytes += more_bytes
        if self._header_bytes > self._bounds.header_bytes:
            raise self._refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _refusal(self, status: HTTPStatus) -> httptools.HttpParserError:
        self._refuse(status)
        return httptools.HttpParserError(status.phrase)

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer so, and close once the client had time to read it: closed at once, what it still sends would reset the connection first."""
        self._refused = True
        said = f"{status.value} {status.phrase}\n".encode()
        self._enter(Phase.ANSWER)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the program hears that the client is gone, and answers nothing
            self.cycle.message_event.set()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status.value, status.phrase.encode(), len(said), said)
        )
        self.flow.pause_reading()
        self.loop.call_later(CLOSING_S, cast(Any, self.transport).abort)
