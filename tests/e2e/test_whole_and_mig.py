"""Whole GPUs and MIG instances."""

from __future__ import annotations

from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.objects import container, pod, share


def test_a_whole_gpu_is_exclusive(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, pod("whole", container(gpu=1)), share("part", 8))
    assert cluster.sees(namespace, "whole") == cluster.assigned(namespace, "whole")
    assert cluster.sees(namespace, "part") != cluster.sees(namespace, "whole")
    cluster.create(namespace, pod("second", container(gpu=1)))
    events = eventually(
        lambda: [e for e in cluster.events(namespace, "second") if "FailedScheduling" in e], "a FailedScheduling event"
    )
    assert "too few GPUs are wholly free" in events[0]


def test_a_pod_on_a_mig_instance_sees_that_instance_and_nothing_else(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, pod("small", container(mig="1g.10gb")), pod("large", container(mig="3g.40gb")))
    for name in ("small", "large"):
        assert cluster.sees(namespace, name) == cluster.assigned(namespace, name)
        listed = cluster.exec(namespace, name, "nvidia-smi", "-L")
        assert [
            line for line in listed.splitlines() if "MIG-" in line and cluster.assigned(namespace, name)[0] not in line
        ] == []
    assert cluster.assigned(namespace, "small") != cluster.assigned(namespace, "large")


def test_no_more_mig_pods_than_instances(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, pod("one", container(mig="3g.40gb")))
    cluster.create(namespace, pod("two", container(mig="3g.40gb")))
    events = eventually(
        lambda: [e for e in cluster.events(namespace, "two") if "FailedScheduling" in e], "a FailedScheduling event"
    )
    assert "MIG" in events[0] or "mig" in events[0]
    cluster.delete(namespace, "one")
    cluster.ready(namespace, "two", timeout_s=120)
