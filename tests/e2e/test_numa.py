"""A kubelet that refuses pods it cannot align: two NUMA nodes with a GPU each, CPUs for one container, and a pod gets the GPU at which the kubelet arrives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from hack.cluster import node as local_node
from hack.cluster import numa
from hack.cluster.layout import Layout
from hack.stack import install_fake_driver
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import GPUS
from tests.e2e.objects import container, pod, share
from vgpu.api.codec import inventory_from_json
from vgpu.api.names import DEFAULT
from vgpu.api.numa import NumaFacts, facts_from_json

TWO: Final = "gpu a100-80 numa=0\ngpu a100-80 numa=1\n"
NAME: Final = "the kubelet's TopologyManager does not allow it"


@pytest.fixture(scope="module", params=["restricted", "single-numa-node"])
def policy(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The first node's kubelet with this policy, and the chart that follows it; afterwards as the other tests need them."""
    node = Layout().node(1)
    wanted: str = request.param
    install_fake_driver(cluster.kubectl, TWO)
    try:
        local_node.align(node, wanted)
        cluster.kubectl.wait(f"node/{node.name}", "condition=Ready", timeout_s=90)
        cluster.upgrade({"node": {"numa": {"enabled": True, "kubeletConfig": str(node.folder / "kubelet.json")}}})
        published(cluster, lambda facts: facts.policy == wanted, f"policy {wanted}")
        yield wanted
    finally:
        local_node.align(node, numa.NONE)
        cluster.kubectl.wait(f"node/{node.name}", "condition=Ready", timeout_s=90)
        cluster.upgrade({})
        install_fake_driver(cluster.kubectl, GPUS)
        cluster.wait_for_gpus("tangram.sh/mig-1g.10gb")


def published(cluster: Cluster, judge: Any, what: str) -> NumaFacts:
    """Wait until the node's annotation is as it should be."""

    def found(seen: dict[str, dict[str, Any]]) -> NumaFacts | None:
        text = next(iter(seen.values()))["metadata"].get("annotations", {}).get(DEFAULT.numa)
        facts = facts_from_json(text) if text is not None else None
        return facts if facts is not None and judge(facts) else None

    return cluster.api.until("node", None, found, what, timeout_s=60)


def numa_of(cluster: Cluster, namespace: str, name: str) -> set[int]:
    """NUMA nodes of the GPUs that a pod was assigned."""
    inventory = inventory_from_json(cluster.node()["metadata"]["annotations"][DEFAULT.inventory])
    text = json.loads(cluster.pod(namespace, name)["metadata"]["annotations"][DEFAULT.assignment])
    gpus = [inventory.gpu(one["uuid"]) for one in text["containers"]["main"]]
    return {gpu.numa for gpu in gpus if gpu is not None}


def with_cpu(name: str, units: int) -> dict[str, Any]:
    """A Guaranteed pod with one CPU for itself. The first CPU of the node is reserved, so on two CPUs it can only have the second."""
    one = container(mem=units)
    one["resources"]["limits"] |= {"cpu": "1", "memory": "256Mi"}
    return pod(name, one)


def given(cluster: Cluster, namespace: str) -> dict[tuple[str, str], int]:
    """The kubelet's devices of the namespace, which must lie on the GPUs assigned."""
    devices = cluster.kubelet_devices(namespace)
    assert devices == cluster.assigned_amounts(namespace)
    return devices


def test_without_cpus_of_its_own_a_pod_gets_the_gpu_of_the_lowest_numa_node(
    cluster: Cluster, policy: str, namespace: str
) -> None:
    cluster.run(namespace, share("plain", 2))
    assert numa_of(cluster, namespace, "plain") == {0}
    assert len(given(cluster, namespace)) == 1


def test_a_pod_gets_the_gpu_beside_the_cpus_that_it_gets_for_itself(
    cluster: Cluster, policy: str, namespace: str
) -> None:
    facts = published(cluster, lambda facts: sum(one.free for one in facts.nodes) > 0, "free CPUs")
    lowest = min(one.id for one in facts.nodes if one.free)
    cluster.run(namespace, with_cpu("pinned", 2))
    assert numa_of(cluster, namespace, "pinned") == {lowest}
    assert len(given(cluster, namespace)) == 1
    status = cluster.exec(namespace, "pinned", "cat", "/proc/self/status")
    (allowed,) = (line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:"))
    halves = numa.halves(numa.online(numa.CPUS.read_text()))
    assert int(allowed) in halves[lowest]
    uid = cluster.pod(namespace, "pinned")["metadata"]["uid"]
    counted = published(cluster, lambda facts: uid in facts.counted, "the pod's CPU is counted")
    free = {one.id: one.free for one in facts.nodes}
    assert {one.id: one.free for one in counted.nodes} == free | {lowest: free[lowest] - 1}


def test_a_pod_stays_pending_while_the_kubelet_would_take_it_where_no_gpu_has_room(
    cluster: Cluster, policy: str, namespace: str
) -> None:
    """The GPU of NUMA node 0 is given whole: its IDs of gpu-mem are free for the kubelet all the same."""
    cluster.run(namespace, pod("whole", container(gpu=1)))
    assert numa_of(cluster, namespace, "whole") == {0}
    cluster.create(namespace, share("waits", 2))
    note = cluster.event(namespace, "waits", lambda text: NAME in text, "the reason why it is not scheduled")
    assert f"({policy}): it would align the pod to NUMA node 0, where no GPU has room for it" in note
    cluster.delete(namespace, "whole")
    cluster.ready(namespace, "waits")
    assert numa_of(cluster, namespace, "waits") == {0}


def test_pods_that_come_together_all_start(cluster: Cluster, policy: str, namespace: str) -> None:
    """They are bound one after another; none is refused by the kubelet."""
    names = [f"p{at}" for at in range(4)]
    cluster.run(namespace, *(share(name, 2 + at) for at, name in enumerate(names)), timeout_s=180)
    assert all(numa_of(cluster, namespace, name) == {0} for name in names)
    assert given(cluster, namespace)
