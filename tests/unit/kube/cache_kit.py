"""A watch cache of pods beside a fake API server, and a record of what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kube.cache import Cache
from kube.objects import Pod
from kube.paths import PODS
from tests.fake_api import FakeApi


class Log(list[tuple[str, str, str]]):
    """What on_change got: (added | changed | gone, key, resource version)."""

    def __call__(self, old: Pod | None, new: Pod | None) -> None:
        kind = "gone" if new is None else "added" if old is None else "changed"
        kept = new or old
        assert kept is not None
        self.append((kind, kept.key, kept.metadata.resource_version))

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [(kind, key) for kind, key, _ in self]


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as server:
        yield server


@asynccontextmanager
async def watching(api: FakeApi, **options: Any) -> AsyncIterator[tuple[Cache[Pod], Log]]:
    log = Log()

    async def no_wait(_: float) -> None:
        await asyncio.sleep(0)

    options = {"sleep": no_wait, "on_change": log} | options
    async with api.client() as client:
        cache = Cache(client, PODS, Pod, **options)
        task = asyncio.create_task(cache.run())
        try:
            async with asyncio.timeout(10):
                await cache.has_synced.wait()
                await api.watched()
            yield cache, log
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
