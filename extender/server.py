"""The HTTP application on 127.0.0.1: kube-scheduler's verbs, and a snapshot of the state that they decide on.

Knows HTTP only: bodies go to `verbs` as they are. Six paths need no router: uvicorn and one ASGI function take 75 us of CPU time for a small
call (measured), a framework's stack several times that, and kube-scheduler's calls are most of the extender's work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Final

import structlog

from extender.snapshot_writer import BUSY, MOST_S, accepts_gzip
from extender.verbs import VerbResponse, Verbs
from observe.protocol import UNREADABLE
from observe.serving import App, Message

log = structlog.get_logger("extender")

_JSON: Final = b"application/json"
_TEXT: Final = b"text/plain; charset=utf-8"


def scheduler_app(verbs: Verbs) -> App:
    """POST /filter, /prioritize, /spare, /preempt and /bind, and GET /snapshot."""

    async def answer(method: str, path: str, body: bytes) -> tuple[HTTPStatus, bytes, VerbResponse]:
        match method, path:
            case "POST", "/filter":
                return HTTPStatus.OK, _JSON, await verbs.filter(body)
            case "POST", "/prioritize":
                return HTTPStatus.OK, _JSON, verbs.prioritize(body)
            case "POST", "/spare":
                return HTTPStatus.OK, _JSON, verbs.spare(body)
            case "POST", "/preempt":
                return HTTPStatus.OK, _JSON, await verbs.preempt(body)
            case "POST", "/bind":
                return HTTPStatus.OK, _JSON, await verbs.bind(body)
            case _, "/filter" | "/prioritize" | "/spare" | "/preempt" | "/bind" | "/snapshot":
                return HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, VerbResponse(f"{path} does not answer {method}\n".encode())
            case _:
                paths = b"the paths are /filter, /prioritize, /spare, /preempt, /bind and /snapshot\n"
                return HTTPStatus.NOT_FOUND, _TEXT, VerbResponse(paths)

    async def app(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        body = await _body(receive)
        if body is None:
            return
        if (scope["method"], scope["path"]) == ("GET", "/snapshot"):
            scope[UNREADABLE] = True  # not a scheduler's call
            await _send_snapshot(verbs, scope, receive, send)
            return
        status, content_type, answered = await answer(scope["method"], scope["path"], body)
        scope[UNREADABLE] = answered.unreadable
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(answered.body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answered.body})

    return app


async def _send_snapshot(
    verbs: Verbs, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """In chunks, as fast as the client reads them. Ends when the client disconnects, or after `MOST_S`."""
    started, outcome = time.perf_counter(), "unread"
    compressed = accepts_gzip(scope["headers"])
    headers = [(b"content-type", _JSON), (b"vary", b"accept-encoding")] + [(b"content-encoding", b"gzip")] * compressed
    gone = asyncio.ensure_future(receive())
    try:
        async with verbs.snapshots.slot(gone) as allowed, asyncio.timeout(MOST_S):
            if gone.done():
                return
            if not allowed:
                outcome, text = "refused", f"{BUSY}\n".encode()
                refused = [(b"content-type", _TEXT), (b"retry-after", b"5"), (b"content-length", b"%d" % len(text))]
                await send({"type": "http.response.start", "status": HTTPStatus.TOO_MANY_REQUESTS, "headers": refused})
                await send({"type": "http.response.body", "body": text})
                return
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
            async with aclosing(verbs.snapshots.chunks(compressed=compressed)) as chunks:
                async for chunk in chunks:
                    if gone.done():
                        return
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            outcome = "taken"
    except TimeoutError:
        log.warning("a snapshot was not read in time, and its reader is disconnected", seconds=MOST_S)
    finally:
        gone.cancel()
        verbs.count_snapshot(outcome, time.perf_counter() - started)


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes | None:
    """The whole body of a request; None if the client disconnected before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)
