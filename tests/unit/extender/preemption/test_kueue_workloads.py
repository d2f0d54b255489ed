"""Kueue's Workloads are watched in a version that is served, and in another one once that is served instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from extender.preemption import kueue_workloads as workloads
from extender.preemption.kueue_workloads import KueueWorkloads
from kube.client import Client
from kube.paths import KUEUE
from kube.paths import workloads as path_of
from tests.builders import workload
from tests.fake_api import FakeApi, answer_with, say_raw


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as server:
        yield server


class WatchedWorkloads:
    """`now_s` is the time that the watch is judged by."""

    def __init__(self, client: Client) -> None:
        self.now_s, self.reported = 0.0, list[str]()
        self.all = KueueWorkloads(client, lambda: self.now_s, self.reported.append, sleep=self.sleep)

    async def sleep(self, _: float) -> None:
        await asyncio.sleep(0.001)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():  # noqa: ASYNC110 - the cache that would show it is made once a version is known
                await asyncio.sleep(0.001)


@asynccontextmanager
async def watching(api: FakeApi) -> AsyncIterator[WatchedWorkloads]:
    async with api.client() as client:
        watched = WatchedWorkloads(client)
        task = asyncio.create_task(watched.all.run())
        try:
            yield watched
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_the_newer_of_two_versions_is_watched(api: FakeApi) -> None:
    api.serve_kueue("v1beta1", "v1beta2")
    api.put(workload("w", "uid-j"))
    async with watching(api) as watched:
        assert watched.all.unsure("default")
        await watched.until(lambda: watched.all.has_synced)
        assert (dict(watched.all.owners("default")), watched.reported) == ({"uid-j": {"w"}}, ["default"])
        api.remove(workload("w", "uid-j"))
        await watched.until(lambda: not watched.all.owners("default"))
    assert f"GET {path_of('v1beta1')}" not in api.requests


@pytest.mark.parametrize("body", [b"garbage", b"\xff", b'{"versions": [{"version": "v9"}]}', b"[]", None])
async def test_as_long_as_no_known_version_is_served_all_is_in_doubt(api: FakeApi, body: bytes | None) -> None:
    api.serve_kueue("v1beta2")
    again = asyncio.Event()

    def refuse() -> None:
        fault = answer_with("GET", KUEUE, 404, "NotFound") if body is None else say_raw("GET", KUEUE, body)
        api.faults.append(
            lambda request, handler: again.set() or fault(request, handler) if not again.is_set() else None
        )

    refuse()
    async with watching(api) as watched:
        await again.wait()
        assert watched.all.unsure("default")
        await watched.until(lambda: watched.all.has_synced)
        assert not watched.all.unsure("default")


async def test_when_another_version_is_served_instead_that_one_is_watched(api: FakeApi) -> None:
    api.serve_kueue("v1beta1")
    api.put(workload("w", "uid-j") | {"apiVersion": "kueue.x-k8s.io/v1beta1"})
    async with watching(api) as watched:
        await watched.until(lambda: watched.all.has_synced)
        del api.objects[path_of("v1beta1")]
        api.serve_kueue("v1beta2")
        api.put(workload("other", "uid-k"))
        api.cut()
        watched.now_s += workloads.SILENT_S
        await watched.until(lambda: "uid-k" in watched.all.owners("default"))
        assert "uid-j" not in watched.all.owners("default"), "it is not served any more"
        assert watched.reported == ["default", "default", "default"], "it came, is not known any more, and another came"


async def test_a_silent_watch_of_a_version_that_is_still_served_goes_on(api: FakeApi) -> None:
    api.serve_kueue("v1beta2")
    async with watching(api) as watched:
        await watched.until(lambda: watched.all.has_synced)
        await api.watched()
        watched.now_s += workloads.SILENT_S + 1
        assert watched.all.unsure("default")
        requested = len([one for one in api.requests if one == f"GET {KUEUE}"])
        await watched.until(lambda: len([one for one in api.requests if one == f"GET {KUEUE}"]) > requested + 1)
        assert len([one for one in api.requests if one == f"GET {path_of('v1beta2')}"]) == 2, "one list and one watch"
