"""How long the watch cache waits after a failure, and what ends the wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from kube.paths import PODS
from tests.builders import pod
from tests.fake_api import FakeApi, answer_with, hold, say_raw
from tests.unit.kube.cache_kit import api, watching

__all__ = ["api"]


class Elsewhere(FakeApi):
    """In another thread's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._its_loop = loop

    async def watched(self, count: int = 1) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(super().watched(count), self._its_loop))


@pytest.fixture
def api_elsewhere() -> Iterator[tuple[FakeApi, Callable[[Callable[[], object]], None]]]:
    """An API server in a thread, and a way to change something there; returns when the client's kernel has all that the server sent."""
    loop, begun, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    server = Elsewhere(loop)

    async def serve() -> None:
        async with server:
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert begun.wait(10)

    def change(how: Callable[[], object]) -> None:
        loop.call_soon_threadsafe(how)
        while not _unread_bytes(server.port):
            pass

    yield server, change
    loop.call_soon_threadsafe(ended.set)
    thread.join(10)
    loop.close()


def _unread_bytes(port: int) -> int:
    """What clients of this port have not read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if int(row[2].partition(":")[2], 16) == port)


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("within_s", [0.0, -1.0, 0.001])
def test_what_has_arrived_is_applied_without_a_rest(
    api_elsewhere: tuple[FakeApi, Callable[[Callable[[], object]], None]],
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    within_s: float,
) -> None:
    server, change = api_elsewhere

    async def see() -> tuple[bool, bool]:
        async with watching(server) as (cache, _):
            change(lambda: server.put(pod("a").plain()))  # the loop stands still meanwhile
            return await cache.changes_within(within_s), await cache.changes_within(within_s)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(see()) == (True, False)


async def test_failures_are_waited_out_ever_longer_and_never_all_at_once(api: FakeApi) -> None:
    waits: list[float] = []

    async def note(wait_s: float) -> None:
        waits.append(wait_s)

    api.faults += [
        answer_with("GET", PODS, 500),
        answer_with("GET", PODS, 503),
        say_raw("GET", PODS, b"<html>"),
    ]
    async with watching(api, sleep=note, jitter=lambda: 0.5) as (cache, _):
        assert waits == pytest.approx([0.15, 0.3, 0.6])
        assert cache.statistics().failures == 3


async def test_a_reader_that_needs_current_objects_ends_the_wait_after_an_outage(api: FakeApi) -> None:
    waits: list[float] = []
    waiting, twice = asyncio.Event(), asyncio.Event()

    async def until_cancelled(wait_s: float) -> None:
        waits.append(wait_s)
        (waiting if len(waits) == 1 else twice).set()
        await asyncio.Event().wait()

    async with watching(api, sleep=until_cancelled, jitter=lambda: 0.0) as (cache, _):
        cache.catch_up()  # without effect while the watch is up
        cache._back_off.failures = 20
        api.faults.append(answer_with("WATCH", PODS, 503))
        api.cut()
        api.put(pod("a").plain())
        async with asyncio.timeout(10):
            await waiting.wait()
            cache.catch_up()
            await twice.wait()
            cache.catch_up()
            assert await cache.wait_for(lambda: cache.get("default/a"), timeout_s=10) is not None
        assert waits == pytest.approx([30.0, 0.2])


async def test_a_reader_that_comes_during_a_try_that_fails_waits_only_for_the_first_of_a_row(api: FakeApi) -> None:
    waits: list[float] = []
    waited, tried, refuse = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def note(wait_s: float) -> None:
        waits.append(wait_s)
        if tried.is_set():
            waited.set()

    async def unavailable(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    held = hold("WATCH", PODS, refuse, tried)
    async with watching(api, sleep=note, jitter=lambda: 0.0) as (cache, _):
        cache._back_off.failures = 20
        api.faults.append(lambda request, _: held(request, unavailable))
        api.cut()
        async with asyncio.timeout(10):
            await tried.wait()
            cache.catch_up()
            refuse.set()
            await waited.wait()
        assert waits == pytest.approx([30.0, 0.2])


async def test_a_server_that_ends_every_watch_at_once_is_not_requested_in_a_tight_loop(api: FakeApi) -> None:
    waits: list[float] = []

    async def note(wait_s: float) -> None:
        waits.append(wait_s)

    api.faults += [say_raw("WATCH", PODS, b"") for _ in range(3)]
    async with watching(api, sleep=note, jitter=lambda: 0.0):
        assert waits == pytest.approx([0.2, 0.4, 0.8])
