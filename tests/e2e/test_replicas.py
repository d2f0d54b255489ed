"""Two replicas of everything that is not on a node: the one that dies is not missed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import UNITS
from tests.e2e.objects import share

PAUSE_S = 0.1
"""Between pods: a webhook that serves one after the other all the time would have no processor to start another."""


@pytest.fixture(scope="module")
def doubled(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with two schedulers and two webhooks; with one of each again afterwards."""
    cluster.upgrade({"scheduler": {"replicas": 2}, "webhook": {"replicas": 2}})
    yield cluster
    cluster.upgrade({})


def active_scheduler(cluster: Cluster) -> str | None:
    """Name of the pod whose kube-scheduler has the lease."""
    lease = cluster.find("lease", "tangram-scheduler", NAMESPACE)
    holder = lease["spec"].get("holderIdentity", "") if lease else ""
    return holder.partition("_")[0] or None


def test_the_other_scheduler_takes_over_in_the_middle_of_twenty_pods(doubled: Cluster, namespace: str) -> None:
    first = eventually(lambda: active_scheduler(doubled), "a scheduler is active")
    assert first in doubled.own_pods("scheduler")
    pods = [share(f"p{i:02}", 5, 7) for i in range(20)]
    names = [thing["metadata"]["name"] for thing in pods]
    doubled.create(namespace, *pods[:10])
    eventually(lambda: any(doubled.pod(namespace, name)["spec"].get("nodeName") for name in names[:10]), "one is bound")
    doubled.api.delete("pod", first, NAMESPACE, by_force=True)
    doubled.create(namespace, *pods[10:])
    doubled.ready(namespace, *names, timeout_s=120)
    assert active_scheduler(doubled) not in {None, first}
    doubled.all_see_their_own(namespace, *names)
    held = doubled.assigned_amounts(namespace)
    assert doubled.kubelet_devices(namespace) == held
    assert sum(amount for (_, resource), amount in held.items() if resource == "gpu-mem") == 20 * 5
    assert max(amount for (_, resource), amount in held.items() if resource == "gpu-mem") <= UNITS
    assert max(amount for (_, resource), amount in held.items() if resource == "gpu-core") <= 100


def test_no_pod_is_refused_while_one_webhook_after_the_other_is_replaced(doubled: Cluster, namespace: str) -> None:
    doubled.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/tangram-webhook")
    admitted = 0
    while not rolled_out(doubled) or admitted < 20:
        # every program of admission is asked, and nothing is kept: hundreds of pods that start would keep the webhooks from ending
        doubled.api.create(share(f"p{admitted}", 1), namespace, dry_run=True)
        admitted += 1
        time.sleep(PAUSE_S)
    assert admitted >= 20
    doubled.run(namespace, share("after", 1))


def rolled_out(cluster: Cluster) -> bool:
    """Only pods of the newest template serve, and no other is left."""
    deployment = cluster.find("deployment", "tangram-webhook", NAMESPACE)
    assert deployment is not None
    status = deployment["status"]
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return (
        seen and status.get("updatedReplicas") == status.get("readyReplicas") == len(cluster.own_pods("webhook")) == 2
    )
