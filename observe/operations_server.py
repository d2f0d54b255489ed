"""The process that serves a program's pages: `python -m observe.operations_server LISTENER [review]`, with the program's socket as standard input. With
`review` only clients whose token is accepted read /metrics (`access`); probes need none.

A program makes a page for several clients at once. In a flood it makes at most four pages of metrics a second, which take milliseconds each, and fifty
answers to probes: clients then get the last one. A program that does not answer in time is answered for with 503.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from observe.access import Access
from observe.bounds import OPERATIONS
from observe.fair_loop import run_fairly
from observe.page import ANSWER, PATHS, REQUEST, REVIEW, Page, text, unknown
from observe.refusals import REASONS
from observe.serving import App, Message, Server

PR_SET_PDEATHSIG: Final = 1
"""<linux/prctl.h>"""

NICE: Final = 5
"""In a flood the program comes first, and this process still gets a quarter of a processor beside it, enough for probes."""

PER_S: Final = {"/metrics": 4.0, "/healthz": 50.0, "/readyz": 50.0}
"""Pages a second in a flood."""

BURST_S: Final = 5.0
"""So many seconds' pages are made as soon as a client wants them, before clients are a flood."""

ANSWER_S: Final = 0.9
"""Within the second that the kubelet's probes wait by default."""

REVIEW_S: Final = 6.0
"""For a token; the program times out before."""


class Source:
    """The program, as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._number = 0
        self._refused = dict.fromkeys(REASONS, 0)
        self._last: dict[str, Page] = {}
        self._credit = {path: (BURST_S * per_s, time.monotonic()) for path, per_s in PER_S.items()}
        self._requested: dict[int, asyncio.Future[Page]] = {}
        self._paths: dict[int, str] = {}
        """Of those of these requests that are for a page."""
        self._pending: dict[str, asyncio.Future[Page]] = {}

    async def page(self, path: str) -> Page:
        """What the program answers to GET `path`, or answered last when clients are a flood."""
        if path not in PATHS:
            return unknown(path)
        pending = self._pending.get(path)
        if pending is None:
            if path in self._last and not self._may_request(path):
                return self._last[path]
            pending = self._pending[path] = self._request(path)
        done, _ = await asyncio.wait([pending], timeout=ANSWER_S)
        return pending.result() if done else text(503, "the program does not answer")

    async def review(self, token: str) -> Page:
        """What the program answers to the question whether this token may read the metrics."""
        _, future = self._send(REVIEW, token.encode())
        done, _ = await asyncio.wait([future], timeout=REVIEW_S)
        if done:
            return future.result()
        return text(503, "the program does not answer")

    def refused(self, reason: str, more: int = 1, /) -> None:
        """The program reads it with the next request."""
        self._refused[reason] = (self._refused[reason] + more) % 2**32

    def _may_request(self, path: str) -> bool:
        per_s, now_s = PER_S[path], time.monotonic()
        had, at_s = self._credit[path]
        has = min(BURST_S * per_s, had + (now_s - at_s) * per_s)
        self._credit[path] = has - (has >= 1), now_s
        return has >= 1

    def _request(self, path: str) -> asyncio.Future[Page]:
        number, future = self._send(PATHS.index(path))
        self._paths[number] = path
        return future

    def _send(self, index: int, token: bytes = b"") -> tuple[int, asyncio.Future[Page]]:
        self._number = (self._number + 1) % 2**32
        future: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        self._requested[self._number] = future
        self._writer.write(REQUEST.pack(self._number, index, len(token), *self._refused.values()) + token)
        return self._number, future

    async def read(self) -> None:
        """Until the program ends."""
        try:
            while True:
                number, status, kind_bytes, body_bytes = ANSWER.unpack(await self._reader.readexactly(ANSWER.size))
                kind = (await self._reader.readexactly(kind_bytes)).decode()
                page = Page(status, kind, await self._reader.readexactly(body_bytes))
                if (path := self._paths.pop(number, None)) is not None:
                    self._last[path] = page
                    self._pending.pop(path, None)
                self._requested.pop(number).set_result(page)
        except (OSError, asyncio.IncompleteReadError):
            return


def address_of(scope: Message) -> str:
    """Empty for a client that has closed its connection."""
    client: tuple[str, int] | None = scope["client"]
    return client[0] if client is not None else ""


def operations_app(page_of: Callable[[str], Awaitable[Page]], access: Access | None = None) -> App:
    """GET and HEAD, as ASGI."""

    async def answer(scope: Message) -> Page:
        if scope["method"] not in ("GET", "HEAD"):
            return text(405, "there are GET and HEAD")
        if access is not None and scope["path"] == "/metrics":
            token = next((value for name, value in scope["headers"] if name == b"authorization"), None)
            if (refusal := await access.refusal(address_of(scope), token)) is not None:
                return refusal
        return await page_of(scope["path"])

    async def app(scope: Message, _receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]) -> None:
        page = await answer(scope)
        headers = [(b"content-type", page.content_type.encode()), (b"content-length", b"%d" % len(page.body))]
        if page.status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": page.status, "headers": headers})
        await send({"type": "http.response.body", "body": page.body})

    return app


async def serve(listener: socket.socket, program: socket.socket, *, review: bool) -> None:
    """Until the program ends."""
    source = Source(*await asyncio.open_connection(sock=program))
    access = Access(source.review, source.refused) if review else None
    server = Server(operations_app(source.page, access), OPERATIONS, source.refused)
    serving = asyncio.create_task(server.serve([listener]))
    await asyncio.wait([serving, asyncio.create_task(source.read())], return_when=asyncio.FIRST_COMPLETED)
    os._exit(0 if not serving.done() else 1)  # no client waits for what is under way: the program is gone


def main() -> None:
    """Signals are for the program, with which this ends. On asyncio's own event loop: uvloop raises when a client hung up just before its answer,
    which uvicorn logs with a traceback."""
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL
    )  # so that its port is free when the program is started again
    os.nice(NICE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    listener, program = socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=os.dup(0))
    run_fairly(serve(listener, program, review="review" in sys.argv[2:]))


if __name__ == "__main__":
    main()
