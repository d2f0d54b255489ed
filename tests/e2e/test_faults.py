"""Parts that die, restart, or lose a message, and what becomes of running and starting pods."""

from __future__ import annotations

from hack.waiting import eventually
from tests.e2e.cards import UNITS
from tests.e2e.cluster import Cluster
from tests.e2e.objects import share


def test_a_container_restarted_in_place_keeps_its_gpu(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("phoenix", 8, restartPolicy="Always"))
    before = cluster.sees(namespace, "phoenix")
    cluster.exec(namespace, "phoenix", "sh", "-c", "kill -TERM 1")
    eventually(
        lambda: cluster.pod(namespace, "phoenix")["status"]["containerStatuses"][0]["restartCount"] >= 1,
        "the container restarts",
    )
    cluster.ready(namespace, "phoenix")
    assert cluster.sees(namespace, "phoenix") == before == cluster.assigned(namespace, "phoenix")


def test_a_killed_process_gives_its_memory_back(cluster: Cluster, namespace: str) -> None:
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


def test_restarting_plugin_and_arbiter_disturbs_nobody(cluster: Cluster, namespace: str) -> None:
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


def test_restarting_the_kubelet_disturbs_nobody(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("steady", 8))
    before = cluster.sees(namespace, "steady")
    cluster.restart_kubelet()
    cluster.wait_for_gpus()
    assert cluster.pod(namespace, "steady")["status"]["containerStatuses"][0]["restartCount"] == 0
    cluster.run(namespace, share("next", 8))
    assert cluster.sees(namespace, "steady") == before
    assert cluster.sees(namespace, "next") == cluster.assigned(namespace, "next")


def test_a_pod_deleted_between_bind_and_allocate_leaves_its_gpu_free(cluster: Cluster, namespace: str) -> None:
    with cluster.kubelet_paused():
        cluster.create(namespace, share("gone", UNITS))
        eventually(lambda: cluster.pod(namespace, "gone")["spec"].get("nodeName"), "the pod is bound")
        cluster.kubectl("-n", namespace, "delete", "pod", "gone", "--grace-period=0", "--force")
    cluster.run(namespace, share("one", UNITS), share("two", UNITS))
    assert cluster.sees(namespace, "one") != cluster.sees(namespace, "two")


def test_pods_are_placed_right_while_the_extender_keeps_dying(cluster: Cluster, namespace: str) -> None:
    names = [f"p{i}" for i in range(12)]
    for name in names:
        cluster.create(namespace, share(name, 8, run=["gpuview", "view", "--then-wait"]))
        if name in ("p3", "p7"):
            cluster.restart_component("scheduler", "deployment/tangram-scheduler")
    for name in names:
        cluster.ready(namespace, name, timeout_s=180)
        assert cluster.sees(namespace, name) == cluster.assigned(namespace, name)
    held: dict[str, int] = {}
    for name in names:
        (uuid,) = cluster.assigned(namespace, name)
        held[uuid] = held.get(uuid, 0) + 8
    assert max(held.values()) <= UNITS


def test_helm_upgrade_leaves_running_pods_alone(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("steady", 8, run=["gpuview", "hold", "5Gi"]))
    started = cluster.pod(namespace, "steady")["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    cluster.upgrade({"podAnnotations": {"upgraded": "yes"}})
    status = cluster.pod(namespace, "steady")["status"]["containerStatuses"][0]
    assert (status["state"]["running"]["startedAt"], status["restartCount"]) == (started, 0)
    cluster.run(namespace, share("next", 8))
    assert cluster.sees(namespace, "next") == cluster.assigned(namespace, "next")
