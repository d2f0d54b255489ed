"""The HTTP server under clients that send too much, too slowly or never read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from observe.connections import ClientConnection
from observe.fair_loop import FairLoop
from observe.protocol import BoundedProtocol
from observe.serving import BACKLOG
from tests.unit.observe.serving_kit import BIG, BOUNDS, first_line, post, running
from webhook.certs import CA_CERT, CERT, KEY, renewed

SOMAXCONN = int(Path("/proc/sys/net/core/somaxconn").read_text())


async def test_a_request_within_the_bounds_is_answered_as_are_others_on_its_connection() -> None:
    async with running() as one:
        reader, writer = await one.connect()
        for _ in range(3):
            writer.write(post(b"a" * 1000))
            assert await first_line(reader) == b"HTTP/1.1 200 OK"
            assert await reader.readuntil(b"ok") != b""
        writer.close()
        assert one.bodies == [b"a" * 1000] * 3


async def test_requests_of_a_flood_wait_and_a_request_from_elsewhere_comes_before_them() -> None:
    async with running(replace(BOUNDS, request_s=10, requests_per_s=2, requests_at_once=2)) as one:
        began_s = asyncio.get_running_loop().time()
        flood = [await one.connect() for _ in range(8)]
        for _, writer in flood:
            writer.write(post(b"flood"))
        reader, writer = await one.connect("127.0.0.2")
        writer.write(post(b"probe"))
        assert await first_line(reader) == b"HTTP/1.1 200 OK"
        assert one.bodies.index(b"probe") <= 4, "of eight that came before"
        assert len(one.bodies) <= 2 + 2 * (asyncio.get_running_loop().time() - began_s)
        for _, gone in flood:
            gone.close()
        assert await one.send(post(b"after")) == b"HTTP/1.1 200 OK"
        assert one.bodies.count(b"flood") < len(flood), "a request whose client is gone keeps no place"
        writer.close()


async def test_a_flood_of_new_connections_waits_in_the_kernel() -> None:
    async with running() as one:
        info = one.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        (most,) = struct.unpack_from("I", info, 28)  # tcpi_sacked, of a socket that listens; <linux/tcp.h>
        assert most == min(BACKLOG, SOMAXCONN)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 5000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\nendless: " + b"a" * 5000, 431),
        (b"GET /" + b"a" * 5000, 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000, 431),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"100\r\n" + b"a" * 256 + b"\r\n" + b"400\r\n" + b"a" * 1024, 413),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"e" * 9000, 413),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"trailer: t\r\n" * 2000, 431),
        (b"nonsense\r\n\r\n", 400),
    ],
    ids=["header", "endless header", "endless line", "many headers", "length", "chunks", "chunk extension", "trailers", "no HTTP"],
)  # fmt: skip
async def test_a_request_beyond_a_bound_is_refused_and_never_reaches_the_program(
    request_bytes: bytes, status: int
) -> None:
    async with running() as one:
        assert (await one.send(request_bytes)).split()[1:2] == [b"%d" % status]
        assert await one.send(post(b"fine")) == b"HTTP/1.1 200 OK"
        assert one.bodies == [b"fine"]


@pytest.mark.parametrize("sent", [b"", b"GET / HT", post(b"four")[:-1]], ids=["nothing", "half a line", "half a body"])
async def test_a_request_that_is_not_complete_in_time_costs_its_connection(sent: bytes) -> None:
    async with running() as one:
        started_s = asyncio.get_running_loop().time()
        assert await one.send(sent) == b""
        assert 0.9 < asyncio.get_running_loop().time() - started_s < 5
        assert one.bodies == []


async def test_a_byte_now_and_then_does_not_buy_more_time() -> None:
    async with running() as one:
        reader, writer = await one.connect()
        with contextlib.suppress(OSError):
            for _ in range(40):
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.1)
        assert await first_line(reader) == b""


async def test_a_client_that_does_not_read_its_answer_loses_it() -> None:
    async with running(replace(BOUNDS, held_bytes=2**30)) as one:
        reader, writer = await one.connect()
        writer.write(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(3)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(reader.readexactly(len(BIG)), 10)
        writer.close()


async def test_one_that_reads_it_slowly_keeps_its_connection() -> None:
    async with running(replace(BOUNDS, held_bytes=2**30, answer_s=20)) as one:
        reader, writer = await one.connect()
        for _ in range(2):
            writer.write(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.5)
            await reader.readuntil(b"\r\n\r\n")
            assert await asyncio.wait_for(reader.readexactly(len(BIG)), 10) == BIG
        writer.close()


async def test_connections_beyond_an_addresss_share_end_the_oldest_that_sent_nothing() -> None:
    async with running(replace(BOUNDS, request_s=60)) as one:
        idle = [await one.connect() for _ in range(BOUNDS.per_address)]
        assert await one.send(post(b"fine")) == b"HTTP/1.1 200 OK"
        assert await first_line(idle[0][0]) == b""
        idle[1][1].write(post(b"still here"))
        assert await first_line(idle[1][0]) == b"HTTP/1.1 200 OK"
        for _, writer in idle:
            writer.close()


async def test_many_requests_at_once_on_one_connection_are_refused() -> None:
    async with running() as one:
        assert b"429" in await one.send(post(b"a") * 1000)
        assert len(one.bodies) < 20


async def test_a_client_that_was_served_and_resets_its_connection_leaves_nothing_in_memory() -> None:
    async with running() as one:
        for _ in range(5):
            reader, writer = await one.connect()
            writer.write(post(b"fine"))
            assert await first_line(reader) == b"HTTP/1.1 200 OK"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        while one.server.server_state.connections:  # noqa: ASYNC110 (the kernel reports each a moment later)
            await asyncio.sleep(0.01)
        gc.collect()
        assert [found for found in gc.get_objects() if isinstance(found, BoundedProtocol)] == []


async def test_an_answer_does_not_wait_for_the_clients_acknowledgement_of_its_head() -> None:
    async with running() as one:
        reader, writer = await one.connect()
        took_s = []
        for _ in range(10):
            began_s = asyncio.get_running_loop().time()
            writer.write(post(b"a"))
            await reader.readuntil(b"ok")
            took_s.append(asyncio.get_running_loop().time() - began_s)
        writer.close()
        assert min(took_s[3:]) < 0.03


async def test_a_request_that_comes_in_many_small_pieces_is_read_slowly_and_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("observe.protocol.SMALL_S", 0.3)
    reads: list[int] = []
    received = BoundedProtocol.data_received

    def counted(protocol: BoundedProtocol, data: bytes) -> None:
        reads.append(len(data))
        received(protocol, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", counted)
    async with running() as one:
        reader, writer = await one.connect()
        request, began_s = post(b"a" * 100), asyncio.get_running_loop().time()
        for at in range(len(request)):
            writer.write(request[at : at + 1])
            await asyncio.sleep(0.001)
        assert await first_line(reader) == b"HTTP/1.1 200 OK"
        assert one.bodies == [b"a" * 100]
        passed_s = asyncio.get_running_loop().time() - began_s
        assert len(reads) <= BOUNDS.small_pieces + 2 + passed_s / 0.3
        writer.close()


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, FairLoop])
def test_a_handshake_that_is_broken_off_as_it_ends_costs_no_other_connection_its_answer(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off = list[int]()
    made = BoundedProtocol.connection_made

    def break_off(protocol: BoundedProtocol, transport: Any) -> None:
        made(protocol, transport)
        if not broken_off:
            broken_off.append(protocol._one.fd)
            protocol._connections.remove(protocol._one)
            protocol._one.close()

    monkeypatch.setattr(BoundedProtocol, "connection_made", break_off)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(the_next_is_answered(tmp_path))
    assert broken_off


async def the_next_is_answered(folder: Path) -> None:
    """Two clients one after the other; on the server the second has the first one's descriptor."""
    files = renewed({}, ("localhost",), datetime.now(UTC))
    for name in (CERT, KEY):
        (folder / name).write_bytes(files[name])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / CERT, folder / KEY)
    authority = ssl.create_default_context(cadata=files[CA_CERT].decode())
    async with running(BOUNDS, ssl_context_factory=lambda _config, _default: context) as one:
        first, second = socket.socket(), socket.socket()

        async def connected(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", one.port))
            return await asyncio.open_connection(sock=sock, ssl=authority, server_hostname="localhost")

        _, ended = await connected(first)
        reader, writer = await asyncio.wait_for(connected(second), 10)
        writer.write(post(b"a"))
        assert await first_line(reader) == b"HTTP/1.1 200 OK"
        for stream in (ended, writer):
            stream.transport.abort()


async def test_a_client_with_answered_requests_comes_before_those_that_just_connect() -> None:
    async with running(replace(BOUNDS, handshakes_per_s=100, handshakes_at_once=1)) as one:
        for _ in range(5):
            assert await one.send(post(b"a")) == b"HTTP/1.1 200 OK"
        (acceptor,) = one.server.servers
        attained = acceptor._listener.new._attained  # type: ignore[attr-defined]
        assert attained.of("127.0.0.1") < 1
        for _ in range(5):
            _, writer = await one.connect()
            writer.close()
        async with asyncio.timeout(10):
            while acceptor._listener.new._attained.of("127.0.0.1") < 2:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_connection_that_is_begun_as_the_server_stops_is_closed() -> None:
    async with running() as one:
        (acceptor,) = one.server.servers
        ours, theirs = socket.socketpair()
        with ours:
            connection, fd = ClientConnection("127.0.0.1", 0.0), theirs.detach()
            acceptor.connections.add(connection)
            acceptor._begin(fd, connection)  # type: ignore[attr-defined]
            acceptor.close()
            await asyncio.gather(*acceptor._handshakes, return_exceptions=True)  # type: ignore[attr-defined]
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
            assert connection not in acceptor.connections  # type: ignore[attr-defined]


def protocols() -> list[BoundedProtocol]:
    """Of all connections that something still refers to, those of earlier tests among them."""
    return [thing for thing in gc.get_objects() if isinstance(thing, BoundedProtocol)]


async def test_a_connection_that_ended_is_freed_without_a_collection() -> None:
    async with running() as one:
        before = protocols()
        gc.disable()
        try:
            for request in (post(b"a"), b"POST / HTTP/1.1\r\nhost: x\r\n", b"nonsense\r\n\r\n"):
                reader, writer = await one.connect()
                writer.write(request)
                await asyncio.sleep(0.05)
                writer.close()
                del reader, writer
            async with asyncio.timeout(10):
                while not all(any(one is other for other in before) for one in protocols()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            gc.enable()


MISSING = b"GET /missing HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_after_an_answer_of_no_use_its_connection_waits_longer_each_time_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch, rests: list[float]
) -> None:
    monkeypatch.setattr("observe.protocol.REFUSED_S", 0.01)
    monkeypatch.setattr("observe.protocol.REFUSED_MOST_S", 1000.0)
    async with running() as one:
        reader, writer = await one.connect()

        async def post_raw(request: bytes) -> bytes:
            writer.write(request)
            line = await first_line(reader)
            await reader.readuntil(b"ok")
            return line.split()[1]

        assert [await post_raw(MISSING) for _ in range(3)] == [b"404"] * 3
        assert rests == [0.01, 0.02, 0.04]
        assert await post_raw(post(b"a")) == b"200"
        monkeypatch.setattr("observe.protocol.REFUSED_S", 1000.0)
        assert await post_raw(MISSING) == b"404"
        assert rests[3:] == [0.01]
        assert await post_raw(post(b"b")) == b"200"
        writer.close()
        reader, writer = await one.connect()
        assert await post_raw(MISSING) == b"404"
        writer.write(post(b"never read"))
        await writer.drain()
        assert await one.send(post(b"another client's")) == b"HTTP/1.1 200 OK"
        writer.close()
        assert one.bodies == [b"", b"", b"", b"a", b"", b"b", b"", b"another client's"]
