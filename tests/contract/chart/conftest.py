"""helm, and a real API server with nothing behind it: no node, no controller. Both as the local cluster builds them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, HELM, KUBERNETES
from tests.apiserver import ApiServer, running
from tests.contract.chart.policy_kit import NODES, POLICIES, node, pod, wait_until_in_force
from tests.contract.chart.rendering import EXAMPLES, NAMESPACE, Helm, Objects
from tests.contract.chart.templates_kit import define


@pytest.fixture(scope="session")
def helm() -> Helm:
    """helm. Built when the cache lacks it."""
    return Helm(build(cache_folder(), [HELM], Steps())["helm"])


@pytest.fixture(scope="module", params=EXAMPLES)
def rendered(request: pytest.FixtureRequest, helm: Helm) -> Objects:
    return helm.objects(EXAMPLES[request.param])


@pytest.fixture(scope="module")
def local(helm: Helm) -> Objects:
    return helm.objects(EXAMPLES["local"])


@pytest.fixture(scope="module")
def nvidia(helm: Helm) -> Objects:
    return helm.objects(EXAMPLES["nvidia"])


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server of the session's own."""
    programs = build(cache_folder(), [KUBERNETES, ETCD], Steps())
    with running(programs, tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture
def release_namespace(api: ApiServer) -> str:
    """The release's namespace, which is there."""
    found = api("GET", "/api/v1/namespaces")["items"]
    if NAMESPACE not in {thing["metadata"]["name"] for thing in found}:
        api("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    return NAMESPACE


BURST_MAX = {"default": "max", "kube-public": "16Gi"}
"""Value burst.max of these tests: in other namespaces no pod may burst."""


@pytest.fixture(scope="module")
def policies(helm: Helm, api: ApiServer) -> Iterator[ApiServer]:
    """The API server with the chart's policies in force, for the runtime class that mode `nvidia` gives."""
    rendered = helm.objects(
        {
            "accessMode": "nvidia",
            "webhook": {"privilegedNamespaces": ["kube-public"], "latencyCriticalNamespaces": ["kube-public"]},
            "burst": {"enabled": True, "max": BURST_MAX},
        }
    )
    things = rendered.of("ValidatingAdmissionPolicy"), rendered.of("ValidatingAdmissionPolicyBinding")
    for path, kind in zip((POLICIES, POLICIES.replace("policies", "policybindings")), things, strict=True):
        for thing in kind.values():
            api.apply(thing, path)
    runtime = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia"},
        "handler": "nvidia",
    }
    api.apply(runtime, "/apis/node.k8s.io/v1/runtimeclasses")
    wait_until_in_force(api)
    yield api
    api("DELETE", "/apis/node.k8s.io/v1/runtimeclasses/nvidia")
    for name in things[0]:
        api("DELETE", f"{POLICIES}/{name}")
        api("DELETE", f"{POLICIES.replace('policies', 'policybindings')}/{name}")


@pytest.fixture(scope="session")
def kinds(api: ApiServer) -> ApiServer:
    """The API server with every kind whose templates Kueue counts."""
    define(api)
    return api


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
    for where in ("node-a", "node-b"):
        policies("DELETE", f"{NODES}/{where}")
