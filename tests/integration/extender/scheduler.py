"""An extender in this process before a FakeApi, called as kube-scheduler calls it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from extender.app import Extender
from extender.settings import Settings
from tests.builders import PodBuilder
from tests.fake_api import FakeApi


class Scheduler:
    """kube-scheduler's side of the protocol."""

    def __init__(self, extender: Extender, http: httpx.AsyncClient) -> None:
        self.extender, self._http = extender, http

    async def call(self, verb: str, body: object) -> dict[str, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self._http.post(f"http://127.0.0.1:{self.extender.port}/{verb}", content=raw)
        assert answer.status_code == 200, "anything else hides the reason from the user"
        decoded: dict[str, Any] = answer.json()
        return decoded

    async def filter(self, built: PodBuilder, *names: str) -> dict[str, Any]:
        return await self.call("filter", {"Pod": built.plain(), "Nodes": None, "NodeNames": list(names)})

    async def bind(self, built: PodBuilder, name: str) -> str:
        meta = built.plain()["metadata"]
        body = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": name}
        error: str = (await self.call("bind", body))["Error"]
        return error

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(f"http://127.0.0.1:{self.extender.metrics_port}{path}")

    def free_mib(self, name: str) -> int:
        fleet = self.extender.state.fleet
        return int(fleet.free_mib[0, fleet.column[name]])

    async def comes_true(self, true: Callable[[], bool]) -> None:
        """Return when this is true, checked after each change that the watch shows."""
        assert await self.extender.pods.wait_for(lambda: true() or None, timeout_s=10), "it never became true"


@asynccontextmanager
async def running(api: FakeApi, *, synced: bool = True, **options: Any) -> AsyncIterator[Scheduler]:
    settings = Settings(_cli_parse_args=False, metrics_host="127.0.0.1", port=0, metrics_port=0, **options)
    async with api.client() as client, httpx.AsyncClient() as http:
        extender = Extender(settings, client)
        task = asyncio.create_task(extender.run())
        try:
            if synced:
                async with asyncio.timeout(10):
                    await extender.pods.has_synced.wait()
                    await extender.nodes.has_synced.wait()
            yield Scheduler(extender, http)
        finally:
            extender.stopping.set()
            await asyncio.wait_for(task, 10)
