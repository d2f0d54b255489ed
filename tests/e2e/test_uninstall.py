"""`helm uninstall`: running pods go on, and nothing of ours stays in the cluster."""

from __future__ import annotations

from hack.stack import NAMESPACE, install_chart, uninstall_chart
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.objects import container, pod, share

KINDS = (
    "mutatingwebhookconfigurations", "validatingadmissionpolicies", "validatingadmissionpolicybindings", "clusterroles",
    "clusterrolebindings", "priorityclasses",
)  # fmt: skip


def test_uninstall_leaves_running_pods_alone_and_nothing_behind(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("steady", 8, run=["gpuview", "hold", "6Gi"]))
    uninstall_chart(cluster.kubectl)
    try:
        left = cluster.kubectl("get", ",".join(KINDS), "-o", "name")
        assert [name for name in left.split() if "tangram" in name] == []
        owned = cluster.kubectl(
            "-n", NAMESPACE, "get", "all,secrets,configmaps,leases,roles,rolebindings", "-o", "name"
        )
        assert [name for name in owned.split() if "kube-root-ca.crt" not in name] == []
        assert "tangram.sh/inventory" not in cluster.node()["metadata"]["annotations"]
        status = cluster.pod(namespace, "steady")["status"]["containerStatuses"][0]
        assert (status["ready"], status["restartCount"]) == (True, 0)
        cluster.run(namespace, pod("plain", container()))
    finally:
        install_chart(cluster.kubectl)
        cluster.wait_for_gpus()
    out = eventually(
        lambda: second_process(cluster, namespace), "the new arbiter serves the pod that was there before it"
    )
    assert "after 2 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY" in out


def second_process(cluster: Cluster, namespace: str) -> str | None:
    """What a second process of the pod got of its 8 GiB, of which the first holds 6; None while nobody lends."""
    out = cluster.exec(namespace, "steady", "sh", "-c", "gpuview grab 4Gi || true")
    return None if "after 0 GiB" in out else out
