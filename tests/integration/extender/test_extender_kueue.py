"""Pods of Kueue's Workloads are not evicted alone: neither by kube-scheduler, which does what /preempt answers, nor by the extender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kube.paths import KUEUE, workloads
from tests.builders import owner, pod, workload
from tests.fake_api import FakeApi, answer_with
from tests.integration.extender.preempting import (
    FULL_MIB,
    HALF_MIB,
    bound,
    evict_at_once,
    preempt,
    two_nodes,
    uids,
    urgent,
)
from tests.integration.extender.scheduler import Scheduler, running

JOBS = "/apis/batch/v1/namespaces/default/jobs"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    evict_at_once(monkeypatch)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with two_nodes() as server:
        server.serve_kueue("v1beta1", "v1beta2")
        yield server


async def knows(scheduler: Scheduler, true: Callable[[Any], bool] = lambda known: known.has_synced) -> None:
    """Return when it has seen this of the Workloads. Another watch than that of pods reports them."""
    kueue_pods = scheduler.extender.preemption.kueue_pods
    assert kueue_pods is not None
    async with asyncio.timeout(10):
        while not true(kueue_pods.workloads):  # noqa: ASYNC110 - the cache that would show it is made once a version is known
            await asyncio.sleep(0.01)


def job(api: FakeApi, name: str, *owners: dict[str, Any]) -> None:
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "ownerReferences": list(owners)}
    api.documents[f"{JOBS}/{name}"] = {"kind": "Job", "metadata": meta, "spec": {"template": {}}}


async def test_of_two_pods_the_one_goes_that_is_part_of_nothing(api: FakeApi) -> None:
    api.put(workload("w", "uid-queued"))
    api.put(bound("q", "n1", 0, FULL_MIB).annotated(**{"class": "best-effort"}).controlled_by("Job", "queued").plain())
    api.put(bound("p", "n1", 1, FULL_MIB).controlled_by("Job", "plain").plain())
    job(api, "plain")
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        assert await preempt(scheduler, urgent(), n1=uids("q")) == {"n1": {"Pods": uids("p"), "NumPDBViolations": 0}}
        assert f"GET {JOBS}/plain" in api.requests
        assert f"GET {JOBS}/queued" not in api.requests, "its UID is enough"


async def test_without_the_setting_kueue_is_not_read_and_the_cheaper_pod_goes(api: FakeApi) -> None:
    api.put(workload("w", "uid-queued"))
    api.put(bound("q", "n1", 0, FULL_MIB).annotated(**{"class": "best-effort"}).controlled_by("Job", "queued").plain())
    api.put(bound("p", "n1", 1, FULL_MIB).plain())
    api.put(urgent().plain())
    async with running(api) as scheduler:
        assert await preempt(scheduler, urgent(), n1=uids("q")) == {"n1": {"Pods": uids("q"), "NumPDBViolations": 0}}
        assert not [one for one in api.requests if KUEUE in one]


async def test_the_job_of_a_job_set_is_part_of_its_workload(api: FakeApi) -> None:
    api.put(workload("w", "uid-set"))
    job(api, "j", owner("JobSet", "set", "jobset.x-k8s.io/v1alpha2"))
    api.put(bound("q", "n1", 0, FULL_MIB).controlled_by("Job", "j").plain())
    api.put(bound("high", "n1", 1, FULL_MIB).of_priority(2000).plain())
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        assert await preempt(scheduler, urgent(), n1=uids("q")) == {}
        assert f"GET {JOBS}/j" in api.requests


async def test_a_victim_without_a_gpu_that_is_part_of_a_whole_rules_its_node_out(api: FakeApi) -> None:
    api.put(workload("w", "uid-queued"))
    for at, name in (("n1", "cpu"), ("n2", "free")):
        built = pod(name).asking(cpu="1").on(at).with_phase("Running")
        api.put((built.controlled_by("Job", "queued") if name == "cpu" else built).plain())
        for row in (0, 1):
            api.put(bound(f"{name}-{row}", at, row, FULL_MIB).plain())
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        answer = await preempt(scheduler, urgent(), n1=uids("cpu", "cpu-0"), n2=uids("free", "free-0"))
        assert list(answer) == ["n2"]
        cpu_only = pod("cpu-only").asking(cpu="1").of_priority(1000)
        api.put(cpu_only.plain())
        assert list(await preempt(scheduler, cpu_only, n1=uids("cpu"), n2=uids("free"))) == ["n2"]


async def test_the_extenders_own_eviction_takes_the_pod_that_is_part_of_nothing(api: FakeApi) -> None:
    api.put(workload("w", "uid-queued"))
    api.put(bound("q", "n1", 0, HALF_MIB).controlled_by("Job", "queued").plain())
    api.put(bound("p", "n1", 1, HALF_MIB).of_priority(5).plain())
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        assert (await scheduler.filter(urgent(), "n1"))["NodeNames"] == []
        await scheduler.comes_true(lambda: bool(api.evictions))
        assert api.evictions == ["default/p"], "though its priority is higher"


async def test_a_victim_that_becomes_part_of_a_whole_before_it_goes_stays(api: FakeApi) -> None:
    api.put(bound("a", "n1", 0, HALF_MIB).of_priority(2000).plain())
    api.put(bound("b", "n1", 1, HALF_MIB).controlled_by("Job", "j").plain())
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        api.faults += [answer_with("POST", "/eviction", 429, "TooManyRequests") for _ in range(2)]
        assert (await scheduler.filter(urgent(), "n1"))["NodeNames"] == []
        await scheduler.comes_true(lambda: "uid-default-urgent" in scheduler.extender.preemption._evictor._plans)
        api.faults.extend(answer_with("POST", "/eviction", 429, "TooManyRequests") for _ in range(1000))
        api.put(workload("w", "uid-j"))
        await knows(scheduler, lambda known: "uid-j" in known.owners("default"))
        plans = scheduler.extender.preemption._evictor._plans
        async with asyncio.timeout(10):
            while plans:  # noqa: ASYNC110 - no event shows that a plan was given up
                await asyncio.sleep(0.01)
        api.faults.clear()
        assert (await scheduler.filter(urgent(), "n1"))["NodeNames"] == []
        assert api.evictions == []


async def test_an_eviction_goes_on_once_a_controller_that_was_forgotten_meanwhile_is_read_again(api: FakeApi) -> None:
    """Others may have been evicted for the same pod by then."""
    api.put(workload("w", "uid-other"))
    api.put(bound("a", "n1", 0, HALF_MIB).of_priority(2000).plain())
    api.put(bound("b", "n1", 1, HALF_MIB).controlled_by("Job", "j").plain())
    job(api, "j")
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        preemption = scheduler.extender.preemption
        assert preemption.kueue_pods is not None
        api.faults.extend(answer_with("POST", "/eviction", 429, "TooManyRequests") for _ in range(1000))
        assert (await scheduler.filter(urgent(), "n1"))["NodeNames"] == []
        await scheduler.comes_true(lambda: "uid-default-urgent" in preemption._evictor._plans)
        preemption.kueue_pods.controllers._known.clear()
        async with asyncio.timeout(10):
            while not preemption.kueue_pods.controllers._known:  # noqa: ASYNC110 - no event shows that it was read
                await asyncio.sleep(0.01)
        api.faults.clear()
        await scheduler.comes_true(lambda: bool(api.evictions))
        assert api.evictions == ["default/b"]


async def test_a_workload_that_cannot_be_decoded_keeps_the_pods_of_its_namespace_until_it_can(api: FakeApi) -> None:
    broken = workload("w", "uid-other")
    api.put(broken | {"metadata": broken["metadata"] | {"ownerReferences": "garbage"}})
    api.put(bound("a", "n1", 0, HALF_MIB).of_priority(2000).plain())
    api.put(bound("b", "n1", 1, HALF_MIB).plain())
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        in_vain = scheduler.extender.preemption._evictor._in_vain
        assert (await scheduler.filter(urgent(), "n1"))["NodeNames"] == []
        async with asyncio.timeout(10):
            while not in_vain:  # noqa: ASYNC110 - no event shows that no pod was found
                await asyncio.sleep(0.01)
        api.put(broken)
        async with asyncio.timeout(10):
            while in_vain:  # noqa: ASYNC110 - nor that it is to be tried again
                await asyncio.sleep(0.01)
        assert api.evictions == []
        assert (await scheduler.filter(urgent(), "n1"))["NodeNames"] == []
        await scheduler.comes_true(lambda: bool(api.evictions))
        assert api.evictions == ["default/b"]


async def test_where_kueue_is_not_served_no_pod_is_evicted(api: FakeApi) -> None:
    del api.documents[KUEUE]
    api.put(bound("a", "n1", 0, FULL_MIB).plain())
    api.put(bound("b", "n1", 1, FULL_MIB).plain())
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        assert await preempt(scheduler, urgent(), n1=uids("a")) == {}
        metrics = (await scheduler.get("/metrics")).text
        assert 'tangram_extender_cache_synced{cache="workloads"} 0.0' in metrics


async def test_a_controller_that_cannot_be_read_keeps_its_pods(api: FakeApi) -> None:
    api.put(workload("w", "uid-queued"))
    api.put(bound("a", "n1", 0, FULL_MIB).controlled_by("Job", "gone").plain())
    api.put(bound("b", "n1", 1, FULL_MIB).controlled_by("Unheard", "of", "example.com/v1").plain())
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        assert await preempt(scheduler, urgent(), n1=uids("a")) == {}
        assert "tangram_extender_unread_controllers 1.0" in (await scheduler.get("/metrics")).text


async def test_a_release_that_serves_the_older_version_alone_is_read(api: FakeApi) -> None:
    api.serve_kueue("v1beta1")
    api.put(workload("w", "uid-queued") | {"apiVersion": "kueue.x-k8s.io/v1beta1"})
    api.put(bound("q", "n1", 0, FULL_MIB).controlled_by("Job", "queued").plain())
    api.put(bound("p", "n1", 1, FULL_MIB).of_priority(2000).plain())
    api.put(urgent().plain())
    async with running(api, kueue=True) as scheduler:
        await knows(scheduler)
        assert await preempt(scheduler, urgent(), n1=uids("q")) == {}
        assert f"GET {workloads('v1beta1')}" in api.requests
        assert f"GET {workloads('v1beta2')}" not in api.requests
