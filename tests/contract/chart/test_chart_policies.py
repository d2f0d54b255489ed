"""What the admission policies deny, said by a real API server.

The rows are the ways by which somebody could give a pod a GPU, or a node one that it has not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.apiserver import ApiServer, Denied
from tests.contract.chart.policy_kit import (
    BURSTS,
    CLEANUP,
    GPUS,
    INVENTORY,
    NODES,
    OURS,
    PLUGIN,
    PODS,
    SCHEDULER,
    SECRETS,
    SHARE,
    VISIBLE,
    WEBHOOK,
    bind,
    container,
    node,
    numbers,
    pod,
    refused,
    secret,
    status_patch,
    visible,
    visible_from,
)
from tests.contract.chart.rendering import EXAMPLES, NAMESPACE, Helm, Refused, env
from vgpu.api.names import DEFAULT


@pytest.mark.parametrize("key", OURS)
def test_no_user_creates_a_pod_with_a_decision_of_tangram_in_it(policies: ApiServer, key: str) -> None:
    for user in ("jane", SCHEDULER, PLUGIN):
        message = refused(lambda user=user: pod(policies, annotations={key: "GPU-1"}, user=user))
        assert key in message
        assert user in message


@pytest.mark.parametrize("sub", ["", "/status"])
@pytest.mark.parametrize("value", ["GPU-2", None])
@pytest.mark.parametrize("key", OURS)
def test_what_was_decided_is_neither_changed_nor_removed(
    policies: ApiServer, key: str, value: str | None, sub: str
) -> None:
    name = pod(policies, container(limits=SHARE))
    bind(policies, name, OURS, SCHEDULER)
    assert key in refused(lambda: policies.patch(f"{PODS}/{name}{sub}", {"metadata": {"annotations": {key: value}}}))
    assert policies("GET", f"{PODS}/{name}")["metadata"]["annotations"] == OURS


def test_a_bound_pod_changes_in_every_other_way_as_it_did(policies: ApiServer) -> None:
    name = pod(policies, container(limits=SHARE))
    bind(policies, name, OURS, SCHEDULER)
    policies.patch(
        f"{PODS}/{name}", {"metadata": {"annotations": {"tangram.sh/class": "standard"}, "labels": {"a": "b"}}}
    )
    policies.patch(f"{PODS}/{name}/status", {"status": {"message": "fine"}}, user="system:node:somewhere")


def test_only_our_scheduler_binds_with_an_assignment(policies: ApiServer) -> None:
    name = pod(policies, container(limits=SHARE))
    assert "system:kube-scheduler" in refused(lambda: bind(policies, name, OURS, "system:kube-scheduler"))
    bind(policies, name, OURS, SCHEDULER)
    bind(policies, pod(policies), {}, "system:kube-scheduler")


def test_the_old_way_of_binding_is_closed_too(policies: ApiServer) -> None:
    name = pod(policies)
    target = {"apiVersion": "v1", "kind": "Node", "name": "somewhere"}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "annotations": OURS}, "target": target}
    refused(lambda: policies("POST", "/api/v1/namespaces/default/bindings", body, user="jane"))


LONG = "a-container-with-a-name-so-long-that-its-annotation-is-hashed"


@pytest.mark.parametrize(
    "containers",
    [
        [container(limits=SHARE)],
        [container(limits=SHARE, **visible_from(GPUS))],
        [container(LONG, SHARE, **visible_from(DEFAULT.gpus_of(LONG)))],
        [container(limits=SHARE), container("beside", **visible("void"))],
        [container(limits=SHARE), container("beside", {"nvidia.com/gpu": "1"}, **visible("GPU-3"))],
        [container(**visible("all"))],
        [container(limits={"nvidia.com/gpu": "1"}, **visible("all"))],
    ],
    ids=["plain", "by our annotation", "by a hashed annotation", "void beside", "NVIDIA's own beside", "none of ours", "NVIDIA's own"],
)  # fmt: skip
def test_pods_that_take_only_what_they_are_given_come_in(policies: ApiServer, containers: list[dict[str, Any]]) -> None:
    pod(policies, *containers)


@pytest.mark.parametrize(
    ("containers", "culprit"),
    [
        ([container(limits=SHARE, **visible("all"))], "main"),
        ([container(limits={"tangram.sh/mig-1g.10gb": "1"}, **visible("0"))], "main"),
        ([container(limits=SHARE, **visible_from("tangram.sh/gpus.other"))], "main"),
        ([container(limits=SHARE, **visible_from("mine"))], "main"),
        ([container(LONG, SHARE, **visible_from("mine"))], LONG),
        ([container(LONG, SHARE, **visible_from("tangram.sh/gpus.other"))], LONG),
        ([container(limits=SHARE), container("beside", **visible("all"))], "beside"),
        ([container(limits=SHARE), container("beside", **visible_from("mine"))], "beside"),
    ],
    ids=[
        "all",
        "index",
        "another's",
        "own annotation",
        "own annotation, long",
        "another's, long",
        "all beside",
        "own annotation beside",
    ],
)
def test_a_pod_that_takes_gpus_by_the_variable_is_denied(
    policies: ApiServer, containers: list[dict[str, Any]], culprit: str
) -> None:
    message = refused(lambda: pod(policies, *containers))
    assert f"container {culprit} " in message
    assert VISIBLE in message


def test_an_init_container_is_a_container(policies: ApiServer) -> None:
    init = [container("init", SHARE, **visible("all"))]
    assert "container init " in refused(lambda: pod(policies, initContainers=init))


@pytest.mark.parametrize(
    ("runtime", "more", "comes_in"),
    [
        (None, {}, True), (None, visible("void"), True), (None, visible("all"), False),
        ("nvidia", visible("void"), True), ("nvidia", {}, False),
    ],
)  # fmt: skip
def test_an_ephemeral_container_gets_no_gpu(
    policies: ApiServer, runtime: str | None, more: dict[str, Any], *, comes_in: bool
) -> None:
    spec = {"runtimeClassName": runtime} if runtime else {}
    name = pod(policies, container(limits=SHARE), **spec)
    debug = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "none", **more}]}}

    def act() -> None:
        policies.patch(f"{PODS}/{name}/ephemeralcontainers", debug, user="jane")

    act() if comes_in else refused(act)


@pytest.mark.parametrize("key", [INVENTORY, BURSTS])
def test_only_the_plugin_of_a_node_writes_its_annotations(policies: ApiServer, key: str) -> None:
    name = f"own-{next(numbers)}"
    node(policies, name)
    change = {"metadata": {"annotations": {key: "{}"}}}
    for user, bound in (("jane", ""), (f"system:node:{name}", ""), (SCHEDULER, name), (PLUGIN, "other"), (PLUGIN, "")):
        assert f"node {name}" in refused(
            lambda who=(user, bound): policies.patch(f"{NODES}/{name}", change, user=who[0], node=who[1])
        )
        refused(lambda who=(user, bound): policies.patch(f"{NODES}/{name}/status", change, user=who[0], node=who[1]))
    policies.patch(f"{NODES}/{name}", change, user=PLUGIN, node=name)
    gone = {"metadata": {"annotations": {key: None}}}
    assert key in refused(lambda: policies.patch(f"{NODES}/{name}", gone, user="jane"))
    policies.patch(f"{NODES}/{name}", {"metadata": {"labels": {"a": "b"}}}, user="jane")
    policies.patch(f"{NODES}/{name}", gone, user=CLEANUP)


@pytest.mark.parametrize("key", [INVENTORY, BURSTS])
def test_a_node_is_not_created_with_an_annotation_of_the_plugin(policies: ApiServer, key: str) -> None:
    refused(lambda: node(policies, "rich", **{key: "{}"}))


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"unschedulable": True}},
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"annotations": {"kept": None}}},
        {"metadata": {"finalizers": ["a.example/b"]}},
    ],
    ids=["spec", "label", "annotation", "annotation removed", "finalizer"],
)
def test_the_plugin_changes_nothing_else_of_its_node(policies: ApiServer, change: dict[str, Any]) -> None:
    name = f"node-{next(numbers)}"
    node(policies, name, kept="yes")
    message = refused(lambda: policies.patch(f"{NODES}/{name}", change, user=PLUGIN, node=name))
    assert f"nothing of node {name} but its annotations {INVENTORY} and {BURSTS}" in message


INIT_SHARE = {"initContainers": [container("init", SHARE)]}


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


@pytest.fixture
def token(helm: Helm, policies: ApiServer) -> Iterator[str]:
    """Of the device plugin's account with the rights that the chart gives it, bound to a pod on node-a."""
    rbac, accounts = "/apis/rbac.authorization.k8s.io/v1", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    places = {
        "ServiceAccount": accounts,
        "ClusterRole": f"{rbac}/clusterroles",
        "ClusterRoleBinding": f"{rbac}/clusterrolebindings",
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    policies.apply(namespace, "/api/v1/namespaces")
    rendered = helm.objects()
    for kind, path in places.items():
        policies.apply(rendered.one(kind, "tangram-node"), path)
    for where in ("node-a", "node-b"):
        node(policies, where)
    name = pod(policies, namespace=NAMESPACE, serviceAccountName="tangram-node", nodeName="node-a")
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
    reference = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": policies("GET", path)["metadata"]["uid"]}
    wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": reference}}
    yield policies("POST", f"{accounts}/tangram-node/token", wanted)["status"]["token"]
    now = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}  # there is no kubelet to let it end
    policies("DELETE", path, now)
    for path in places.values():
        policies("DELETE", f"{path}/tangram-node")


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


