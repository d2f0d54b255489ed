"""Pods, nodes and bindings for tests of the admission policies, and what waits until those are in force."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kube.client import STRATEGIC_PATCH
from tests.apiserver import ApiServer, Denied
from tests.contract.chart.rendering import NAMESPACE

PODS = "/api/v1/namespaces/default/pods"
NODES = "/api/v1/nodes"
SECRETS = "/api/v1/namespaces/default/secrets"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
ASSIGNMENT, GPUS, INVENTORY = "tangram.sh/assignment", "tangram.sh/gpus.main", "tangram.sh/inventory"
BURSTS, NUMA = "tangram.sh/bursts", "tangram.sh/numa"
OURS = {ASSIGNMENT: "{}", GPUS: "GPU-1"}
SHARE = {"tangram.sh/gpu-mem": "1"}
PLUGIN, SCHEDULER = (f"system:serviceaccount:{NAMESPACE}:tangram-{name}" for name in ("node", "scheduler"))
WEBHOOK = f"system:serviceaccount:{NAMESPACE}:tangram-webhook"
CLEANUP = f"system:serviceaccount:{NAMESPACE}:tangram-cleanup"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"


numbers = itertools.count(1)


def wait_until_in_force(api: ApiServer) -> None:
    """Policies reach admission by a watch: until each of them denies what it must."""
    probe = f"probe-{next(numbers)}"
    node(api, probe)
    refused(lambda: patched_until_denied(api, f"{NODES}/{probe}", INVENTORY))
    refused(lambda: patched_until_denied(api, f"{PODS}/{pod(api)}", GPUS))
    name = pod(api)
    refused(lambda: bind_until_denied(api, name))
    refused(lambda: delete_until_denied(api))
    refused(lambda: evict_until_denied(api))
    refused(lambda: create_secret_until_denied(api))
    refused(lambda: write_condition_until_denied(api))


def patched_until_denied(api: ApiServer, path: str, key: str) -> None:
    for attempt in range(2000):
        api.patch(path, {"metadata": {"annotations": {key: str(attempt)}}})


def bind_until_denied(api: ApiServer, name: str) -> None:
    for _ in range(2000):
        try:
            bind(api, name, OURS, "jane")
        except Denied as error:
            if "tangram" in str(error):
                raise


def delete_until_denied(api: ApiServer) -> None:
    for _ in range(2000):
        api("DELETE", f"{PODS}/{pod(api)}", user=PLUGIN)


def evict(api: ApiServer, name: str, *, namespace: str = "default", dry: bool = False, **caller: str) -> None:
    body: dict[str, Any] = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    if dry:
        body["deleteOptions"] = {"dryRun": ["All"]}
    api("POST", f"{PODS.replace('default', namespace)}/{name}/eviction", body, **caller)


def bound_until_seen(api: ApiServer, *containers: dict[str, Any], **spec: Any) -> str:
    """A pod on node `somewhere`, once the cache from which the policy of evictions reads pods has it there; its name."""
    name = pod(api, *containers, **spec)
    bind(api, name, {}, SCHEDULER)
    for _ in range(2000):
        try:
            evict(api, name, dry=True, user=PLUGIN, node="elsewhere")
        except Denied as error:
            if 'of node "somewhere"' in str(error):
                return name
    raise AssertionError(f"pod {name} is not seen where it is bound")


def evict_until_denied(api: ApiServer) -> None:
    for _ in range(2000):
        evict(api, pod(api), user=PLUGIN)


def write_condition_until_denied(api: ApiServer) -> None:
    name = pod(api)
    for attempt in range(2000):
        status_patch(api, name, user=PLUGIN, message=str(attempt))


def status_patch(api: ApiServer, name: str, user: str, node: str = "", **status: Any) -> Any:
    """As the device plugin writes a status: lists are merged by their keys."""
    return api("PATCH", f"{PODS}/{name}/status", {"status": status}, user=user, node=node, content_type=STRATEGIC_PATCH)


def create_secret_until_denied(api: ApiServer) -> None:
    for _ in range(2000):
        secret(api, f"probe-{next(numbers)}", WEBHOOK)


def secret(api: ApiServer, name: str, user: str, **more: Any) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, **more}
    api("POST", SECRETS, body, user=user)


def refused(act: Callable[[], object]) -> str:
    """The message of a denial that one of our policies must give."""
    with pytest.raises(Denied, match="ValidatingAdmissionPolicy 'tangram-") as denial:
        act()
    return str(denial.value)


def container(name: str = "main", limits: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "none", "resources": {"limits": limits or {}}, **more}


INIT_SHARE = {"initContainers": [container("init", SHARE)]}


def visible(value: str) -> dict[str, Any]:
    return {"env": [{"name": VISIBLE, "value": value}]}


def visible_from(key: str) -> dict[str, Any]:
    path = f"metadata.annotations['{key}']"
    return {"env": [{"name": VISIBLE, "valueFrom": {"fieldRef": {"fieldPath": path}}}]}


def pod(
    api: ApiServer,
    *containers: dict[str, Any],
    annotations: dict[str, str] | None = None,
    user: str = "jane",
    namespace: str = "default",
    **spec: Any,
) -> str:
    """Create a pod; its name."""
    name = f"pod-{next(numbers)}"
    metadata = {"name": name, "annotations": annotations or {}}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": list(containers) or [container()], **spec},
    }
    api("POST", PODS.replace("default", namespace), body, user=user)
    return name


def node(api: ApiServer, name: str, **annotations: str) -> None:
    metadata = {"name": name, "annotations": annotations}
    api("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})


def bind(api: ApiServer, name: str, annotations: dict[str, str], user: str) -> None:
    target = {"apiVersion": "v1", "kind": "Node", "name": "somewhere"}
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": annotations},
        "target": target,
    }
    api("POST", f"{PODS}/{name}/binding", body, user=user)
