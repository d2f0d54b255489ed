"""The pages of `pages` over HTTP, from a process of its own: clients that flood that port cost the program nothing but two pages a second.

The program keeps the listening socket and starts `operations_server` with it, which requests one page at a time here (`page` has the format). The
server is started when the first client connects, ends when the program does, and is started again when it ends before. Where clients need a token for
/metrics, the server decides when one is reviewed (`access`), and the program has it reviewed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Final

import structlog

from observe import address_filter
from observe.access import Review
from observe.page import PATHS, REQUEST, REVIEW, packed, text
from observe.pages import Pages
from observe.ports import listen
from observe.refusals import REASONS, RefusalCounter, not_counted

COMMAND: Final = (sys.executable, "-P", "-m", "observe.operations_server")

LEFT_S: Final = 2.0
"""So long a server may need to end after its program was killed. Guessed: it takes milliseconds."""

REVIEW_S: Final = 5.0
"""For a token. Prometheus limits a scrape to 10 s by default."""

AGAIN_S: Final = 1.0
"""Between the end of a server and the start of the next. Guessed."""

log = structlog.get_logger("operations")


class Operations:
    """The server of one program. `port` is the one in use, also where 0 was given. `review`: only clients whose token it accepts read the metrics.
    Raises OSError."""

    def __init__(
        self, pages: Pages, host: str, port: int, *, review: Review | None = None, refused: RefusalCounter = not_counted
    ) -> None:
        self._pages, self._review, self._refused = pages, review, refused
        self._reviewing: set[asyncio.Task[None]] = set()
        self._listener = _listen(host, port)
        self._listener.listen(1024)
        self.port: int = self._listener.getsockname()[1]
        self.pid: int | None = None
        """Of the server that runs now."""

    async def run(self) -> None:
        """Until cancelled. The port is closed then."""
        try:
            while True:
                try:
                    await readable(self._listener)
                    log.warning("the server of metrics and probes ended and is started again", how=await self._serve())
                except OSError as error:
                    log.error("the server of metrics and probes cannot be started", error=str(error))
                await asyncio.sleep(AGAIN_S)
        finally:
            self._listener.close()

    async def _serve(self) -> str:
        """One server, until it ends. Returns how it ended. Raises OSError."""
        ours, process = self._start()
        self.pid = process.pid
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                await self._answer(reader, writer)
            finally:
                writer.close()
        finally:
            process.kill()
            self.pid = None
            with suppress(OSError):  # what it had the kernel drop, so that these clients can start the next one
                address_filter.detach(self._listener)
            status = await asyncio.to_thread(process.wait)
        return f"signal {-status}" if status < 0 else f"status {status}"

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        listener = self._listener.fileno()
        try:
            return ours, subprocess.Popen(  # noqa: S603 - our own program
                [*COMMAND, str(listener), *(["review"] if self._review else [])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=[listener],
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = [0] * len(REASONS)
        try:
            while True:
                number, index, token_bytes, *counts = REQUEST.unpack(await reader.readexactly(REQUEST.size))
                token = (await reader.readexactly(token_bytes)).decode()
                for reason, count, had in zip(REASONS, counts, before, strict=True):
                    if count > had:
                        self._refused(reason, count - had)
                before = counts
                if index == REVIEW and self._review is not None:
                    task = asyncio.create_task(self._answer_review(number, token, writer, self._review))
                    self._reviewing.add(task)
                    task.add_done_callback(self._reviewing.discard)
                else:
                    writer.write(packed(number, self._pages.get(PATHS[index])))
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return

    async def _answer_review(self, number: int, token: str, writer: asyncio.StreamWriter, review: Review) -> None:
        """Beside pages, which wait for no API server."""
        try:
            page = await asyncio.wait_for(review(token), REVIEW_S)
        except TimeoutError:
            page = text(503, "no answer to the review of the token in time")
        if not writer.is_closing():
            writer.write(packed(number, page))


async def readable(sock: socket.socket) -> None:
    """Until there is something to read or to accept."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def _listen(host: str, port: int) -> socket.socket:
    """Waits for the port while the server of a program that was killed still has it."""
    until_s = time.monotonic() + LEFT_S
    while True:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until_s:
                raise
            time.sleep(LEFT_S / 100)


def run_in_thread(operations: Operations) -> None:
    """For a program without an event loop: serve until the process ends."""
    threading.Thread(target=asyncio.run, args=(operations.run(),), name="operations", daemon=True).start()
