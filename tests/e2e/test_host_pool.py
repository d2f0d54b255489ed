"""The host pool on a node: it is ready, its file outlives its pod and an upgrade, and a node where it does not fit keeps its plugin."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import UNITS
from tests.e2e.objects import share

BURST: dict[str, Any] = {"enabled": True, "hostPool": "256Mi", "hostReserve": "512Mi"}
READ = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]})
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""
MARK = """
import pathlib, sys
for path in sorted(pathlib.Path("/pool/tmpfs").glob("*.pool")):
    with path.open("r+b") as file:
        if sys.argv[1:]:
            file.write(sys.argv[1].encode())
            file.seek(0)
        print(path.name, path.stat().st_ino, path.stat().st_size, file.read(4))
"""
"""In the pool's container: write into each pool file, if there is a word, and print what is there."""


def marks(cluster: Cluster, pod: str, word: str = "") -> str:
    return cluster.exec(NAMESPACE, pod, "python3", "-c", MARK, *([word] if word else []))


def samples(cluster: Cluster, pod: str, container: str, port: int, name: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in metrics(cluster, pod, container, port, name)]


def pool_ready(cluster: Cluster, pod: str) -> bool:
    """Whether the copiers of both GPUs take jobs."""
    return samples(cluster, pod, "pool", 9404, "tangram_host_pool_ready{") == [1, 1]


def test_each_shared_gpu_has_a_copier_that_is_ready_and_the_mig_gpu_has_none(pooled: Cluster) -> None:
    pod = pooled.pool_pod()
    assert pool_ready(pooled, pod)
    sizes = samples(pooled, pod, "pool", 9404, "tangram_host_pool_bytes{")
    assert sizes == [128 * 2**20] * 6, "set, allocated and registered, of two GPUs"


def test_the_copiers_memory_is_taken_off_what_the_node_offers(pooled: Cluster) -> None:
    pooled.api.until(
        "node",
        None,
        lambda seen: next(iter(seen.values()))["status"]["allocatable"]["tangram.sh/gpu-mem"] == str(2 * (UNITS - 1)),
        "one unit less of each GPU",
    )


def test_the_pool_outlives_the_pod_its_sudden_end_and_an_upgrade(pooled: Cluster) -> None:
    pod = pooled.pool_pod()
    before = marks(pooled, pod, "kept")
    assert before.count("b'kept'") == 2
    pooled.delete(NAMESPACE, pod)
    again = pooled.pool_pod(without=pod)
    assert marks(pooled, again) == before
    pooled.kubectl("-n", NAMESPACE, "delete", "pod", again, "--grace-period=0", "--force")
    third = pooled.pool_pod(without=again)
    assert marks(pooled, third) == before
    pooled.upgrade({"burst": BURST | {"pool": {"podAnnotations": {"test": "upgraded"}}}})
    fourth = pooled.pool_pod(without=third)
    assert marks(pooled, fourth) == before
    assert pool_ready(pooled, fourth)


def test_a_pod_runs_beside_the_pool(pooled: Cluster, namespace: str) -> None:
    pooled.run(namespace, share("a", 2))
    pooled.all_see_their_own(namespace, "a")
    counted = samples(pooled, pooled.node_pod(), "arbiter", 9403, "tangram_gpu_ungranted_processes{")
    assert counted
    assert set(counted) == {0}, "the copiers need no grant"
    assert pool_ready(pooled, pooled.pool_pod())
    eventually(lambda: answering(pooled), "the copiers answer the arbiter", timeout_s=30)


def answering(cluster: Cluster) -> bool:
    """The copiers answer the arbiter, which is alone in talking to them. It does so where a container has a share."""
    return set(samples(cluster, cluster.node_pod(), "arbiter", 9403, "tangram_gpu_swap_ready{")) == {1}


def metrics(cluster: Cluster, pod: str, container: str, port: int, name: str) -> list[str]:
    """Samples of a metric of a node's program."""
    page = cluster.exec(
        NAMESPACE, pod, "python3", "-c", READ, f"http://127.0.0.1:{port}/metrics", cluster.metrics_token(), container=container
    )  # fmt: skip
    return [line for line in page.splitlines() if line.startswith(name)]


@pytest.mark.timeout(600)
def test_a_pool_that_the_node_cannot_have_is_named_and_the_node_keeps_its_plugin(
    pooled: Cluster, namespace: str
) -> None:
    pooled.upgrade({"burst": BURST | {"hostReserve": "100Ti"}})
    status = eventually(lambda: status_with_reason(pooled), "a reason in the status", timeout_s=90)
    assert status.startswith("burst.hostPool is 0.2 GiB: the node has ")
    pooled.upgrade({"burst": BURST | {"hostPool": "100Ti"}})
    pending = pooled.api.until("pod", NAMESPACE, lambda seen: pending_pool(seen), "the pool's pod is Pending")
    assert pending
    assert pooled.wait_for_gpus() == 2 * (UNITS - 1)
    pooled.run(namespace, share("a", 2))
    node = pooled.node()["metadata"]["name"]

    def reported(seen: dict[str, dict[str, Any]]) -> str | None:
        notes = [event for event in seen.values() if event.get("reason") == "NoHostPool"]
        return next((text for text in map(json.dumps, notes) if "too large for this node" in text), None)

    note = pooled.api.until("event", "default", reported, "an Event on the node", timeout_s=240)
    assert node in note


def status_with_reason(cluster: Cluster) -> str:
    code = "import json; print(json.load(open('/var/lib/tangram/copiers/status.json'))['reason'])"
    reason = cluster.exec(NAMESPACE, cluster.node_pod(), "python3", "-c", code, container="arbiter").strip()
    return reason if reason.startswith("burst.hostPool") else ""


def pending_pool(seen: dict[str, dict[str, Any]]) -> bool:
    pods = [pod for name, pod in seen.items() if name.startswith("tangram-pool-")]
    return any(pod["status"].get("phase") == "Pending" and not pod["spec"].get("nodeName") for pod in pods)
