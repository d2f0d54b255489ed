"""One GPU is taken out of service and comes back, as the page docs/operations/maintenance.md says it step by step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster, is_ready
from tests.e2e.gpus import UNITS
from tests.e2e.objects import share
from vgpu.api.codec import inventory_from_json
from vgpu.api.inventory import Gpu
from vgpu.api.names import DEFAULT

DRAIN_S = 120
"""Until the drain of one GPU is over. Guessed."""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tangramctl", *words]


def environment(cluster: Cluster) -> dict[str, str]:
    return dict(cluster.kubectl.environment())


def ctl(cluster: Cluster, *words: str) -> str:
    """What tangramctl prints, with the cluster's kubectl."""
    done = subprocess.run(
        command(*words), env=environment(cluster), capture_output=True, text=True, timeout=DRAIN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def gpus(cluster: Cluster) -> dict[str, Gpu]:
    """By UUID."""
    text = cluster.node()["metadata"]["annotations"][DEFAULT.inventory]
    return {gpu.uuid.partition("-")[2]: gpu for gpu in inventory_from_json(text).gpus}


def allocatable(cluster: Cluster) -> int:
    return int(cluster.node()["status"]["allocatable"][DEFAULT.gpu_mem])


def reported(cluster: Cluster, uuid: str) -> set[str]:
    """Reasons of the Events about a GPU."""
    events = cluster.api.listed("event", "default")
    return {one["reason"] for one in events if uuid in (one.get("note") or "")}


def opens_gpu(pid: Path, minor: int) -> bool:
    """Has a process the device file of the GPU open? One that ends meanwhile has not."""
    try:
        targets = [str(fd.readlink()) for fd in (pid / "fd").iterdir()]
    except OSError:
        return False
    return any(target.endswith(f"/nvidia{minor}") for target in targets)


@pytest.fixture
def gpu(cluster: Cluster) -> Iterator[str]:
    """The index of the GPU that the test cordons. It is in service again afterwards."""
    name = cluster.node()["metadata"]["name"]
    yield "0"
    ctl(cluster, "uncordon", name, "0")
    eventually(lambda: allocatable(cluster) == 2 * UNITS, "the node has its capacity again", timeout_s=60)


def test_a_gpu_is_cordoned_drained_released_and_comes_back(cluster: Cluster, namespace: str, gpu: str) -> None:
    node = cluster.node()["metadata"]["name"]
    uuid = next(one for one, found in gpus(cluster).items() if found.index == int(gpu))
    chosen = {DEFAULT.gpu_uuid: f"GPU-{uuid}"}

    cluster.run(namespace, share("running", 8, annotations=chosen))
    assert cluster.assigned(namespace, "running") == [uuid]
    before = cluster.pod(namespace, "running")["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]

    assert "is cordoned" in ctl(cluster, "cordon", node, gpu, "--reason", "end-to-end test")
    described = cluster.kubectl("describe", "node", node)
    assert DEFAULT.cordoned_gpus in described
    assert "end-to-end test" in described
    eventually(lambda: gpus(cluster)[uuid].cordon == "cordoned", "the plugin knows of the cordon")
    eventually(lambda: allocatable(cluster) == UNITS + 8, "only what is in use of the GPU is allocatable")

    cluster.create(namespace, share("refused", 8, annotations=chosen))
    event = cluster.event(
        namespace, "refused", lambda text: "cordoned" in text, "an Event names the cordon", timeout_s=60
    )
    assert event.startswith("FailedScheduling")
    cluster.run(namespace, share("elsewhere", 8))
    assert cluster.assigned(namespace, "elsewhere") != [uuid]

    cluster.restart_kubelet()
    eventually(lambda: allocatable(cluster) == UNITS + 8, "the plugin has registered again", timeout_s=60)
    running = cluster.pod(namespace, "running")
    assert is_ready(running), "the kubelet admits it again: its devices are Healthy"
    assert running["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] == before

    budget = {
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "keeps", "namespace": namespace},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"suite": "e2e"}}},
    }  # fmt: skip
    cluster.kubectl.create(budget)
    with subprocess.Popen(
        command("cordon", node, gpu, "--drain", "--timeout-s", str(DRAIN_S)),
        env=environment(cluster),
        stdout=subprocess.PIPE,
        text=True,
    ) as drain:
        assert drain.stdout is not None
        assert any("not evicted yet: disruption budget keeps refuses" in line for line in drain.stdout)
        assert "deletionTimestamp" not in cluster.pod(namespace, "running")["metadata"]
        cluster.kubectl("-n", namespace, "delete", "poddisruptionbudget", "keeps")
        assert any("is released: no pod of Tangram has it" in line for line in drain.stdout)
        assert drain.wait(DRAIN_S) == 0
    assert cluster.find("pod", "running", namespace) is None
    assert is_ready(cluster.pod(namespace, "elsewhere")), "a pod on another GPU is not touched"

    released = gpus(cluster)[uuid]
    assert released.cordon == "released"
    holders = [path.name for path in Path("/proc").glob("[0-9]*") if opens_gpu(path, released.minor)]
    assert not holders, (
        "no process has the GPU open, so that it can be reset (the fake driver opens none: a real one does)"
    )
    assert "released since" in ctl(cluster, "gpus", node)

    assert "is no longer cordoned" in ctl(cluster, "uncordon", node, gpu)
    eventually(lambda: gpus(cluster)[uuid].offered, "the GPU has passed its self-test", timeout_s=60)
    eventually(lambda: allocatable(cluster) == 2 * UNITS, "the capacity is back", timeout_s=60)
    cluster.ready(namespace, "refused", timeout_s=120)
    assert cluster.assigned(namespace, "refused") == [uuid]
    log = cluster.kubectl("-n", NAMESPACE, "logs", cluster.node_pod(), "-c", "plugin")
    assert "a GPU was tried" in log
    steps = {"GpuCordoned", "GpuReleased", "GpuSelfTest", "GpuUncordoned"}
    eventually(lambda: steps <= reported(cluster, uuid), "an Event reports each step")
