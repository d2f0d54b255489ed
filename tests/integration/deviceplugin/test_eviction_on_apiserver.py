"""Stranded pods are evicted by a real kube-apiserver: a disruption budget refuses, and allows it later. The pod is never deleted around it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from deviceplugin.pods.eviction import Evictor
from deviceplugin.pods.removal import ATTEMPTS
from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, KUBERNETES
from kube.client import connect
from kube.objects import Pod
from tests.apiserver import ApiServer, running

PODS = "/api/v1/namespaces/default/pods"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
NOW = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """kube-apiserver and etcd. Built when the cache lacks them."""
    programs = build(cache_folder(), [KUBERNETES, ETCD], Steps())
    with running(programs, tmp_path_factory.mktemp("apiserver")) as server:
        yield server


class Stranding:
    """A running pod in the API server, which the device plugin is to evict. Waits of the back-off end when the test says so."""

    def __init__(self, api: ApiServer, name: str) -> None:
        self.api, self.name = api, name
        meta = {"name": name, "labels": {"app": name}}
        spec = {"nodeName": "n1", "containers": [{"name": "main", "image": "none"}]}
        self.made: dict[str, Any] = api(
            "POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        )
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        api.patch(f"{PODS}/{name}/status", {"status": status})
        self.refusals: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.again = asyncio.Semaphore(0)
        self.ends: list[tuple[str, bool]] = []
        self.wanted = True

    @property
    def pod(self) -> Pod:
        return msgspec.convert(self.made, Pod)

    def still_wanted(self, pod: Pod) -> bool:
        return self.wanted and pod.uid == self.made["metadata"]["uid"]

    def eviction_refused(self, pod: Pod, message: str, *, again: bool) -> None:
        assert pod.metadata.name == self.name
        self.refusals.put_nowait((message, again))

    def count(self, reason: str, done: bool) -> None:
        self.ends.append((reason, done))

    async def wait(self, seconds: float) -> None:
        assert seconds > 0
        await self.again.acquire()

    def budget(self, name: str, allowed: int) -> None:
        """As the disruption controller, which does not run here, would write it."""
        path = f"{BUDGETS}/{name}"
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": self.name}}}
        if name not in {one["metadata"]["name"] for one in self.api("GET", BUDGETS)["items"]}:
            budget = {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": name},
                "spec": spec,
            }
            self.api("POST", BUDGETS, budget)
        status = {
            "observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": 1 + allowed, "desiredHealthy": 1,
            "expectedPods": 1 + allowed,
        }  # fmt: skip
        self.api.patch(f"{path}/status", {"status": status})

    @property
    def leaving(self) -> bool:
        return "deletionTimestamp" in self.api("GET", f"{PODS}/{self.name}")["metadata"]

    def conditions(self) -> list[str]:
        return [one.get("reason", "") for one in self.api("GET", f"{PODS}/{self.name}")["status"].get("conditions", ())]


@pytest.fixture
def stranding(api: ApiServer, request: pytest.FixtureRequest) -> Iterator[Stranding]:
    name = request.node.name.replace("_", "-")[:40].rstrip("-")
    yield Stranding(api, name)
    for budget in api("GET", BUDGETS)["items"]:
        api("DELETE", f"{BUDGETS}/{budget['metadata']['name']}")
    for one in api("GET", PODS)["items"]:
        api("DELETE", f"{PODS}/{one['metadata']['name']}", NOW)


async def test_a_budget_refuses_and_later_allows(api: ApiServer, stranding: Stranding) -> None:
    stranding.budget("keeps", 0)
    async with connect(str(api.kubeconfig)) as client:
        evictor = Evictor(client, stranding, stranding.count, sleep=stranding.wait)
        assert evictor.evict(stranding.pod, "stranded")
        for _ in range(3):
            message, again = await asyncio.wait_for(stranding.refusals.get(), 30)
            assert "disruption budget" in message
            assert again
            assert not stranding.leaving
            stranding.again.release()
        await asyncio.wait_for(stranding.refusals.get(), 30)
        stranding.budget("keeps", 1)
        stranding.again.release()
        await asyncio.wait_for(evictor.settled(), 30)
    assert stranding.leaving
    assert "EvictionByEvictionAPI" in stranding.conditions(), "by an eviction, not by a deletion"
    assert stranding.ends == [("stranded", True)]


async def test_memory_that_came_back_meanwhile_ends_the_eviction(api: ApiServer, stranding: Stranding) -> None:
    stranding.budget("keeps", 0)
    async with connect(str(api.kubeconfig)) as client:
        evictor = Evictor(client, stranding, stranding.count, sleep=stranding.wait)
        evictor.evict(stranding.pod, "stranded")
        await asyncio.wait_for(stranding.refusals.get(), 30)
        stranding.wanted = False
        stranding.budget("keeps", 1)
        stranding.again.release()
        await asyncio.wait_for(evictor.settled(), 30)
    assert not stranding.leaving
    assert stranding.ends == []


async def test_two_budgets_are_reported_and_waited_for(api: ApiServer, stranding: Stranding) -> None:
    """The API server evicts no pod that two budgets protect: status 500, which is also its answer when it fails."""
    stranding.budget("one", 1)
    stranding.budget("two", 1)
    stranding.again = asyncio.Semaphore(ATTEMPTS - 1)
    async with connect(str(api.kubeconfig)) as client:
        evictor = Evictor(client, stranding, stranding.count, sleep=stranding.wait)
        evictor.evict(stranding.pod, "stranded")
        message, again = await asyncio.wait_for(stranding.refusals.get(), 60)
        assert "more than one PodDisruptionBudget" in message
        assert again
        assert not stranding.leaving
        assert stranding.ends == [("stranded", False)]
        api("DELETE", f"{BUDGETS}/two")
        stranding.again.release()
        await asyncio.wait_for(evictor.settled(), 30)
    assert stranding.leaving
    assert stranding.ends == [("stranded", False), ("stranded", True)]


async def test_a_pod_that_has_the_name_of_one_that_is_gone_stays(api: ApiServer, stranding: Stranding) -> None:
    former = stranding.pod
    api("DELETE", f"{PODS}/{stranding.name}", NOW)
    other = Stranding(api, stranding.name)
    async with connect(str(api.kubeconfig)) as client:
        evictor = Evictor(client, stranding, stranding.count, sleep=stranding.wait)
        evictor.evict(former, "stranded")
        await asyncio.wait_for(evictor.settled(), 30)
    assert not other.leaving
    assert stranding.ends == [("stranded", True)], "it is gone"
