"""The preemption history reaches an extender that starts later, and one that runs beside: through a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import structlog

from extender.preemption.history import PreemptionHistory
from extender.preemption.history_store import KEY, HistoryStore
from kube.client import Client, connect
from tests.apiserver import ApiServer, Denied
from tests.builders import PodBuilder, pod

WHERE = "default/tangram-scheduler-preempted"
PATH = "/api/v1/namespaces/default/configmaps"


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[Client]:
    with suppress(Denied):
        apiserver("DELETE", f"{PATH}/tangram-scheduler-preempted")
    async with connect(str(apiserver.kubeconfig)) as made:
        yield made


@asynccontextmanager
async def running(client: Client) -> AsyncIterator[tuple[PreemptionHistory, HistoryStore]]:
    history = PreemptionHistory(lambda: 1000.0, times=2)
    made = HistoryStore(client, history, WHERE, each_s=0.01)
    task = asyncio.create_task(made.run())
    try:
        await asyncio.wait_for(made._cache.has_synced.wait(), 10)
        yield history, made
    finally:
        task.cancel()
        await asyncio.wait({task})


async def comes_to(made: HistoryStore, true: Callable[[], bool]) -> None:
    """Return when this is true, checked after each change of the ConfigMap."""
    proof: Any = object()
    assert await made._cache.wait_for(lambda: proof if true() else None, timeout_s=10) is proof


def gone(name: str, times: int) -> PodBuilder:
    return PodBuilder(name, uid=f"uid-{name}-{times}")


async def test_a_preempted_pod_is_protected_by_the_next_extender_and_by_the_one_beside(client: Client) -> None:
    async with running(client) as (first, history_store):
        first.preempted(gone("a", 1).build())
        await comes_to(history_store, lambda: len(history_store._cache) == 1)
        async with running(client) as (beside, other):
            first.preempted(gone("a", 2).build())
            await comes_to(other, lambda: beside.protected(pod("a").build(), lambda _: 1))
            # what it adds removes nothing
            beside.preempted(gone("b", 1).build())
            beside.preempted(gone("b", 2).build())
            await comes_to(history_store, lambda: first.protected(pod("b").build(), lambda _: 1))
    async with running(client) as (after, _):
        assert after.protected(pod("a").build(), lambda _: 1)
        assert after.protected(pod("b").build(), lambda _: 1)
        assert not after.protected(pod("c").build(), lambda _: 1)


async def test_a_damaged_history_is_reported_and_written_anew(client: Client, apiserver: ApiServer) -> None:
    apiserver("POST", PATH, {"metadata": {"name": "tangram-scheduler-preempted"}, "data": {KEY: "{", "other": "x"}})
    with structlog.testing.capture_logs() as logs:
        async with running(client) as (history, history_store):
            history.preempted(gone("a", 1).build())
            await comes_to(
                history_store, lambda: any("uid-a-1" in (one.data or {})[KEY] for one in history_store._cache.items())
            )
    (warning,) = [one for one in logs if one["log_level"] == "warning"]
    assert warning["config_map"] == WHERE
    assert apiserver("GET", f"{PATH}/tangram-scheduler-preempted")["data"]["other"] == "x"
