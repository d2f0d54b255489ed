"""When an HTTP server closes connections that it has to."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from dataclasses import replace
from math import inf
from typing import cast

import pytest

from observe import address_filter
from observe.acceptor import Acceptor
from observe.address_filter import source_of
from observe.connections import ClientConnection
from tests.unit.observe.serving_kit import BOUNDS, Running, first_line, running

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_connections_that_are_late_together_are_closed_one_in_each_round() -> None:
    async with running(replace(BOUNDS, request_s=1000)) as one:
        clients = [await one.connect() for _ in range(8)]
        (acceptor,) = cast(list[Acceptor], one.server.servers)
        async with asyncio.timeout(10):
            while len(acceptor.connections) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        acceptor.connections.bounds = replace(BOUNDS, request_s=-1)
        acceptor._sweep()
        acceptor._sweeping.cancel()
        assert len(acceptor.connections) == 0, "none counts any more"
        waiting = [len(acceptor._closing)]
        while waiting[-1]:
            await asyncio.sleep(0)
            waiting.append(len(acceptor._closing))
        assert waiting[:2] == [8, 7]
        assert len(waiting) >= 8
        for reader, writer in clients:
            assert await first_line(reader) == b""
            writer.close()


async def test_connections_of_a_flood_that_were_not_begun_are_closed_after_others_were_accepted() -> None:
    bounds = replace(BOUNDS, per_address=4, handshakes_per_s=0.001, handshakes_at_once=1)
    async with running(bounds) as one:
        clients = [await one.connect() for _ in range(12)]
        for reader, _ in clients[:8]:
            assert await first_line(reader) == b""
        (acceptor,) = cast(list[Acceptor], one.server.servers)
        assert len(acceptor.connections) == 4
        assert len(acceptor._closing) == 0
        for _, writer in clients:
            writer.close()


RATE = replace(BOUNDS, address_new_per_s=1, address_new_at_once=5)


async def _connects(one: Running, address: str) -> bool:
    """Within less than a client of TCP waits until it tries again."""
    try:
        reader, writer = await asyncio.wait_for(one.connect(address), 0.3)
    except TimeoutError:
        return False
    writer.write(GET)
    line = await first_line(reader)
    writer.close()
    return line == b"HTTP/1.1 200 OK"


async def test_an_address_that_opens_connections_too_fast_is_dropped_by_the_kernel_and_others_are_served() -> None:
    counts = Counter[str]()

    async with running(RATE, refused=lambda reason, more=1: counts.update({reason: more})) as one:
        kept = await one.connect("127.0.0.9")
        assert [await _connects(one, "127.0.0.9") for _ in range(4)] == [True] * 4
        async with asyncio.timeout(10):
            while await asyncio.to_thread(_is_answered, one.port, "127.0.0.9"):
                pass
        assert counts["rate"] >= 1
        assert await _connects(one, "127.0.0.8")
        kept[1].write(GET)
        assert await first_line(kept[0]) == b"HTTP/1.1 200 OK", "its open connections go on"
        kept[1].close()
        (acceptor,) = cast(list[Acceptor], one.server.servers)
        async with asyncio.timeout(20):
            while acceptor._rates.blocked:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while not await _connects(one, "127.0.0.9"):  # the filter is changed shortly after
                pass


def _is_answered(port: int, address: str) -> bool:
    """False: nothing came back to the first packet."""
    with socket.socket() as client:
        client.settimeout(0.3)
        client.bind((address, 0))
        try:
            client.connect(("127.0.0.1", port))
        except TimeoutError:
            return False
        return True


async def test_a_refusal_costs_as_much_as_ten_connections() -> None:
    async with running(replace(RATE, address_new_at_once=25)) as one:
        (acceptor,) = cast(list[Acceptor], one.server.servers)
        for _ in range(2):
            assert await one.send(b"GET / HTTP/9\r\n\r\n") == b"HTTP/1.1 400 Bad Request"
        assert not acceptor._rates.blocked
        assert await one.send(GET.replace(b"/", b"/missing", 1)) == b"HTTP/1.1 404 Not Found"
        assert acceptor._rates.blocked == ["127.0.0.1"]


async def test_an_address_with_good_answers_is_not_blocked_where_only_clients_that_are_meant_have_them() -> None:
    async with running(replace(RATE, well_exempt=True)) as one:
        (acceptor,) = cast(list[Acceptor], one.server.servers)
        for _ in range(30):
            assert await one.send(GET) == b"HTTP/1.1 200 OK"
        assert not acceptor._rates.blocked


async def test_a_client_that_is_closed_for_another_pays_only_if_its_address_had_more_than_the_others() -> None:
    async with running(replace(RATE, connections=3, per_address=3, address_new_at_once=3)) as one:
        (acceptor,) = cast(list[Acceptor], one.server.servers)
        clients = [await one.connect(f"127.0.0.{end}") for end in (2, 3, 4, 5)]
        assert await first_line(clients[0][0]) == b"", "closed for the fourth"
        assert not acceptor._rates.blocked
        clients += [await one.connect("127.0.0.6"), await one.connect("127.0.0.6"), await one.connect("127.0.0.7")]
        async with asyncio.timeout(10):
            while not acceptor._rates.blocked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert acceptor._rates.blocked == ["127.0.0.6"]
        for _, writer in clients:
            writer.close()


@pytest.mark.parametrize("prefix", ["fd00:10:244:0::", "::ffff:10.244.0."])
async def test_an_address_blocks_no_other_and_is_released_once_it_has_good_answers(prefix: str) -> None:
    """The kubelet probes a pod from an address of the node's part of the pods' network; an API server has one of its subnet."""
    async with running(replace(RATE, well_exempt=True)) as one:
        (acceptor,) = cast(list[Acceptor], one.server.servers)
        pod, server = (ClientConnection(source_of(prefix + end), 0.0) for end in "51")
        assert [acceptor._is_blocked(pod) for _ in range(7)][-1]
        assert not acceptor._is_blocked(server)
        acceptor.connections.answered_well(server, 0.0)
        assert not acceptor._is_blocked(server)
        acceptor.connections.answered_well(pod, 0.0)
        acceptor._rates.release(0.0, acceptor._is_exempt)
        assert not acceptor._is_blocked(pod)


async def test_where_the_kernel_has_no_memory_for_all_addresses_none_stays_blocked_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """net.core.optmem_max is 20 KB by default before Linux 6.7: less than the largest filter takes."""
    attach, most = address_filter.attach, 4

    def small(sock: socket.socket, sources: list[str]) -> None:
        if len(sources) > most:
            raise OSError(errno.ENOMEM, "optmem_max")
        attach(sock, sources)

    monkeypatch.setattr(address_filter, "attach", small)
    async with running(RATE) as one:
        (acceptor,) = cast(list[Acceptor], one.server.servers)
        acceptor._rates._blocked = dict.fromkeys(["127.0.0.9"], inf)
        acceptor._filter()
        assert not await _connects(one, "127.0.0.9")
        acceptor._rates._blocked = dict.fromkeys([f"127.0.1.{number}" for number in range(5)], inf)
        acceptor._filter()
        assert await _connects(one, "127.0.0.9")
        assert not await _connects(one, "127.0.1.0"), "as many as fit are dropped"
        most = 0
        acceptor._filter()
        assert await _connects(one, "127.0.0.8")


async def test_a_server_drops_nobody_for_what_an_earlier_one_of_its_socket_saw() -> None:
    one = Running(RATE)
    address_filter.attach(one.sock, ["127.0.0.9"])
    task = asyncio.create_task(one.server.serve([one.sock]))
    await asyncio.wait_for(one.server.up.wait(), 10)
    assert await _connects(one, "127.0.0.9")
    one.server.should_exit = True
    await asyncio.wait_for(task, 20)
