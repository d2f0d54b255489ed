"""Each folder of examples/ as its README says: one command, the manifests unchanged, and the output that is promised.

Public images are those of the same names that `hack.images` builds. 07-gang needs an API that this cluster does not serve. 08-many-models is
tests/e2e/test_many_models.py. tests/contract/test_examples.py compares the folders with those that are named here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, Final

import pytest

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster, is_ready

FOLDER: Final = "examples"
SIZE: Final = re.compile(r": ([0-9.]+) GiB, of which")
READ: Final = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=10).read().decode())"
"""A GET from inside a container, which has no curl."""
TEAM: Final = "team"
"""The namespace that 05-team-quota makes."""


def apply(cluster: Cluster, namespace: str, example: str) -> None:
    cluster.kubectl("-n", namespace, "apply", "-k", f"{FOLDER}/{example}")


def sees_gib(cluster: Cluster, namespace: str, pod: str, container: str = "main") -> list[str]:
    """Sizes of the GPUs that gpuview shows."""
    return SIZE.findall(cluster.exec(namespace, pod, "gpuview", container=container))


def new_pod(cluster: Cluster, namespace: str, app: str, *, without: str = "", phase: str = "") -> str:
    """Name of the pod of an app that is ready, or in a phase. `without`: the UID of one that it must not be."""

    def found(seen: dict[str, dict[str, Any]]) -> str | None:
        for name, pod in seen.items():
            labels, uid = pod["metadata"].get("labels", {}), pod["metadata"]["uid"]
            there = pod["status"].get("phase") == phase if phase else is_ready(pod)
            if labels.get("app") == app and uid != without and there and "deletionTimestamp" not in pod["metadata"]:
                return name
        return None

    return cluster.api.until("pod", namespace, found, f"a pod of {app}", timeout_s=90)


def uid(cluster: Cluster, namespace: str, pod: str) -> str:
    return str(cluster.pod(namespace, pod)["metadata"]["uid"])


def test_01_shares_and_03_no_single_gpu(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "01-shares")
    cluster.ready(namespace, "chat", "embed", "notebook")
    assert [sees_gib(cluster, namespace, pod) for pod in ("chat", "embed", "notebook")] == [["8.0"], ["16.0"], ["16.0"]]
    apply(cluster, namespace, "03-no-single-gpu")
    cluster.ready(namespace, "train")
    assert cluster.assigned(namespace, "train") != cluster.assigned(namespace, "chat")
    # a GPU of this node is in MIG mode: that is the reason which is given here
    cluster.event(
        namespace,
        "validate",
        lambda event: event.startswith("FailedScheduling") and ("no single GPU" in event or "in MIG mode" in event),
        "why validate waits",
    )
    cluster.kubectl("-n", namespace, "delete", "pod", "train")
    cluster.ready(namespace, "validate")


def test_02_past_the_grant(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "02-past-the-grant")
    log = cluster.ended(namespace, "greedy", "Failed")
    assert "requested 12.0 GiB: after 7 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY; released them" in log


def test_04_no_cluster(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "04-no-cluster")
    assert SIZE.findall(cluster.ended(namespace, "train")) == ["8.0"]


@pytest.fixture
def team(cluster: Cluster) -> Iterator[str]:
    """The namespace of 05-team-quota with its quota, which counts."""
    cluster.kubectl("apply", "-f", f"{FOLDER}/05-team-quota/namespace.yaml")
    cluster.api.until("serviceaccount", TEAM, lambda seen: "default" in seen, "its service account")
    cluster.api.until(
        "resourcequota", TEAM, lambda seen: seen.get("team", {}).get("status", {}).get("used"), "the quota is counted"
    )
    yield TEAM
    cluster.drop_namespaces(TEAM)


def test_05_team_quota(cluster: Cluster, team: str) -> None:
    cluster.kubectl("apply", "-k", f"{FOLDER}/05-team-quota")
    cluster.ready(team, "share")
    described = cluster.kubectl("-n", team, "describe", "quota", "team")
    rows = [line.split() for line in described.splitlines()]
    assert ["requests.tangram.sh/gpu-mem", "8", "16"] in rows, described
    assert ["requests.tangram.sh/gpu-core", "30", "60"] in rows, described
    cluster.kubectl("apply", "-f", f"{FOLDER}/05-team-quota/defaults.yaml")


def test_06_gpu_time(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "fake-gpu/06-gpu-time")
    pods = ("steady", "bulk", "live")
    cluster.ready(namespace, *pods)
    for pod in pods:
        eventually(lambda pod=pod: "kernels of" in cluster.log(namespace, pod), f"{pod} computes")
    top = cluster.exec(NAMESPACE, cluster.node_pod(), "tangramctl", "top", "--once", container="arbiter")
    assert [pod for pod in pods if pod not in top] == [], top


def test_10_jupyter(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "10-jupyter")
    cluster.ready(namespace, "jupyter")
    assert "token=" in cluster.log(namespace, "jupyter")
    assert sees_gib(cluster, namespace, "jupyter") == ["8.0"]


def test_11_inference_server(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "11-inference-server")
    pod = new_pod(cluster, namespace, "llm")
    assert sees_gib(cluster, namespace, pod) == ["12.0"]
    models = cluster.exec(namespace, pod, "python3", "-c", READ, "http://127.0.0.1:8000/v1/models", container="main")
    assert "Qwen/Qwen2.5-0.5B-Instruct" in models


@pytest.fixture
def volume(cluster: Cluster) -> Iterator[str]:
    """A volume for a claim that names no StorageClass: this cluster has none that would make one."""
    name = f"e2e-checkpoints-{os.getpid()}"
    folder = f"/tmp/{name}"
    cluster.kubectl.apply(
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": folder, "type": "DirectoryOrCreate"},
            },
        }
    )  # fmt: skip
    yield name
    cluster.kubectl("delete", "pv", name, "--wait=false")
    shutil.rmtree(folder, ignore_errors=True)


def test_12_training(cluster: Cluster, volume: str, namespace: str) -> None:
    apply(cluster, namespace, "12-training")
    first = new_pod(cluster, namespace, "train", phase="Running")
    known = uid(cluster, namespace, first)
    eventually(lambda: "checkpoint at step 50," in cluster.log(namespace, first), f"a checkpoint on volume {volume}")
    assert "sees 8.0 GiB" in cluster.log(namespace, first)
    cluster.api.delete("pod", first, namespace)
    second = new_pod(cluster, namespace, "train", without=known, phase="Running")
    eventually(lambda: "resumed at step" in cluster.log(namespace, second), "it continues from the checkpoint")
    (step,) = re.findall(r"resumed at step (\d+)", cluster.log(namespace, second))
    assert int(step) >= 50


def test_13_sidecar(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "13-sidecar")
    cluster.ready(namespace, "pair")
    assert sees_gib(cluster, namespace, "pair", "main") == ["8.0"]
    assert sees_gib(cluster, namespace, "pair", "encoder") == ["4.0"]
    printed = cluster.exec(namespace, "pair", "sh", "-c", "gpuview || true", container="proxy")
    assert "no CUDA driver in this container" in printed


def test_14_statefulset(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "14-statefulset")
    cluster.ready(namespace, "embed-0", "embed-1")
    assert [sees_gib(cluster, namespace, pod) for pod in ("embed-0", "embed-1")] == [["8.0"], ["8.0"]]
    assert cluster.assigned(namespace, "embed-0") != cluster.assigned(namespace, "embed-1")
    known = uid(cluster, namespace, "embed-0")
    cluster.api.delete("pod", "embed-0", namespace)
    cluster.api.until(
        "pod",
        namespace,
        lambda seen: "embed-0" in seen and seen["embed-0"]["metadata"]["uid"] != known and is_ready(seen["embed-0"]),
        "another replica of the same name",
        timeout_s=90,
    )
    assert sees_gib(cluster, namespace, "embed-0") == ["8.0"]


def test_15_dcgm_and_tangram_name_a_gpu_alike(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "15-dcgm")
    cluster.ready(namespace, "metered")
    (uuid,) = cluster.assigned(namespace, "metered")
    # DCGM's label UUID is what NVML says
    listed = cluster.exec(namespace, "metered", "nvidia-smi", "-L", container="main")
    assert f"GPU-{uuid}" in listed
    wanted = f'gpu_uuid="GPU-{uuid}"'
    eventually(
        lambda: [line for line in arbiter_metrics(cluster) if wanted in line and f'namespace="{namespace}"' in line],
        "the container's limit with the label gpu_uuid",
    )


def arbiter_metrics(cluster: Cluster) -> list[str]:
    """Lines of `tangram_container_gpu_memory_limit_bytes` that the arbiter serves."""
    program = (
        "import sys, urllib.request as r; q = r.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]});"
        "print(r.urlopen(q, timeout=10).read().decode())"
    )
    text = cluster.exec(
        NAMESPACE, cluster.node_pod(), "python3", "-c", program, "http://127.0.0.1:9403/metrics", cluster.metrics_token(),
        container="arbiter",
    )  # fmt: skip
    return [line for line in text.splitlines() if line.startswith("tangram_container_gpu_memory_limit_bytes")]
