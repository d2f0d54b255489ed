"""Access to the metrics of a node's programs: Prometheus with its role, and no other pod."""

from __future__ import annotations

import pytest

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.objects import container, pod

READ = """
import sys, urllib.error, urllib.request
headers = {}
if "token" in sys.argv:
    headers["Authorization"] = "Bearer " + open("/var/run/secrets/kubernetes.io/serviceaccount/token").read()
try:
    answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers=headers), timeout=10)
    print(answer.status, "tangram_" in answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture
def address(cluster: Cluster) -> str:
    """Of the node's pod."""
    selector = "app.kubernetes.io/component=node"
    (one,) = cluster.api.listed("pod", NAMESPACE, selector)
    return str(one["status"]["podIP"])


@pytest.mark.parametrize("port", [9402, 9403])
def test_a_pod_reads_the_metrics_of_a_node_only_with_the_role_for_it(
    cluster: Cluster, namespace: str, address: str, port: int
) -> None:
    waits = container(run=["sleep", "infinity"])
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "prometheus", "namespace": namespace}}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "tangram-node-metrics-reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "prometheus", "namespace": namespace}],
    }  # fmt: skip
    cluster.api.create(account, namespace)
    cluster.api.create(binding)
    try:
        cluster.run(namespace, pod("container", waits), pod("prometheus", waits, serviceAccountName="prometheus"))

        def reads(name: str, path: str, *more: str) -> str:
            url = f"http://{address}:{port}{path}"
            return cluster.exec(namespace, name, "python3", "-c", READ, url, *more).strip()

        assert reads("container", "/metrics") == "401"
        assert reads("container", "/metrics", "token") == "403"
        assert reads("container", "/healthz").startswith("200")
        eventually(
            lambda: reads("prometheus", "/metrics", "token") == "200 True", "Prometheus reads", timeout_s=60
        )  # a refusal counts for half a minute, should the role have come after the first try
    finally:
        cluster.api.delete("clusterrolebinding", namespace)
