"""Placeholders for autoscalers: off by default, and the scheduler's account can create and delete nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.apiserver import ApiServer
from tests.contract.chart.policy_kit import POLICIES, refused
from tests.contract.chart.rendering import NAMESPACE, ROOT, Helm, Refused

PLACEHOLDERS: dict[str, Any] = {"autoscaling": {"placeholders": {"enabled": True, "max": 3, "timeout": "10m"}}}
SCHEDULER = f"system:serviceaccount:{NAMESPACE}:tangram-scheduler"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
numbers = count()


def test_by_default_there_is_nothing_of_placeholders(helm: Helm) -> None:
    found = helm.objects({})
    assert not [
        name
        for kind in ("ResourceQuota", "ConfigMap", "PriorityClass")
        for name in found.of(kind)
        if "placeholder" in name
    ]
    assert all(rule["resources"] != ["pods"] for rule in found.one("Role", "tangram-scheduler")["rules"])


def test_with_the_value_there_are_as_many_as_it_says(helm: Helm) -> None:
    found = helm.objects(PLACEHOLDERS)
    assert found.one("ResourceQuota", "tangram-scheduler-placeholders")["spec"]["hard"] == {"pods": "3"}
    assert -10 <= found.one("PriorityClass", "tangram-placeholder")["value"] < 0
    extender = found.one("Deployment", "tangram-scheduler")["spec"]["template"]["spec"]["initContainers"][0]
    env = {one["name"]: one["value"] for one in extender["env"]}
    assert env["TANGRAM_EXTENDER_PLACEHOLDER_TIMEOUT_S"] == "600"
    assert env["TANGRAM_EXTENDER_PLACEHOLDER_CONFIG_MAP"] == f"{NAMESPACE}/tangram-scheduler-placeholders"
    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete"]} in found.one(
        "Role", "tangram-scheduler"
    )["rules"]


def test_without_the_policy_there_are_none(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"autoscaling\.placeholders\.enabled is true with policy\.enabled=false"):
        helm.objects(PLACEHOLDERS | {"policy": {"enabled": False}})


@pytest.fixture(scope="module")
def narrowed(helm: Helm, policies: ApiServer) -> Iterator[ApiServer]:
    """The API server with the policy of placeholders in force."""
    found = helm.objects(PLACEHOLDERS)
    names = policies("GET", "/api/v1/namespaces")["items"]
    if NAMESPACE not in {one["metadata"]["name"] for one in names}:
        policies(
            "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        )
    bindings = POLICIES.replace("policies", "policybindings")
    policies.apply(found.one("PriorityClass", "tangram-placeholder"), "/apis/scheduling.k8s.io/v1/priorityclasses")
    policies.apply(found.one("ValidatingAdmissionPolicy", "tangram-placeholders"), POLICIES)
    policies.apply(found.one("ValidatingAdmissionPolicyBinding", "tangram-placeholders"), bindings)
    refused(lambda: [created(policies) for _ in range(2000)])  # it reaches admission by a watch
    yield policies
    for path in (POLICIES, bindings):
        policies("DELETE", f"{path}/tangram-placeholders")


def body(**spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(json.loads((ROOT / "hack/autoscalers/testdata/placeholder.json").read_text()))
    made["metadata"]["name"] = f"placeholder-{next(numbers)}"
    del made["metadata"]["ownerReferences"]
    made["spec"] |= spec
    return made


def created(api: ApiServer) -> None:
    """Not a placeholder, by the scheduler."""
    made = body()
    del made["metadata"]["labels"]
    api("POST", PODS, made, user=SCHEDULER)


def test_the_scheduler_creates_and_deletes_placeholders_alone(narrowed: ApiServer) -> None:
    one = body()
    other = body()
    del other["metadata"]["labels"]
    message = refused(lambda: created(narrowed))
    assert "may create and delete no pod but placeholders" in message
    narrowed("POST", PODS, one, user=SCHEDULER)
    narrowed("DELETE", f"{PODS}/{one['metadata']['name']}", user=SCHEDULER)
    narrowed("POST", PODS, other)
    refused(lambda: narrowed("DELETE", f"{PODS}/{other['metadata']['name']}", user=SCHEDULER))


@pytest.mark.parametrize(
    "spec",
    [
        {"hostPID": True},
        {"serviceAccountName": "tangram-node"},
        {"automountServiceAccountToken": True},
        {"priorityClassName": ""},
        {"schedulerName": "default-scheduler"},
        {"nodeName": "n1"},
        {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]},
        {"containers": [{"name": "placeholder", "image": "other"}]},
    ],
    ids=["host", "account", "token", "class", "scheduler", "bound", "volume", "image"],
)
def test_a_placeholder_has_no_rights(narrowed: ApiServer, spec: dict[str, Any]) -> None:
    refused(lambda: narrowed("POST", PODS, body(**spec), user=SCHEDULER))
