"""When an HTTP server closes connections that it has to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

from observe.acceptor import Acceptor
from tests.unit.observe.serving_kit import BOUNDS, first_line, running


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
