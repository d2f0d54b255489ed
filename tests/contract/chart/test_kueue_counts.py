"""What Kueue counts for an object is what the pods of it request of Tangram; and the policies do not hinder Kueue's own changes.

Kueue is a double, written from its source (kueue_double.py). The API server is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.apiserver import ApiServer
from tests.contract.chart.kueue_double import GATE, Kueue, gated, pod_sets, pod_total, suspended, total
from tests.contract.chart.rendering import ROOT, Helm
from tests.contract.chart.templates_kit import (
    GPU_MEM,
    JOB,
    KINDS,
    QUEUE,
    Counted,
    container,
    create,
    in_force,
    pod_template,
    thing,
)
from tests.contract.webhook.pairs import applied
from vgpu.api.request import peak, pod_request
from webhook.admission_rules import AdmissionRules
from webhook.mutate import mutate

RULES = AdmissionRules()
TEMPLATE = pod_template(
    container("a", "8Gi"), container("b", "500Mi", "500Mi"), container("c"), init=(container("i", "20Gi"),)
)
"""An init container that is larger than the two others together: 20 units of a pod."""
FLAVOR = {"tangram.sh/gpu.model": "NVIDIA-H100-80GB-HBM3"}
EXAMPLE = ROOT / "examples/07-kueue"
each_kind = pytest.mark.parametrize("of", KINDS, ids=lambda of: of.kind)


@pytest.fixture(scope="module")
def normalising(kinds: ApiServer, helm: Helm) -> Iterator[ApiServer]:
    with in_force(kinds, helm):
        yield kinds


def pod_units(template: Any) -> int:
    """What a pod of a template requests of Tangram once the webhook has admitted it."""
    pod = applied(template, list(mutate(template, RULES).ops))
    return peak(pod_request(pod).containers, lambda request: request.units)


def several(made: dict[str, Any]) -> dict[str, Any]:
    """More than one pod of each set, where the kind says how many."""
    spec = made["spec"]
    match made["kind"]:
        case "Job":
            spec |= {"parallelism": 5, "completions": 3}
        case "JobSet":
            for job in spec["replicatedJobs"]:
                job["replicas"] = 2
                job["template"]["spec"] |= {"parallelism": 4}
        case "StatefulSet":
            spec["replicas"] = 3
        case "LeaderWorkerSet":
            spec["leaderWorkerTemplate"]["size"] = 4
        case kind if kind.startswith("Ray"):
            for group in spec.get("rayClusterSpec", spec.get("rayClusterConfig", spec))["workerGroupSpecs"]:
                group |= {"replicas": 3, "numOfHosts": 2}
        case _:
            for one in next(iter(spec.values())).values():
                one["replicas"] = 2
    return made


@each_kind
def test_kueue_counts_what_the_pods_request(normalising: ApiServer, of: Counted) -> None:
    stored = create(normalising, of, several(thing(of, TEMPLATE)))
    sets = list(pod_sets(stored))
    assert len(sets) == len(of.templates)
    assert {pod_units(template) for _, template in sets} == {20}
    assert total(stored)[GPU_MEM] == 20 * sum(count for count, _ in sets)
    assert sum(count for count, _ in sets) > 1


@each_kind
def test_without_the_policies_it_counts_bytes(normalising: ApiServer, of: Counted) -> None:
    stored = create(normalising, of, several(thing(of, TEMPLATE, queue="")))
    pods = sum(count for count, _ in pod_sets(stored))
    assert total(stored)[GPU_MEM] == 20 * 2**30 * pods


def queue(api: ApiServer, units: int = 40) -> Kueue:
    return Kueue(api, {GPU_MEM: units}, FLAVOR)


def submit(api: ApiServer, job: dict[str, Any]) -> str:
    """Its path. Policies come before webhooks, so Kueue's has nothing to do with what they change."""
    stored = create(api, JOB, suspended(job), dry=False)
    assert stored["spec"]["suspend"] == bool(job["metadata"]["labels"])
    return f"{JOB.path}/{stored['metadata']['name']}"


