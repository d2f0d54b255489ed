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
STATES = """
import pathlib, select
from arbiter.swap.copier import Copier
for path in sorted(pathlib.Path("/var/lib/tangram/copiers").glob("*.sock")):
    link = Copier(path)
    link.request_state()
    select.select([link.fd], [], [], 10)
    print(path.stem, link.receive())
"""
"""In the arbiter's container: the STATE of each copier."""
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


def states(cluster: Cluster) -> list[str]:
    printed = cluster.exec(NAMESPACE, cluster.node_pod(), "python3", "-P", "-c", STATES, container="arbiter")
    return printed.splitlines()


def test_each_shared_gpu_has_a_copier_that_is_ready_and_the_mig_gpu_has_none(pooled: Cluster) -> None:
    pooled.pool_pod()
    found = states(pooled)
    assert len(found) == 2
    for state in found:
        assert "ready=True" in state
        assert f"pool_bytes={128 * 2**20}" in state
        assert f"registered_bytes={128 * 2**20}" in state


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
    assert all("ready=True" in state for state in states(pooled))


def test_a_pod_runs_beside_the_pool(pooled: Cluster, namespace: str) -> None:
    pooled.run(namespace, share("a", 2))
    pooled.all_see_their_own(namespace, "a")
    counted = metrics(pooled, pooled.node_pod(), "arbiter", 9403, "tangram_gpu_ungranted_processes{")
    assert counted
    assert all(line.endswith(" 0.0") for line in counted), "the copiers need no grant"
    ready = metrics(pooled, pooled.pool_pod(), "pool", 9404, "tangram_host_pool_ready{")
    assert [line.rpartition(" ")[2] for line in ready] == ["1.0", "1.0"]


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
