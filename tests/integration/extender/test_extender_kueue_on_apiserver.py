"""Kueue's Workloads on a real API server: their metadata alone are sent, and the Job of a JobSet is read as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from kube.client import METADATA, METADATA_LIST
from tests.apiserver import MERGE, ApiServer
from tests.builders import node, pod
from tests.fake_api import Handler
from tests.integration.extender.harness import PATIENCE_S, Extender, ExtenderOnApiServer, allocated_pods

FULL_MIB = 81_920
HALF_MIB = FULL_MIB // 2
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
NAMESPACE = "/namespaces/default"
WORKLOADS = f"/apis/kueue.x-k8s.io/v1beta2{NAMESPACE}/workloads"


def definition(group: str, plural: str, kind: str, version: str) -> dict[str, Any]:
    """A custom resource that takes any object."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.fixture(scope="module")
def kueue(apiserver: ApiServer) -> Iterator[None]:
    """Workloads and JobSets, by group and names those of Kueue 0.19 and JobSet."""
    for name, value in (("low", 1), ("mid", 10), ("high", 1000)):
        apiserver("POST", CLASSES, {"metadata": {"name": name}, "value": value})
    made = [
        definition("kueue.x-k8s.io", "workloads", "Workload", "v1beta2"),
        definition("jobset.x-k8s.io", "jobsets", "JobSet", "v1alpha2"),
    ]
    for one in made:
        apiserver("POST", DEFINITIONS, one)
    yield
    for one in made:
        apiserver("DELETE", f"{DEFINITIONS}/{one['metadata']['name']}")
    for name in ("low", "mid", "high"):
        apiserver("DELETE", f"{CLASSES}/{name}")


async def make(cluster: ExtenderOnApiServer, path: str, thing: dict[str, Any]) -> dict[str, Any]:
    """Once the API server serves the resource."""
    async with asyncio.timeout(PATIENCE_S):
        while cluster.api.http.get(path).status_code == 404:  # noqa: ASYNC110 - no event shows it
            await asyncio.sleep(0.05)
    made: dict[str, Any] = cluster.api("POST", path, thing)
    return made


def owned_by(thing: dict[str, Any], *, controller: bool = True) -> list[dict[str, Any]]:
    found = {"apiVersion": thing["apiVersion"], "kind": thing["kind"], "name": thing["metadata"]["name"]}
    return [found | {"uid": thing["metadata"]["uid"], "controller": controller}]


async def place(
    cluster: ExtenderOnApiServer, extender: Extender, name: str, service_class: str, of: dict[str, Any], at: str = "n1"
) -> dict[str, Any]:
    plain = pod(name).asking(mib=HALF_MIB + 1024).plain()
    plain["spec"]["priorityClassName"] = service_class
    plain["metadata"] = {"name": name, "ownerReferences": owned_by(of)}
    del plain["status"]
    made: dict[str, Any] = cluster.api("POST", f"/api/v1{NAMESPACE}/pods", plain)
    assert (await extender.filter(made, at))["NodeNames"] == [at]
    assert await extender.bind(made, at) == ""
    return made


@dataclass
class Jobs:
    """A JobSet with a Workload and a Job, and a Job without an owner."""

    of_set: dict[str, Any]
    plain: dict[str, Any]
    workload: dict[str, Any]


@pytest.fixture
async def jobs(cluster: ExtenderOnApiServer, kueue: None) -> AsyncIterator[Jobs]:
    sets, path = f"/apis/jobset.x-k8s.io/v1alpha2{NAMESPACE}/jobsets", f"/apis/batch/v1{NAMESPACE}/jobs"
    job_set = await make(
        cluster, sets, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "set"}}
    )
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "busybox"}]}}
    of_set, plain = (
        cluster.api("POST", path, {
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "ownerReferences": owners},
            "spec": {"template": template},
        })
        for name, owners in (("of-set", owned_by(job_set)), ("plain", []))
    )  # fmt: skip
    workload = {
        "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
        "metadata": {"name": "w", "ownerReferences": owned_by(job_set)}, "spec": {"active": True},
    }  # fmt: skip
    yield Jobs(of_set, plain, await make(cluster, WORKLOADS, workload))
    for name in ("of-set", "plain"):
        cluster.api("DELETE", f"{path}/{name}", {"propagationPolicy": "Background"})
    cluster.api("DELETE", f"{WORKLOADS}/w")
    cluster.api("DELETE", f"{sets}/set")


