"""What is refused, at admission and after it, and the answers. Attacks are in attacks/."""

from __future__ import annotations

import pytest

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.objects import container, pod, share


@pytest.mark.parametrize(
    ("thing", "sentence"),
    [
        (share("zero", "0"), "gpu-mem is 0"),
        (share("words", "lots"), "not"),
        (pod("core", container(core=30)), "without tangram.sh/gpu-mem"),
        (share("over", 8, 130), "1 to 100"),
        (pod("both", container(mem=8, gpu=1)), "either a share"),
        (share("class", 8, annotations={"tangram.sh/class": "urgent"}), "latency-critical, standard, best-effort"),
        (share("policy", 8, annotations={"tangram.sh/placement": "anywhere"}), "binpack"),
        (share("typo", 8, annotations={"tangram.sh/gpu-cuont": "2"}), "tangram.sh/gpu-cuont"),
        (share("odd", 9, annotations={"tangram.sh/gpu-count": "2"}), "does not divide"),
    ],
    ids=lambda value: value["metadata"]["name"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_bad_request_is_denied_with_a_sentence(
    cluster: Cluster, namespace: str, thing: dict[str, object], sentence: str
) -> None:
    assert sentence in cluster.refused(namespace, thing)


def test_a_pod_past_our_scheduler_is_refused_by_the_device_plugin(cluster: Cluster) -> None:
    """kube-system is left out by the webhook, so this pod reaches the kubelet with nothing of ours but its limits."""
    name = cluster.node()["metadata"]["name"]
    thing = pod("past-the-scheduler", container(mem=8), nodeName=name)
    cluster.create("kube-system", thing)
    try:
        status = eventually(
            lambda: (s := cluster.pod("kube-system", "past-the-scheduler")["status"]).get("phase") == "Failed" and s,
            "the pod fails",
        )
        assert status["reason"] == "UnexpectedAdmissionError"
        assert "scheduler" in status["message"]
    finally:
        cluster.delete("kube-system", "past-the-scheduler")


def test_pods_without_our_resources_do_not_need_the_webhook(cluster: Cluster, namespace: str) -> None:
    deployment = "deployment/tangram-webhook"
    cluster.kubectl("-n", NAMESPACE, "scale", deployment, "--replicas=0")
    cluster.kubectl(
        "-n", NAMESPACE, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=webhook", "--timeout=60s"
    )
    try:
        cluster.run(namespace, pod("plain", container()))
        assert "webhook" in cluster.refused(namespace, share("needs-it", 8))
    finally:
        cluster.kubectl("-n", NAMESPACE, "scale", deployment, "--replicas=1")
        cluster.kubectl("-n", NAMESPACE, "rollout", "status", deployment, "--timeout=90s")
    cluster.run(namespace, share("after", 8))
