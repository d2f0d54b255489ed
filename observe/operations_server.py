"""The process that serves a program's pages: `python -m observe.operations_server LISTENER`, with the program's socket as standard input.

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
from typing import Any, Final

from observe.bounds import OPERATIONS
from observe.page import ANSWER, PATHS, REQUEST, Page, text, unknown
from observe.serving import App, Message, Server

PR_SET_PDEATHSIG: Final = 1
"""<linux/prctl.h>"""

PER_S: Final = {"/metrics": 4.0, "/healthz": 50.0, "/readyz": 50.0}
"""Pages a second in a flood."""

BURST_S: Final = 5.0
"""So many seconds' pages are made as soon as a client wants them, before clients are a flood."""

ANSWER_S: Final = 0.9
"""Within the second that the kubelet's probes wait by default."""


class Source:
    """The program, as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._number = 0
        self._last: dict[str, Page] = {}
        self._credit = {path: (BURST_S * per_s, time.monotonic()) for path, per_s in PER_S.items()}
        self._asked: dict[int, tuple[str, asyncio.Future[Page]]] = {}
        self._asking: dict[str, asyncio.Future[Page]] = {}

    async def page(self, path: str) -> Page:
        """What the program answers to GET `path`, or answered last when clients are a flood."""
        if path not in PATHS:
            return unknown(path)
        asking = self._asking.get(path)
        if asking is None:
            if path in self._last and not self._may_ask(path):
                return self._last[path]
            asking = self._asking[path] = self._ask(path)
        done, _ = await asyncio.wait([asking], timeout=ANSWER_S)
        return asking.result() if done else text(503, "the program does not answer")

    def _may_ask(self, path: str) -> bool:
        per_s, now_s = PER_S[path], time.monotonic()
        had, at_s = self._credit[path]
        has = min(BURST_S * per_s, had + (now_s - at_s) * per_s)
        self._credit[path] = has - (has >= 1), now_s
        return has >= 1

    def _ask(self, path: str) -> asyncio.Future[Page]:
        self._number = (self._number + 1) % 2**32
        future: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        self._asked[self._number] = path, future
        self._writer.write(REQUEST.pack(self._number, PATHS.index(path)))
        return future

    async def read(self) -> None:
        """Until the program ends."""
        try:
            while True:
                number, status, kind_bytes, body_bytes = ANSWER.unpack(await self._reader.readexactly(ANSWER.size))
                kind = (await self._reader.readexactly(kind_bytes)).decode()
                page = Page(status, kind, await self._reader.readexactly(body_bytes))
                path, future = self._asked.pop(number)
                self._last[path] = page
                self._asking.pop(path, None)
                future.set_result(page)
        except (OSError, asyncio.IncompleteReadError):
            return


def operations_app(page_of: Callable[[str], Awaitable[Page]]) -> App:
    """GET and HEAD, as ASGI."""

    async def app(scope: Message, _receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]) -> None:
        page = (
            await page_of(scope["path"]) if scope["method"] in ("GET", "HEAD") else text(405, "there are GET and HEAD")
        )
        headers = [(b"content-type", page.content_type.encode()), (b"content-length", b"%d" % len(page.body))]
        await send({"type": "http.response.start", "status": page.status, "headers": headers})
        await send({"type": "http.response.body", "body": page.body})

    return app


async def serve(listener: socket.socket, program: socket.socket) -> None:
    """Until the program ends."""
    source = Source(*await asyncio.open_connection(sock=program))
    server = Server(operations_app(source.page), OPERATIONS)
    serving = asyncio.create_task(server.serve([listener]))
    await asyncio.wait([serving, asyncio.create_task(source.read())], return_when=asyncio.FIRST_COMPLETED)
    os._exit(0 if not serving.done() else 1)  # nobody waits for what is under way: the program is gone


def main() -> None:
    """Signals are for the program, with which this ends. On asyncio's own event loop: uvloop raises when a client hung up just before its answer,
    which uvicorn logs with a traceback."""
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL
    )  # so that its port is free when the program is started again
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=os.dup(0))))


if __name__ == "__main__":
    main()
