"""`helm uninstall`: running pods go on, and nothing of ours stays in the cluster."""

from __future__ import annotations

from hack.cluster.layout import Layout
from hack.stack import NAMESPACE, install_chart, uninstall_chart
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.objects import container, pod, share

EVERYWHERE = (
    "mutatingwebhookconfigurations", "validatingadmissionpolicies", "validatingadmissionpolicybindings", "clusterroles",
    "clusterrolebindings", "priorityclasses",
)  # fmt: skip
OWN = (
    "all", "secrets", "configmaps", "serviceaccounts", "leases", "roles", "rolebindings", "networkpolicies", "poddisruptionbudgets",
)  # fmt: skip
MADE_BY_KUBERNETES = {"configmap/kube-root-ca.crt", "serviceaccount/default"}


def test_uninstall_leaves_running_pods_alone_and_nothing_behind(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("steady", 8, run=["gpuview", "hold", "5Gi"]))
    uninstall_chart(cluster.kubectl)
    try:
        assert left_everywhere(cluster) == []
        eventually(lambda: left_in_its_namespace(cluster) == [], "the pods of the release have ended")
        assert "tangram.sh/inventory" not in cluster.node()["metadata"]["annotations"]
        notes = [one["note"] for one in cluster.api.listed("event", "default") if one.get("reason") == "FilesKept"]
        assert [note for note in notes if f"a share still run, of {namespace}/steady." in note]
        assert node_files() != []
        status = cluster.pod(namespace, "steady")["status"]["containerStatuses"][0]
        assert (status["ready"], status["restartCount"]) == (True, 0)
        cluster.run(namespace, pod("plain", container()))
    finally:
        install_chart(cluster.kubectl)
        cluster.wait_for_gpus()
    out = eventually(
        lambda: second_process(cluster, namespace), "the new arbiter serves the pod that was there before it"
    )
    assert "after 1 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY" in out


def left_everywhere(cluster: Cluster) -> list[str]:
    """Objects outside of namespaces, and in kube-system, that bear our name."""
    names = cluster.kubectl("get", ",".join(EVERYWHERE), "-o", "name").split()
    names += cluster.kubectl("-n", "kube-system", "get", "roles,rolebindings", "-o", "name").split()
    return [name for name in names if "tangram" in name]


def node_files() -> list[str]:
    """Tangram's on the first node. Local cluster only: its state root is a file system of its own, which stays, empty."""
    node = Layout().node(1)
    return [str(path) for path in (*node.own("/var/lib/tangram").glob("*"), *node.own("/run/cdi").glob("tangram*"))]


def left_in_its_namespace(cluster: Cluster) -> list[str]:
    """Objects in the release's namespace."""
    names = cluster.kubectl("-n", NAMESPACE, "get", ",".join(OWN), "-o", "name").split()
    return [name for name in names if name not in MADE_BY_KUBERNETES]


def second_process(cluster: Cluster, namespace: str) -> str | None:
    """What a second process of the pod got of its 8 GiB, of which the first has 5; None while no arbiter leases."""
    out = cluster.exec(namespace, "steady", "sh", "-c", "gpuview grab 4Gi || true")
    return None if "after 0 GiB" in out else out
