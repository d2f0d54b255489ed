"""How long the watch cache waits after a failure, and what ends the wait."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from kube.paths import PODS
from tests.builders import pod
from tests.fake_api import FakeApi, answer_with, hold, say_raw
from tests.unit.kube.cache_kit import api, watching

__all__ = ["api"]


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