def want(cluster: ExtenderOnApiServer) -> dict[str, Any]:
    """A pod of high priority that needs a GPU."""
    plain = pod("urgent").asking(mib=FULL_MIB).plain()
    plain["spec"]["priorityClassName"] = "high"
    plain["metadata"] = {"name": "urgent"}
    made: dict[str, Any] = cluster.api("POST", f"/api/v1{NAMESPACE}/pods", plain)
    return made


async def test_the_pod_of_a_job_set_stays_and_one_of_higher_priority_goes(
    cluster: ExtenderOnApiServer, jobs: Jobs
) -> None:
    accepted: dict[str, set[str]] = {}

    def note(request: web.Request, _: Handler) -> Awaitable[web.StreamResponse] | None:
        accepted.setdefault(request.path, set()).add(request.headers["Accept"])

    cluster.proxy.faults.append(note)
    cluster.add(node("n1").with_gpus(2))
    extender = await cluster.extender("--kueue", "true")
    queued = await place(cluster, extender, "queued", "low", jobs.of_set)
    single = await place(cluster, extender, "single", "mid", jobs.plain)
    await extender.comes_to(lambda known: set(allocated_pods(known).values()) == {"seen bound"})
    urgent = want(cluster)
    async with asyncio.timeout(PATIENCE_S):
        while "deletionTimestamp" not in cluster.get(single)["metadata"]:
            assert "deletionTimestamp" not in cluster.get(queued)["metadata"]
            assert (await extender.filter(urgent, "n1"))["NodeNames"] == []
            await asyncio.sleep(0.2)  # as often as a scheduler might call again
    assert "deletionTimestamp" not in cluster.get(queued)["metadata"], "though its priority is lower"
    assert accepted[f"/apis/batch/v1{NAMESPACE}/jobs/of-set"] == {METADATA}
    assert accepted["/apis/kueue.x-k8s.io/v1beta2/workloads"] == {METADATA, METADATA_LIST}
    assert 'tangram_extender_cache_synced{cache="workloads"} 1.0' in await extender.metrics()


async def test_a_workload_is_deactivated_and_its_pods_are_left_to_kueue(
    cluster: ExtenderOnApiServer, jobs: Jobs
) -> None:
    for name, gpus in (("n1", 2), ("n2", 1)):
        cluster.add(node(name).with_gpus(gpus))
    extender = await cluster.extender("--kueue", "true", "--kueue-evict", "whole")
    here = await place(cluster, extender, "here", "low", jobs.of_set)
    elsewhere = await place(cluster, extender, "elsewhere", "low", jobs.of_set, "n2")
    stays = await place(cluster, extender, "stays", "high", jobs.plain)
    await extender.comes_to(lambda known: set(allocated_pods(known).values()) == {"seen bound"})
    urgent = want(cluster)
    async with asyncio.timeout(PATIENCE_S):
        while cluster.api("GET", f"{WORKLOADS}/w")["spec"]["active"]:
            assert (await extender.filter(urgent, "n1"))["NodeNames"] == []
            await asyncio.sleep(0.2)  # as often as a scheduler might call again
    assert [one for one in (here, elsewhere, stays) if "deletionTimestamp" in cluster.get(one)["metadata"]] == []
    assert cluster.get(urgent)["status"]["nominatedNodeName"] == "n1"
    for one in (here, elsewhere):
        cluster.delete(one)
    await extender.comes_to(lambda known: allocated_pods(known) == {"stays": "seen bound", "urgent": "kept"})
    assert (await extender.filter(urgent, "n1"))["NodeNames"] == ["n1"]


async def test_a_workload_that_was_made_anew_under_its_name_is_left(cluster: ExtenderOnApiServer, jobs: Jobs) -> None:
    change = {"metadata": {"uid": "another"}, "spec": {"active": False}}
    answer = cluster.api.http.patch(f"{WORKLOADS}/w", json=change, headers={"Content-Type": MERGE})
    assert answer.status_code == 422
    assert cluster.api("GET", f"{WORKLOADS}/w")["spec"]["active"]
