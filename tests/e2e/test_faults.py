"""Faults that the matrix (test_matrix.py) has not, and what becomes of running and starting pods."""

from __future__ import annotations

import json
import time
from typing import Any

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import UNITS
from tests.e2e.objects import share
from vgpu.api.codec import inventory_from_json
from vgpu.api.inventory import Inventory
from vgpu.api.names import DEFAULT


def test_the_memory_of_a_killed_process_is_free(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("mortal", 8))
    steps = (
        "gpuview hold 6Gi > /tmp/held & pid=$!",
        "until grep holds /tmp/held; do sleep 0.1; done",
        "gpuview grab 2Gi && exit 1",
        "kill -9 $pid; wait $pid",
        "until gpuview grab 6Gi; do :; done",
    )
    printed = cluster.exec(namespace, "mortal", "timeout", "60", "sh", "-c", "; ".join(steps))
    assert "after 0 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY" in printed
    assert "took 6.0 GiB" in printed


def test_restarting_plugin_and_arbiter_disturbs_no_pod(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("steady", 8, run=["gpuview", "hold", "5Gi"]))
    started = cluster.pod(namespace, "steady")["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    cluster.restart_component("node", "daemonset/tangram-node")
    cluster.wait_for_gpus()
    status = cluster.pod(namespace, "steady")["status"]["containerStatuses"][0]
    assert (status["state"]["running"]["startedAt"], status["restartCount"]) == (started, 0)
    out = eventually(lambda: _grab(cluster, namespace, "steady", "4Gi"), "the arbiter knows again what is held")
    assert "after 1 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY" in out
    cluster.run(namespace, share("next", 8))
    assert cluster.sees(namespace, "next") == cluster.assigned(namespace, "next")


def _grab(cluster: Cluster, namespace: str, name: str, size: str) -> str | None:
    out = cluster.exec(namespace, name, "sh", "-c", f"gpuview grab {size} || true")
    return out if "after 0 GiB" not in out else None


def test_a_pod_deleted_between_bind_and_allocate_leaves_its_gpu_free(cluster: Cluster, namespace: str) -> None:
    with cluster.kubelet_paused():
        cluster.create(namespace, share("gone", UNITS))
        eventually(lambda: cluster.pod(namespace, "gone")["spec"].get("nodeName"), "the pod is bound")
        cluster.api.delete("pod", "gone", namespace, by_force=True)
    cluster.run(namespace, share("one", UNITS), share("two", UNITS))
    assert cluster.sees(namespace, "one") != cluster.sees(namespace, "two")


def _inventory(cluster: Cluster) -> Inventory | None:
    text = (cluster.node()["metadata"].get("annotations") or {}).get(DEFAULT.inventory)
    return inventory_from_json(text) if text else None


def _orphans(cluster: Cluster) -> list[str]:
    found = _inventory(cluster)
    return [orphan.uid for orphan in found.orphans] if found else []


def test_a_pod_deleted_by_force_keeps_its_capacity_while_its_processes_run(cluster: Cluster, namespace: str) -> None:
    cluster.run(
        namespace, *(share(name, UNITS - 10, run=["gpuview", "hold", "60Gi"]) for name in ("undead", "neighbour"))
    )
    uid = cluster.pod(namespace, "undead")["metadata"]["uid"]
    with cluster.kubelet_paused():  # the process is not ended
        cluster.api.delete("pod", "undead", namespace, by_force=True)
        began = time.monotonic()
        eventually(lambda: _orphans(cluster) == [uid], "the node names the orphan")
        assert time.monotonic() - began < 10
        cluster.create(namespace, share("next", 20))
        eventually(
            lambda: any("no single GPU has enough free" in event for event in cluster.events(namespace, "next")),
            "an Event reports to the next pod that no GPU is free enough",
        )
        assert cluster.find("pod", "next", namespace)["spec"].get("nodeName") is None  # type: ignore[index]
    eventually(lambda: not _orphans(cluster), "the kubelet has ended the processes", timeout_s=120)
    cluster.ready(namespace, "next", timeout_s=120)
    assert cluster.sees(namespace, "next") == cluster.assigned(namespace, "next")


def test_a_node_that_is_made_again_has_its_inventory_within_five_seconds(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("steady", 8))
    node: dict[str, Any] = cluster.node()
    before, labels = _inventory(cluster), node["metadata"]["labels"]
    name, status = node["metadata"]["name"], node["status"]
    cluster.kubectl("delete", "node", name)
    cluster.kubectl.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    began = time.monotonic()
    eventually(lambda: _inventory(cluster) == before, "the new node has the inventory", timeout_s=60)
    took_s = time.monotonic() - began
    patch = json.dumps({"status": {"capacity": status["capacity"], "allocatable": status["allocatable"]}})
    cluster.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)
    cluster.restart_kubelet()  # else it reports no devices of a node that it did not register
    cluster.wait_for_gpus()
    assert took_s < 5


def test_a_removed_webhook_secret_and_ca_bundle_are_back_within_a_minute(cluster: Cluster, namespace: str) -> None:
    secret, kind, name = "tangram-webhook-tls", "mutatingwebhookconfiguration", "tangram-webhook"

    def bundle() -> str:
        found = cluster.find(kind, name)
        assert found is not None
        return str(found["webhooks"][0]["clientConfig"].get("caBundle", ""))

    before, bundle_before = cluster.find("secret", secret, NAMESPACE), bundle()
    assert before is not None
    cluster.kubectl("-n", NAMESPACE, "delete", "secret", secret)
    patch = json.dumps([{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}])
    cluster.kubectl("patch", kind, name, "--type=json", "-p", patch)
    began = time.monotonic()
    eventually(lambda: bundle() == bundle_before, "the bundle is right again", timeout_s=90)
    eventually(lambda: cluster.find("secret", secret, NAMESPACE), "the Secret is back", timeout_s=90)
    assert time.monotonic() - began < 60
    after = cluster.find("secret", secret, NAMESPACE)
    assert after is not None
    assert after["data"] == before["data"]
    cluster.run(namespace, share("next", 8))
