"""A program without credentials has tokens reviewed by another of its node."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from observe import access_socket
from observe.access import TOKEN_BYTES
from observe.access_socket import REVIEWS, WAITING, reviewed_by, serve_reviews
from observe.page import Page, text


@contextlib.asynccontextmanager
async def served(hold: asyncio.Event | None = None) -> AsyncIterator[tuple[Path, list[str]]]:
    """The socket, and the tokens that were reviewed."""
    tokens: list[str] = []

    async def review(token: str) -> Page:
        tokens.append(token)
        if hold is not None:
            await hold.wait()
        return text(200 if token == "good" else 403, f"it is {token[:9]}")

    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        path = Path(folder) / "access.sock"
        task = asyncio.create_task(serve_reviews(path, review))
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            yield path, tokens
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_the_answer_is_the_other_programs() -> None:
    async with served() as (path, tokens):
        review = reviewed_by(path)
        pages = [await review(token) for token in ("good", "bad")]
    assert [(page.status, page.body) for page in pages] == [(200, b"it is good\n"), (403, b"it is bad\n")]
    assert tokens == ["good", "bad"]


async def test_only_the_owner_may_connect() -> None:
    async with served() as (path, _):
        assert path.stat().st_mode & 0o777 == 0o600


async def test_without_a_server_the_answer_is_503(tmp_path: Path) -> None:
    page = await reviewed_by(tmp_path / "nothing")("good")
    assert page.status == 503
    assert b"tokens cannot be reviewed" in page.body


async def test_a_process_of_another_user_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_socket, "_user_of", lambda _: 12345)
    async with served() as (path, tokens):
        assert (await reviewed_by(path)("good")).status == 503
    assert not tokens


async def test_a_token_that_is_too_long_or_never_ends_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_socket, "TOKEN_S", 0.05)
    async with served() as (path, tokens):
        assert (await reviewed_by(path)("x" * (TOKEN_BYTES + 100))).status == 503
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"half a token")
        assert await reader.read() == b""
        writer.close()
    assert not tokens


async def test_one_connection_too_many_gets_no_answer_and_the_others_do() -> None:
    hold = asyncio.Event()
    async with served(hold) as (path, tokens):
        waiting = [asyncio.create_task(reviewed_by(path)("good")) for _ in range(WAITING)]
        while len(tokens) < REVIEWS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await reviewed_by(path)("good")).status == 503
        assert len(tokens) == REVIEWS
        hold.set()
        assert [page.status for page in await asyncio.gather(*waiting)] == [200] * WAITING


async def test_connections_without_a_token_are_closed_for_one_with_a_token() -> None:
    async with served() as (path, tokens):
        silent = [await asyncio.open_unix_connection(str(path)) for _ in range(WAITING)]
        assert (await reviewed_by(path)("good")).status == 200
        assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()
    assert tokens == ["good"]


async def test_a_reviewer_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_socket, "ANSWER_S", 0.1)
    async with served(asyncio.Event()) as (path, tokens), asyncio.timeout(10):
        page = await reviewed_by(path)("good")
    assert (page.status, tokens) == (503, ["good"])
    assert b"no answer within 0.1 s" in page.body


async def test_a_removed_socket_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_socket, "CHECK_S", 0.02)
    async with served() as (path, _):
        path.unlink()
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await reviewed_by(path)("good")).status == 200


async def test_neither_the_end_nor_a_removed_socket_waits_for_open_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Server.wait_closed` does, from Python 3.12.1 on."""

    async def never(_: asyncio.Server) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.Server, "wait_closed", never)
    monkeypatch.setattr(access_socket, "CHECK_S", 0.02)
    hold = asyncio.Event()
    async with asyncio.timeout(10), served(hold) as (path, tokens):
        waiting = asyncio.create_task(reviewed_by(path)("good"))
        while not tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        path.unlink()
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        hold.set()
        assert (await waiting).status == 200


def test_a_socket_left_by_an_earlier_program_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "access.sock"
    for _ in range(2):
        sock = access_socket._listening(path)
        assert isinstance(sock, socket.socket)
        sock.close()