def test_a_job_is_suspended_counted_resumed_and_stopped(normalising: ApiServer) -> None:
    kueue = queue(normalising)
    first, second = (submit(normalising, thing(JOB, TEMPLATE)) for _ in range(2))
    third = submit(normalising, thing(JOB, TEMPLATE))
    assert [kueue.reconcile(path) for path in (first, second)] == ["", ""]
    assert kueue.reconcile(third) == f"insufficient quota for {GPU_MEM}: 40 + 20 > 40"
    running = normalising("GET", first)
    assert running["spec"]["suspend"] is False
    assert running["spec"]["template"]["spec"]["nodeSelector"] == FLAVOR
    assert kueue.reconcile(first) == ""
    kueue.preempt(first)
    assert kueue.reconcile(third) == ""
    assert "nodeSelector" not in normalising("GET", first)["spec"]["template"]["spec"]
    assert total(normalising("GET", first)) == total(running)
    discard(normalising, first, second, third)


def test_an_elastic_job_is_scaled_while_it_runs(normalising: ApiServer) -> None:
    kueue = queue(normalising, 80)
    job = thing(JOB, TEMPLATE)
    job["spec"] |= {"parallelism": 1, "completions": 100}
    job["metadata"]["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    path = submit(normalising, job)
    assert kueue.reconcile(path) == ""
    for pods in (3, 2):
        kueue.scale(path, pods)
        assert kueue.admitted[path] == {GPU_MEM: 20 * pods}
        assert kueue.reconcile(path) == ""
    discard(normalising, path)


def test_a_gated_pod_keeps_its_gate_and_is_counted_in_units() -> None:
    """Kueue's webhook and Tangram's may see a pod in either order. Kueue counts the pod that is stored."""
    pod = {"metadata": {"name": "p", "labels": {QUEUE: "team"}}, "spec": {"containers": [container("main", "7.5Gi")]}}

    def tangram(one: Any) -> Any:
        return applied(one, list(mutate(one, RULES).ops))

    either = [tangram(gated(pod)), gated(tangram(pod))]
    assert either[0] == either[1]
    assert either[0]["spec"]["schedulingGates"] == [{"name": GATE}]
    assert pod_total(either[0])[GPU_MEM] == 8


def test_the_example_is_admitted_as_its_page_says(normalising: ApiServer) -> None:
    objects = [one for file in sorted(EXAMPLE.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]
    quotas = {one["metadata"]["name"]: one for one in objects if one["kind"] == "ClusterQueue"}
    locals_ = {one["metadata"]["name"]: one["spec"]["clusterQueue"] for one in objects if one["kind"] == "LocalQueue"}
    flavors = {one["metadata"]["name"] for one in objects if one["kind"] == "ResourceFlavor"}
    assert {one["apiVersion"] for one in objects if "kueue" in one["apiVersion"]} == {"kueue.x-k8s.io/v1beta2"}
    assert len({one["spec"]["cohortName"] for one in quotas.values()}) == 1
    assert flavors == {
        of["name"] for one in quotas.values() for group in one["spec"]["resourceGroups"] for of in group["flavors"]
    }
    free = {name: first_flavor(one) for name, one in quotas.items()}
    used = dict.fromkeys(quotas, 0)
    for job in (one for one in objects if one["kind"] == "Job"):
        of = locals_[job["metadata"]["labels"][QUEUE]]
        stored = create(normalising, JOB, job)
        needs = total(stored)
        assert set(needs) <= set(free[of]) | {"cpu", "memory"}
        used[of] += needs[GPU_MEM]
    assert used == {"research": 80, "serving": 8}
    assert used["research"] == free["research"][GPU_MEM]
    assert used["serving"] * 3 <= free["serving"][GPU_MEM]


def first_flavor(cluster_queue: dict[str, Any]) -> dict[str, int]:
    """Quotas of the flavor that is tried first."""
    return {
        one["name"]: one["nominalQuota"]
        for one in cluster_queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    }


def discard(api: ApiServer, *paths: str) -> None:
    for path in paths:
        api("DELETE", path, {"propagationPolicy": "Background"})
