"""uvicorn's HTTP protocol within bounds: by itself it buffers headers, trailers and requests for as long as a client sends them.

A request reaches the program when it is complete, so that a client that sends slowly, or never to the end, costs the program nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from observe.connections import ClientConnection, ClientConnections, Phase
from observe.eager import begin
from observe.fairness import FairQueue
from observe.pace import LongRequest, Pace
from observe.read_order import ReadOrder
from observe.resting import RestingFlow, closed
from observe.with_head import WithHead

PIPELINED: Final = 4
"""Requests that wait on one connection for the answer to an earlier one. No client of ours sends any."""

CHUNKED: Final = 2
"""A body in chunks may be so many times as large on the wire as it is."""

REASONS: Final = {
    HTTPStatus.BAD_REQUEST: "malformed",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "header",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body",
    HTTPStatus.TOO_MANY_REQUESTS: "pipelined",
}
"""As refusals are counted. `ClientConnections` counts those for memory, which are answered 503."""

STATUS: Final = "tangram.status"
"""Of the answer, in the scope of its request: `serving` sets it."""

UNREADABLE: Final = "tangram.unreadable"
"""In the scope of a request: an application sets it to True where it could not read the request and answers 200 all the same, as its protocol has it."""

PIECE_BYTES: Final = 64 * 2**10
"""A body is kept in pieces of at least this until it is complete, and copied once: one that grows is copied again and again."""

ROUND_BYTES: Final = 64 * 2**10
"""After so much of a request in one piece other connections are read, unless the last request was answered well: it costs a call with the names of 10,000
nodes 0.4 ms (measured). uvloop by itself reads 8 MiB from one connection that sends fast."""

SMALL_S: Final = 0.5
"""So long a connection is not read after one small piece too many of a request: each costs as much as a whole request."""

REFUSED_S: Final = 0.5
"""After an answer with a status of 400 to 499 the connection is not read for so long, after the next one for twice as long. No program of ours gets two."""
REFUSED_MOST_S: Final = 8.0
"""Prometheus waits 10 s."""

CLOSING_S: Final = 2.0
"""After a refusal the client may read it for so long. What it sends meanwhile is not read."""


@dataclass(frozen=True, slots=True)
class Listener:
    """What the connections of one listener share."""

    connections: ClientConnections
    queue: FairQueue
    """Of requests."""
    new: FairQueue
    """Of connections."""
    closing: FairQueue
    """Of connections that are closed some time after the reason: each takes 0.1 ms, and a flood's are due together."""
    resuming: FairQueue
    """Of connections that are read again after a rest."""
    pace: Pace
    reading: ReadOrder
    charge_refusal: Callable[[str], None]
    """A client of this address was refused a request."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    flow: RestingFlow

    def __init__(self, config: Config, state: ServerState, one: ClientConnection, listener: Listener) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._one, self._listener = one, listener
        self._connections, self._bounds = listener.connections, listener.connections.bounds
        self._begun = self._in_body = self._refused = self._was_queued = False
        self._unread_bytes = self._answering_bytes = 0
        """Of the answer that the client has not read, and of the body of the request that is answered."""
        self._header_bytes = self._body_bytes = self._wire_bytes = self._small_pieces = 0
        self._piece_bytes = self._parsed_bytes = 0
        """Of what is being read, and what of that the parser has reported."""
        self._rest_s = REFUSED_S
        self._body: list[bytes | bytearray] = []
        """Of the request that arrives."""
        self._long: LongRequest | None = None
        """That request, once it is."""
        self._incomplete: tuple[RequestResponseCycle, Any] | None = None
        self._answering: RequestResponseCycle | None = None
        """The request that waits in the queue, or whose answer is being made."""
        self._withdraw: Callable[[], None] = closed
        """Takes it out of the queue in which it waits."""
        one.shed = self.shed

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = RestingFlow(transport, self.loop, self._listener.resuming, self._one.address)
        # so that pause_writing reports any byte that the client has not read
        transport.set_write_buffer_limits(high=1, low=0)
        if self._bounds.read_bytes and hasattr(transport, "set_read_buffer_limits"):
            # TLS by itself takes 256 KiB from a connection that is not read
            transport.set_read_buffer_limits(high=self._bounds.read_bytes, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self._one)
        self._listener.reading.remove_client(self._one.fd)
        self._drop_answers()
        self.flow.end()
        super().connection_lost(exc)
        self._drop_body()
        self.pipeline.clear()
        if self.cycle is not None:
            self.cycle.body = bytearray()
        # these objects refer to each other, which Python may not collect for a minute (`collecting`): with TLS each connection has 44 KiB
        self._one.close = self._one.shed = self._withdraw = closed
        self._incomplete = self._answering = None
        self.cycle = self.parser = None  # type: ignore[assignment]

    def abort(self) -> None:
        """Close the connection at once. What the program still answers is dropped."""
        self._drop_answers()
        cast(Any, self.transport).abort()

    def shed(self) -> None:
        """Drop what is in memory for this connection, which others need: a request that arrives is answered 503, any other connection is closed, and so is one
        with another request that waits or is answered, or with an answer that is not read."""
        if self._in_body and self._answering is None and not self._unread_bytes and not self._refused:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, self._memory_sentence())
        else:
            self._connections.remove(self._one)
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._one.phase is Phase.IDLE:
            self._enter(Phase.REQUEST)
        awaited = self._one.phase is Phase.REQUEST
        self._wire_bytes += len(data)
        self._piece_bytes, self._parsed_bytes = len(data), 0
        super().data_received(data)
        if self._refused or self._refused_as_too_large():
            return
        if not awaited:  # it is read after the answer to the earlier request, whatever pieces it comes in
            self.flow.pause_reading()
        if self._one.phase is not Phase.REQUEST:
            return
        self._small_pieces += len(data) < self._bounds.small_bytes
        if self._small_pieces > self._bounds.small_pieces:
            self.flow.rest(SMALL_S)
        elif len(data) >= ROUND_BYTES and not self._one.well:
            self.flow.rest(0)

    def _refused_as_too_large(self) -> bool:
        """By what was read of a request that is not complete: the parser reports a header when it has all of it."""
        if self._in_body and self._wire_bytes > self._bounds.header_bytes + CHUNKED * self._bounds.body_bytes:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif not self._in_body and self._wire_bytes > self._bounds.header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        return self._refused

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            raise self._refusal(HTTPStatus.TOO_MANY_REQUESTS)
        self._header_bytes = self._body_bytes = 0
        self._begun, self._wire_bytes = True, self._piece_bytes - self._parsed_bytes  # not more than that is its own
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
        self.cycle.transport = cast(Any, WithHead(self.transport))
        if self.expect_100_continue:
            self.cycle.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._parsed_bytes += len(body)
        if self._body_bytes > self._bounds.body_bytes:
            raise self._refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        self._hold(len(body))
        if self._refused:
            raise httptools.HttpParserError(self._memory_sentence())
        if len(body) >= PIECE_BYTES:
            self._body.append(body)
        elif self._body and isinstance(last := self._body[-1], bytearray) and len(last) < PIECE_BYTES:
            last += body
        else:
            self._body.append(bytearray(body))
        if self._body_bytes > self._bounds.long_bytes and not self._one.well:
            if self._long is None:
                self._long = self._listener.pace.enter(self._one.address)
            if self._long.sent(len(body)):
                self.flow.rest_until(self._long.wait)

    def on_message_complete(self) -> None:
        self._begun = self._in_body = False
        self._wire_bytes = self._small_pieces = 0
        self.cycle.body = b"".join(self._body)  # type: ignore[assignment]
        if self._long is not None:
            self.flow.stop_waiting()
        self._drop_body()
        if self._one.phase is Phase.REQUEST:
            self._enter(self._working(Phase.QUEUED))
        super().on_message_complete()
        if self._incomplete is not None and self._incomplete[0] is self.cycle:
            cycle, app = self._incomplete
            self._incomplete = None
            self._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._answering is not None:
            cast(WithHead, self._answering.transport).flush()
            self._judge(self._answering.scope)
            self._connections.release(self._one, self._answering_bytes)
            self._answering = None
        super().on_response_complete()
        self._unset_keepalive_if_required()  # a timer that a lost connection would keep, with all its memory: `acceptor` enforces `idle_s`
        self._unread_bytes = min(self.transport.get_write_buffer_size(), self._bounds.answer_bytes)
        if self._unread_bytes > 0 or self.transport.is_closing():
            self._enter(Phase.ANSWER)
            self._hold(self._unread_bytes)
        else:
            self._enter(self._phase())

    def _phase(self) -> Phase:
        """Once an answer was read."""
        if self._answering is not None:
            return self._working(Phase.WORK if self._withdraw is closed else Phase.QUEUED)
        return Phase.REQUEST if self._begun else Phase.IDLE

    def _working(self, phase: Phase) -> Phase:
        """A program cannot go on while the client does not read: the time is the client's."""
        return Phase.ANSWER if self.flow.write_paused else phase

    def _judge(self, scope: Mapping[str, Any]) -> None:
        """Clients whose requests are answered well come before others, however many requests they send. The others wait longer each time."""
        status = scope.get(STATUS, 0)
        self._one.well = False
        if status == HTTPStatus.OK and not scope.get(UNREADABLE):
            self._connections.answered_well(self._one, time.monotonic())
            if self._was_queued:
                self._listener.queue.refund(self._one.address)
            self._listener.reading.refund(self._one.fd)
            if not self._one.served:
                self._listener.new.refund(self._one.address, piece=self._bounds.trusted)
            self._rest_s = REFUSED_S
        elif isinstance(status, int) and 400 <= status < 500:
            self._listener.charge_refusal(self._one.address)
            self.flow.rest(self._rest_s)
            self._rest_s = min(REFUSED_MOST_S, 2 * self._rest_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._one.phase in (Phase.QUEUED, Phase.WORK):
            self._enter(Phase.ANSWER)

    def resume_writing(self) -> None:
        """What comes before the end of an answer is not read with each piece of that answer."""
        super().resume_writing()
        self._connections.release(self._one, self._unread_bytes)
        self._unread_bytes = 0
        if self._one.phase is Phase.ANSWER and not self._refused:
            self._enter(self._phase())
            if self._answering is None:
                self.flow.resume_reading()

    def send_400_response(self, _msg: str) -> None:
        if not self._refused and not self.transport.is_closing():
            self._refuse(HTTPStatus.BAD_REQUEST)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.more_body:
            self._incomplete = cycle, app
        else:
            self._answering, self._answering_bytes = cycle, len(cycle.body)
            # in the queue a request waits for a round of the event loop for each before it
            start, self._was_queued = partial(self._start, cycle, app), not self._one.well
            if self._was_queued:
                self._withdraw = self._listener.queue.submit(self._one.address, start)
            else:
                start()

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._withdraw = closed
        if self._one.phase is Phase.QUEUED:
            self._enter(Phase.WORK)
        if self._was_queued:
            super()._start_asgi_task(cycle, app)
        else:
            begin(cycle.run_asgi(app), self.loop, self.tasks)

    def _drop_answers(self) -> None:
        """What the program still answers is not sent, and what waits in the queue leaves it. uvicorn by itself forgets both while another request
        waits behind them."""
        self._withdraw()
        for cycle in (self._answering, self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()  # a program that waits for the client's end continues

    def _drop_requests(self) -> None:
        """What was received for them is in memory no longer, but for the body that a program has."""
        self._drop_body()
        if self._withdraw is not closed:  # it waits in the queue
            self._withdraw, self._answering, self._answering_bytes = closed, None, 0
        for cycle in (self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                cycle.body = bytearray()
        self.pipeline.clear()
        self.headers, self.url, self.cycle, self._incomplete = [], b"", self._answering, None  # type: ignore[assignment]
        stay_bytes = self._unread_bytes + (self._answering_bytes if self._answering is not None else 0)
        self._connections.release(self._one, max(0, self._one.held_bytes - stay_bytes))

    def _enter(self, phase: Phase) -> None:
        self._connections.enter(self._one, phase, time.monotonic())

    def _hold(self, more_bytes: int) -> None:
        for found in self._connections.hold(self._one, more_bytes):
            found.shed()

    def _drop_body(self) -> None:
        self._body = []
        if self._long is not None:
            self._long.end()
            self._long = None

    def _memory_sentence(self) -> str:
        return f"the requests of all clients together are larger than {self._bounds.held_bytes} bytes: retry"

    def _count_header(self, more_bytes: int) -> None:
        self._header_bytes += more_bytes
        self._parsed_bytes += more_bytes
        if self._header_bytes > self._bounds.header_bytes:
            raise self._refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _refusal(self, status: HTTPStatus) -> httptools.HttpParserError:
        self._refuse(status)
        return httptools.HttpParserError(status.phrase)

    def _refuse(self, status: HTTPStatus, sentence: str = "") -> None:
        """Answer so, and close once the client had time to read it: closed at once, what it still sends would reset the connection first."""
        self._refused = True
        if status in REASONS:
            self._connections.refused(REASONS[status])
            self._listener.charge_refusal(self._one.address)
        body = f"{status.value} {sentence or status.phrase}\n".encode()
        self._enter(Phase.ANSWER)
        self._drop_answers()
        self._drop_requests()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status.value, status.phrase.encode(), len(body), body)
        )
        self.flow.pause_reading()
        self.loop.call_later(CLOSING_S, self._listener.closing.submit, self._one.address, self.abort)