def test_without_the_policy_the_plugin_has_no_right_to_delete(helm: Helm) -> None:
    for enabled in (True, False):
        role = helm.objects({"policy": {"enabled": enabled}}).one("ClusterRole", "tangram-node")
        assert any("delete" in rule["verbs"] for rule in role["rules"]) == enabled
    with pytest.raises(Refused, match=r"arbiter\.guard\.policy is evict with policy\.enabled=false"):
        helm.objects({"policy": {"enabled": False}, "arbiter": {"guard": {"policy": "evict"}}})


@pytest.mark.parametrize("action", ["kill", "evict"])
def test_where_processes_are_not_seen_nothing_but_a_report_is_possible(helm: Helm, action: str) -> None:
    blind = {"hostPID": False}
    with pytest.raises(Refused, match=rf"arbiter\.bypass is {action} with node\.hostPID=false"):
        helm.objects({"node": blind, "arbiter": {"bypass": action}})
    with pytest.raises(Refused, match=rf"arbiter\.guard\.policy is {action} with node\.hostPID=false"):
        helm.objects({"node": blind, "arbiter": {"guard": {"policy": action}}})
    with pytest.raises(Refused, match=r"arbiter\.bypass is evict with policy\.enabled=false"):
        helm.objects({"policy": {"enabled": False}, "arbiter": {"bypass": "evict"}})


