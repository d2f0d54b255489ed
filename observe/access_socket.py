"""A program that can have tokens reviewed does so for another of the same node, which has no credentials: over a socket in a folder of root's.

    request   the token and a line feed
    answer    u16 status, little-endian, and a sentence; then the connection ends

Bounds: processes of the same user only, 8 reviews at a time, 64 connections that have sent no token yet (one more closes the oldest of them) and 64
that wait for their review, 8 KiB, 2 s for the token, 6 s for the answer. A client that is not served gets no answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from observe.access import TOKEN_BYTES, Review
from observe.page import Page, text
from observe.unix_socket import connect

REVIEWS: Final = 8
WAITING: Final = 64
"""Connections that have sent no token, and as many that wait for their review. Guessed: the arbiter sends its token as it connects."""
TOKEN_S: Final = 2.0
ANSWER_S: Final = 6.0
"""For all of a review, as the client counts. The API server has 2 s for each of two calls (`kube.review`). Guessed."""
CHECK_S: Final = 1.0
"""The socket is checked this often: another process may have removed it."""
_STATUS: Final = struct.Struct("<H")
_SENTENCE_BYTES: Final = 1024
_CREDENTIALS: Final = struct.Struct("3i")


async def serve_reviews(path: Path, review: Review, report: Callable[[str], None] = lambda _: None) -> None:
    """Until cancelled. Reports what is wrong with the socket, and tries again."""
    reviewer = _Reviewer(review)
    reported = ""
    while True:
        try:
            server = await asyncio.start_unix_server(reviewer.serve, sock=_listening(path), limit=TOKEN_BYTES + 2)
        except OSError as error:
            if str(error) != reported:
                report(f"the socket {path} cannot be opened: {error}")
            reported = str(error)
            await asyncio.sleep(CHECK_S)
            continue
        try:
            while path.exists():  # noqa: ASYNC110, ASYNC240 - the file system sends no notice, and answers in microseconds
                await asyncio.sleep(CHECK_S)
            reported = ""
            report(f"the socket {path} was missing and is put back")
        finally:
            server.close()  # not `async with`: from Python 3.12.1 on that waits for every open connection, and so for reviews without an end


class _Reviewer:
    def __init__(self, review: Review) -> None:
        self._review, self._reviewing, self._with_token = review, asyncio.Semaphore(REVIEWS), 0
        self._silent: dict[asyncio.StreamWriter, None] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _user_of(writer) == os.geteuid():
                token = await self._token(reader, writer)
                page = await self._reviewed(token)
                if page is not None:
                    writer.write(_STATUS.pack(page.status) + page.body[:_SENTENCE_BYTES])
                    await asyncio.wait_for(writer.drain(), TOKEN_S)
        except (OSError, TimeoutError, UnicodeDecodeError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            writer.close()

    async def _token(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        if len(self._silent) >= WAITING:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        self._silent[writer] = None
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), TOKEN_S)
        finally:
            self._silent.pop(writer, None)
        return line[:-1].decode()

    async def _reviewed(self, token: str) -> Page | None:
        if self._with_token >= WAITING:
            return None
        self._with_token += 1
        try:
            async with self._reviewing:
                return await self._review(token)
        finally:
            self._with_token -= 1


def reviewed_by(path: Path) -> Review:
    """Has tokens reviewed by the program that serves this socket; 503 when it does not answer."""

    async def review(token: str) -> Page:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(sock=await _connected(path))
                try:
                    writer.write(token.encode() + b"\n")
                    answer = await reader.read(_STATUS.size + _SENTENCE_BYTES)
                finally:
                    writer.close()
        except TimeoutError:
            return text(503, f"tokens cannot be reviewed on this node now: no answer within {ANSWER_S:g} s")
        except OSError as error:
            return text(503, f"tokens cannot be reviewed on this node now: {error}")
        if len(answer) < _STATUS.size:
            return text(503, "tokens cannot be reviewed on this node now: no answer")
        (status,) = _STATUS.unpack_from(answer)
        return text(status, answer[_STATUS.size :].decode(errors="replace").strip())

    return review


async def _connected(path: Path) -> socket.socket:
    """Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await connect(sock, path)
    except BaseException:
        sock.close()
        raise
    return sock


def _user_of(writer: asyncio.StreamWriter) -> int:
    sock = writer.get_extra_info("socket")
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _listening(path: Path) -> socket.socket:
    """In place of one that an earlier program left. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = path.with_name(f".{path.name}.new")
    try:
        with suppress(FileNotFoundError):
            fresh.unlink()
        sock.bind(str(fresh))
        fresh.chmod(0o600)
        fresh.rename(path)
    except OSError:
        sock.close()
        raise
    return sock
