"""The device plugin's right to evict: only where stranded pods are evicted, and narrowed by a policy to pods with GPUs on its own node."""

from __future__ import annotations

from typing import Any

import pytest

from tests.apiserver import ApiServer, Denied
from tests.contract.chart.policy_kit import (
    INIT_SHARE,
    PLUGIN,
    PODS,
    SHARE,
    bound_until_seen,
    container,
    evict,
    pod,
    refused,
)
from tests.contract.chart.rendering import Helm, Refused

EVICTS: dict[str, Any] = {"burst": {"enabled": True}}


@pytest.mark.parametrize(
    ("containers", "spec"),
    [([container(limits=SHARE)], {}), ([container(limits={"tangram.sh/gpu": "1"})], {}), ([container()], INIT_SHARE)],
    ids=["share", "whole GPU", "init container"],
)
def test_the_plugin_evicts_pods_with_gpus_on_its_own_node(
    policies: ApiServer, containers: list[dict[str, Any]], spec: dict[str, Any]
) -> None:
    name = bound_until_seen(policies, *containers, **spec)
    for elsewhere in ("elsewhere", ""):
        message = refused(lambda at=elsewhere: evict(policies, name, user=PLUGIN, node=at))
        assert f'on node "{elsewhere}" may not evict pod default/{name} of node "somewhere"' in message
    evict(policies, name, user=PLUGIN, node="somewhere")
    assert "deletionTimestamp" in policies("GET", f"{PODS}/{name}")["metadata"]


def test_the_plugin_evicts_no_pod_without_gpus_and_none_that_is_bound_nowhere(policies: ApiServer) -> None:
    unbound, plain = pod(policies, container(limits=SHARE)), bound_until_seen(policies)
    message = refused(lambda: evict(policies, plain, user=PLUGIN, node="somewhere"))
    assert f"may not evict pod default/{plain}: it must be one that requests GPUs of tangram.sh" in message
    for caller in ("somewhere", ""):
        refused(lambda at=caller: evict(policies, unbound, user=PLUGIN, node=at))
    for name in (plain, unbound):
        evict(policies, name, user="jane")


def test_a_pod_in_another_namespace_is_not_taken_for_one_of_the_same_name(policies: ApiServer) -> None:
    name = bound_until_seen(policies, container(limits=SHARE))
    with pytest.raises(Denied):
        evict(policies, name, namespace="kube-public", user=PLUGIN, node="somewhere")
    assert "deletionTimestamp" not in policies("GET", f"{PODS}/{name}")["metadata"]


def rules(helm: Helm, values: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = helm.objects(values).one("ClusterRole", "tangram-node")["rules"]
    return [rule for rule in found if "pods/eviction" in rule.get("resources", ())]


def test_the_right_is_to_create_and_there_only_where_stranded_pods_are_evicted(helm: Helm) -> None:
    assert rules(helm, EVICTS) == [{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}]
    assert rules(helm, {}) == []
    assert rules(helm, {"burst": {"enabled": True, "stranded": "keep"}}) == []
    kept = helm.objects({"burst": {"enabled": True, "stranded": "keep"}, "policy": {"enabled": False}})
    assert "tangram-evictions" not in kept.of("ValidatingAdmissionPolicy")
    with pytest.raises(Refused, match=r"burst\.stranded is evict with policy\.enabled=false"):
        helm.objects(EVICTS | {"policy": {"enabled": False}})


def test_every_policy_is_in_force_once_and_only_the_one_of_evictions_has_parameters(helm: Helm) -> None:
    rendered = helm.objects(EVICTS)
    named, bindings = rendered.of("ValidatingAdmissionPolicy"), rendered.of("ValidatingAdmissionPolicyBinding")
    assert "tangram-evictions" in named
    assert {binding["spec"]["policyName"] for binding in bindings.values()} == set(named)
    assert [name for name, binding in bindings.items() if "paramRef" in binding["spec"]] == ["tangram-evictions"]
    assert bindings["tangram-evictions"]["spec"]["paramRef"] == {"selector": {}, "parameterNotFoundAction": "Deny"}


def test_the_right_and_its_policy_are_also_there_where_pods_leave_unhealthy_gpus(helm: Helm) -> None:
    leaves = {"node": {"unhealthyGpuPods": "evict-after: 5m"}}
    assert rules(helm, leaves) == [{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}]
    assert "tangram-evictions" in helm.objects(leaves).of("ValidatingAdmissionPolicy"), "only pods of the own node"
    assert rules(helm, {}) == []
    with pytest.raises(Refused, match=r"node\.unhealthyGpuPods is evict with policy\.enabled=false"):
        helm.objects({"node": {"unhealthyGpuPods": "evict"}, "policy": {"enabled": False}})
    with pytest.raises(Refused, match="unhealthyGpuPods"):
        helm.objects({"node": {"unhealthyGpuPods": "evict-after: soon"}})
