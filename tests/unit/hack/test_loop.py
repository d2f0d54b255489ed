"""What the tests' event loop does with connections when a test is over."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.loop import EndingLoop
from tests.unit.webhook.test_webhook_serving import NAME, trusting, write
from webhook.certs import CERT, KEY, renewed


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[tuple[str, int], ssl.SSLContext]]:
    """Address of a server that sends nothing after the handshake, not even in answer to a leave, and TLS to trust it."""
    files = renewed({}, (NAME,), datetime.now(UTC))
    write(tmp_path, files)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / CERT, tmp_path / KEY)
    over = threading.Event()

    def serve() -> None:
        with listening.accept()[0] as plain, tls.wrap_socket(plain, server_side=True):
            over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        yield listening.getsockname(), trusting(files)
        over.set()
        served.result()


@pytest.fixture
def unclosed() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield caught


async def connect(where: tuple[str, int], tls: ssl.SSLContext) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, *where, ssl=tls, server_hostname=NAME)
    return transport


def test_a_closed_connection_that_waits_for_its_peer_ends_with_the_loop(
    silent: tuple[tuple[str, int], ssl.SSLContext], unclosed: list[warnings.WarningMessage]
) -> None:
    async def close() -> None:
        (await connect(*silent)).close()

    with asyncio.Runner(loop_factory=EndingLoop) as runner:
        runner.run(close())
    gc.collect()
    assert not unclosed


def test_an_unclosed_connection_is_reported(
    silent: tuple[tuple[str, int], ssl.SSLContext], unclosed: list[warnings.WarningMessage]
) -> None:
    async def leave_open() -> None:
        await connect(*silent)

    with asyncio.Runner(loop_factory=EndingLoop) as runner:
        runner.run(leave_open())
    gc.collect()
    assert {one.category for one in unclosed} == {ResourceWarning}
