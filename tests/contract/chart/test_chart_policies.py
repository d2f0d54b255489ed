"""What the admission policies deny, said by a real API server.

The rows are the ways by which somebody could give a pod a GPU, or a node one that it has not.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.apiserver import ApiServer
from tests.contract.chart.policy_kit import (
    BURSTS,
    CLEANUP,
    GPUS,
    INVENTORY,
    NODES,
    NUMA,
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
    visible,
    visible_from,
)
from tests.contract.chart.rendering import EXAMPLES, Helm, Refused
from vgpu.api.names import DEFAULT
from vgpu.mig.declared import NVIDIA, NVIDIA_STATE


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


@pytest.mark.parametrize("key", [INVENTORY, BURSTS, NUMA])
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


@pytest.mark.parametrize("key", [INVENTORY, BURSTS, NUMA])
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
    assert (
        f"nothing of node {name} but its annotations {INVENTORY}, {BURSTS}, {NUMA}, its labels tangram.sh/gpu.model, "
        in message
    )


@pytest.mark.parametrize("key", DEFAULT.node_labels)
def test_the_plugin_writes_the_labels_of_its_own_node_alone(policies: ApiServer, key: str) -> None:
    name = f"labelled-{next(numbers)}"
    node(policies, name)
    there, gone = ({"metadata": {"labels": {key: value}}} for value in ("x", None))
    for bound in ("other", ""):
        refused(lambda where=bound: policies.patch(f"{NODES}/{name}", there, user=PLUGIN, node=where))
    policies.patch(f"{NODES}/{name}", there, user=PLUGIN, node=name)
    refused(lambda: policies.patch(f"{NODES}/{name}", gone, user=PLUGIN, node="other"))
    policies.patch(f"{NODES}/{name}", gone, user=PLUGIN, node=name)


@pytest.mark.parametrize(
    "key",
    [
        "tangram.sh/gpu",
        "tangram.sh/gpu.models",
        "tangram.sh/node",
        "nvidia.com/gpu.model",
        DEFAULT.mig_config,
        "tangram.sh/mig.config.states",
        NVIDIA,
        NVIDIA_STATE,
    ],
)
def test_the_plugin_writes_no_label_that_only_resembles_one_of_its_own(policies: ApiServer, key: str) -> None:
    name = f"resembling-{next(numbers)}"
    node(policies, name)
    refused(lambda: policies.patch(f"{NODES}/{name}", {"metadata": {"labels": {key: "x"}}}, user=PLUGIN, node=name))


TAINT = DEFAULT.unhealthy_taint
FOREIGN = {"key": "example.com/kept", "value": "x", "effect": "NoExecute"}


def taint(effect: str = "NoSchedule", key: str = TAINT) -> dict[str, str]:
    return {"key": key, "value": "true", "effect": effect}


def tainted(api: ApiServer, *taints: dict[str, str]) -> str:
    """A node with these."""
    name = f"tainted-{next(numbers)}"
    meta = {"name": name}
    api("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {"taints": list(taints)}})
    return name


@pytest.mark.parametrize("effect", ["NoSchedule", "PreferNoSchedule"])
def test_the_plugin_writes_its_taint_on_its_own_node_alone(policies: ApiServer, effect: str) -> None:
    name = tainted(policies, FOREIGN)
    there, gone = ({"spec": {"taints": these}} for these in ([FOREIGN, taint(effect)], [FOREIGN]))
    for bound in ("other", ""):
        refused(lambda where=bound: policies.patch(f"{NODES}/{name}", there, user=PLUGIN, node=where))
    policies.patch(f"{NODES}/{name}", there, user=PLUGIN, node=name)
    refused(lambda: policies.patch(f"{NODES}/{name}", gone, user=PLUGIN, node="other"))
    policies.patch(f"{NODES}/{name}", gone, user=PLUGIN, node=name)
    assert policies("GET", f"{NODES}/{name}")["spec"]["taints"] == [FOREIGN]


@pytest.mark.parametrize(
    "spec",
    [
        {"taints": [FOREIGN, taint("NoExecute")]},
        {"taints": [FOREIGN, taint(key="tangram.sh/gpu-unhealth")]},
        {"taints": [FOREIGN, taint(key="tangram.sh/gpu-unhealthy2")]},
        {"taints": [FOREIGN, taint(key="node.kubernetes.io/unschedulable")]},
        {"taints": [taint()]},
        {"taints": None},
        {"taints": [FOREIGN | {"value": "y"}, taint()]},
        {"taints": [FOREIGN | {"effect": "NoSchedule"}, taint()]},
        {"taints": [FOREIGN, taint()], "unschedulable": True},
        {"taints": [FOREIGN, taint()], "providerID": "x"},
        {"taints": [FOREIGN, taint()], "podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"]},
    ],
    ids=[
        "evicts", "shorter key", "longer key", "another's key", "another's removed", "all removed", "another's value",
        "another's effect", "unschedulable", "provider", "addresses",
    ],
)  # fmt: skip
def test_the_plugin_writes_no_other_taint_and_nothing_beside_it(policies: ApiServer, spec: dict[str, Any]) -> None:
    name = tainted(policies, FOREIGN)
    refused(lambda: policies.patch(f"{NODES}/{name}", {"spec": spec}, user=PLUGIN, node=name))
    assert policies("GET", f"{NODES}/{name}")["spec"] == {"taints": [FOREIGN]}


def test_the_plugin_removes_the_startup_taint_and_does_not_write_it(policies: ApiServer) -> None:
    startup = taint(key=DEFAULT.startup_taint)
    name = tainted(policies, FOREIGN, startup)

    def write(*taints: dict[str, str]) -> None:
        policies.patch(f"{NODES}/{name}", {"spec": {"taints": list(taints)}}, user=PLUGIN, node=name)

    refused(lambda: write(FOREIGN, startup | {"effect": "PreferNoSchedule"}))
    refused(lambda: write(startup))
    write(FOREIGN)
    refused(lambda: write(FOREIGN, startup))
    assert policies("GET", f"{NODES}/{name}")["spec"]["taints"] == [FOREIGN]


def test_the_policy_knows_every_field_of_a_nodes_spec(policies: ApiServer) -> None:
    """It compares them one by one: one that a later Kubernetes adds has to be added there."""
    schema = policies("GET", "/openapi/v3/api/v1")["components"]["schemas"]["io.k8s.api.core.v1.NodeSpec"]
    known = {"configSource", "externalID", "podCIDR", "podCIDRs", "providerID", "taints", "unschedulable"}
    assert set(schema["properties"]) == known


@pytest.mark.parametrize("kind", ["node", "pool"])
def test_pods_of_the_node_tolerate_the_taint_that_the_plugin_writes(helm: Helm, kind: str) -> None:
    objects = helm.objects(
        {"domain": "gpu.example.com", "node": {"tolerations": []}, "burst": {"enabled": True, "hostPool": "4Gi"}}
    )
    spec = objects.one("DaemonSet", f"tangram-{kind}")["spec"]["template"]["spec"]
    keys = ("gpu.example.com/gpu-unhealthy", "gpu.example.com/not-ready")
    assert spec["tolerations"] == [{"key": key, "operator": "Exists"} for key in keys]


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
