"""What the device plugin may do with pods, said by a real API server: delete those with GPUs of its own node, and write their conditions."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.apiserver import ApiServer, Denied
from tests.contract.chart.policy_kit import (
    INIT_SHARE,
    OURS,
    PLUGIN,
    PODS,
    SCHEDULER,
    SHARE,
    bind,
    container,
    pod,
    refused,
    status_patch,
)
from tests.contract.chart.rendering import Helm, env
from vgpu.api.names import DEFAULT


@pytest.mark.parametrize(
    ("containers", "spec"),
    [([container(limits=SHARE)], {}), ([container(limits={"tangram.sh/gpu": "1"})], {}), ([container()], INIT_SHARE)],
    ids=["share", "whole GPU", "init container"],
)
def test_the_plugin_deletes_pods_with_gpus_on_its_own_node(
    policies: ApiServer, containers: list[dict[str, Any]], spec: dict[str, Any]
) -> None:
    name = pod(policies, *containers, **spec)
    bind(policies, name, OURS, SCHEDULER)
    for elsewhere in ("elsewhere", ""):
        message = refused(lambda at=elsewhere: policies("DELETE", f"{PODS}/{name}", user=PLUGIN, node=at))
        assert f'on node "{elsewhere}" may not delete pod default/{name} of node "somewhere"' in message
    policies("DELETE", f"{PODS}/{name}", user=PLUGIN, node="somewhere")


def test_the_plugin_deletes_no_pod_without_gpus_and_none_that_is_bound_nowhere(policies: ApiServer) -> None:
    plain, unbound = pod(policies), pod(policies, container(limits=SHARE))
    bind(policies, plain, {}, SCHEDULER)
    message = refused(lambda: policies("DELETE", f"{PODS}/{plain}", user=PLUGIN, node="somewhere"))
    assert f"may not delete pod default/{plain}: it must be one that requests GPUs of tangram.sh" in message
    for caller in ("somewhere", ""):
        refused(lambda at=caller: policies("DELETE", f"{PODS}/{unbound}", user=PLUGIN, node=at))
    for name in (plain, unbound):
        policies("DELETE", f"{PODS}/{name}", user="jane")


def test_a_pod_that_took_the_name_of_a_deleted_one_is_not_deleted(policies: ApiServer) -> None:
    name = pod(policies, container(limits=SHARE))
    bind(policies, name, OURS, SCHEDULER)
    former = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "of-the-former"}}
    with pytest.raises(Denied, match="UID in the precondition"):
        policies("DELETE", f"{PODS}/{name}", former, user=PLUGIN, node="somewhere")
    assert policies("GET", f"{PODS}/{name}")


def condition(kind: str, status: str = "True") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "MemoryStranded", "message": "no room"}


def with_gpu_on(api: ApiServer, where: str) -> str:
    """A pod whose status the kubelet has written."""
    name = pod(api, container(limits=SHARE))
    bind(api, name, OURS | {"tangram.sh/kept": "yes"}, SCHEDULER)
    ready = [{"type": "Ready", "status": "True"}]
    status_patch(api, name, f"system:node:{where}", conditions=ready, phase="Running", startTime="2026-01-01T00:00:00Z")
    return name


def test_the_plugin_writes_its_two_conditions_of_pods_with_gpus_on_its_node_and_clears_them(
    policies: ApiServer,
) -> None:
    name = with_gpu_on(policies, "somewhere")
    for status in ("True", "False"):
        both = [condition(kind, status) for kind in (DEFAULT.memory_stranded, DEFAULT.memory_over_limit)]
        found = status_patch(policies, name, PLUGIN, "somewhere", conditions=both)["status"]
        shown = {one["type"]: one["status"] for one in found["conditions"]}
        assert shown.pop("PodScheduled") == "True"
        assert shown == {"Ready": "True", DEFAULT.memory_stranded: status, DEFAULT.memory_over_limit: status}
        assert (found["phase"], found["startTime"]) == ("Running", "2026-01-01T00:00:00Z")


@pytest.mark.parametrize(
    "change",
    [
        {"conditions": [condition("Ready", "False")]},
        {"conditions": [condition("tangram.sh/Other")]},
        {"conditions": [condition(DEFAULT.memory_stranded), condition("example.com/Other")]},
        {"phase": "Failed"},
        {"startTime": None},
        {"startTime": "2026-02-01T00:00:00Z"},
        {"reason": "Evicted"},
        {"containerStatuses": [{"name": "main", "ready": True, "restartCount": 0, "image": "a", "imageID": "b"}]},
        {"observedGeneration": 7},
    ],
    ids=lambda change: "-".join(change),
)
def test_the_plugin_writes_nothing_else_of_a_status(policies: ApiServer, change: dict[str, Any]) -> None:
    name = with_gpu_on(policies, "somewhere")
    message = refused(lambda: status_patch(policies, name, PLUGIN, "somewhere", **change))
    assert f"nothing of the status of pod default/{name} but the conditions {DEFAULT.memory_stranded} and " in message


@pytest.mark.parametrize(
    "metadata",
    [{"annotations": {"a": "b"}}, {"labels": {"a": "b"}}, {"finalizers": ["example.com/a"]}],
    ids=lambda metadata: next(iter(metadata)),
)
def test_the_plugin_writes_no_metadata_with_a_status(policies: ApiServer, metadata: dict[str, Any]) -> None:
    name = with_gpu_on(policies, "somewhere")
    path, change = f"{PODS}/{name}/status", {"metadata": metadata}
    before = policies("GET", f"{PODS}/{name}")["metadata"]
    with contextlib.suppress(Denied):
        policies.patch(path, change, user=PLUGIN, node="somewhere")
    after = policies("GET", f"{PODS}/{name}")["metadata"]
    (key,) = metadata
    assert after.get(key) == before.get(key)


def test_the_plugin_writes_no_condition_of_a_pod_of_another_node_or_without_gpus(policies: ApiServer) -> None:
    name, plain = with_gpu_on(policies, "somewhere"), pod(policies)
    bind(policies, plain, {}, SCHEDULER)
    mine = [condition(DEFAULT.memory_stranded)]
    for elsewhere in ("elsewhere", ""):
        message = refused(lambda at=elsewhere: status_patch(policies, name, PLUGIN, at, conditions=mine))
        assert f'on node "{elsewhere}" may not write conditions of pod default/{name} of node "somewhere"' in message
    refused(lambda: status_patch(policies, plain, PLUGIN, "somewhere", conditions=mine))
    status_patch(policies, plain, "jane", conditions=mine)


def test_the_right_to_write_conditions_comes_with_bursts_and_the_policy_alone(helm: Helm) -> None:
    for bursts in (True, False):
        for enabled in (True, False):
            values = {"policy": {"enabled": enabled}, "burst": {"enabled": bursts, "stranded": "keep"}}
            objects = helm.objects(values)
            rules = objects.one("ClusterRole", "tangram-node")["rules"]
            given = any("pods/status" in rule["resources"] for rule in rules)
            there = "tangram-conditions" in objects.of("ValidatingAdmissionPolicy")
            setting = env(objects.container("plugin"))["TANGRAM_DEVICEPLUGIN_POD_CONDITIONS"]
            assert (given, there, setting) == (bursts and enabled, bursts and enabled, str(bursts and enabled).lower())


def test_a_token_bound_to_one_node_deletes_no_pod_of_another(policies: ApiServer, token: str) -> None:
    """No impersonation: the claim is the API server's own, the rights are the chart's."""
    here, there = (pod(policies, container(limits=SHARE), nodeName=where) for where in ("node-a", "node-b"))
    message = refused(lambda: policies("DELETE", f"{PODS}/{there}", token=token))
    assert f'on node "node-a" may not delete pod default/{there} of node "node-b"' in message
    with pytest.raises(Denied, match="cannot create resource"):
        policies("POST", f"{PODS}/{here}/eviction", {"apiVersion": "policy/v1", "kind": "Eviction"}, token=token)
    with pytest.raises(Denied, match="cannot deletecollection"):
        policies("DELETE", PODS, token=token)
    policies("DELETE", f"{PODS}/{here}", token=token)