@pytest.mark.parametrize(
    ("values", "bypass", "visible"),
    [
        ({}, "kill", "true"),
        ({"arbiter": {"bypass": "evict"}}, "evict", "true"),
        ({"node": {"hostPID": False}}, "report", "false"),
        ({"node": {"hostPID": False}, "arbiter": {"bypass": "report"}}, "report", "false"),
    ],
)
def test_a_bypass_is_killed_by_default_where_processes_are_seen(
    helm: Helm, values: dict[str, Any], bypass: str, visible: str
) -> None:
    containers = helm.objects(values).one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]["containers"]
    (arbiter,) = [one for one in containers if one["name"] == "arbiter"]
    env = {one["name"]: one.get("value") for one in arbiter["env"]}
    assert (env["TANGRAM_ARBITER_BYPASS"], env["TANGRAM_ARBITER_PROCESSES_VISIBLE"]) == (bypass, visible)


def test_the_webhook_creates_its_own_secret_and_no_token_of_another_account(policies: ApiServer) -> None:
    message = refused(lambda: secret(policies, "another", WEBHOOK))
    assert "it must be tangram-webhook-tls of type Opaque" in message
    token = {"type": "kubernetes.io/service-account-token"}
    about = {"metadata": {"name": "tangram-webhook-tls", "annotations": {"kubernetes.io/service-account.name": "x"}}}
    assert "service-account-token" in refused(lambda: secret(policies, "", WEBHOOK, **token, **about))
    secret(policies, "tangram-webhook-tls", WEBHOOK)
    policies("DELETE", f"{SECRETS}/tangram-webhook-tls")
    secret(policies, f"others-{next(numbers)}", "jane")


def test_trusted_users_may_bind_where_an_existing_scheduler_runs_the_extender(helm: Helm) -> None:
    policy = helm.objects(EXAMPLES["own-scheduler"]).one("ValidatingAdmissionPolicy", "tangram-bindings")
    assert "'system:kube-scheduler'" in policy["spec"]["validations"][0]["expression"]
