"""Pods that share GPUs: placed, given the UUID of their GPU, limited to their memory."""

from __future__ import annotations

import re

import pytest

from hack.waiting import eventually
from tests.e2e.cluster import Cluster, assigned_to
from tests.e2e.gpus import UNITS
from tests.e2e.objects import RESTRICTED, container, pod, share

GIB = re.compile(r": ([0-9.]+) GiB, of which")
FREE_GIB = re.compile(r"GiB, of which ([0-9.]+)")


def seen_gib(cluster: Cluster, namespace: str, name: str, inside: str | None = None) -> list[float]:
    """Sizes of the GPUs as CUDA reports them in the container."""
    return [float(size) for size in GIB.findall(cluster.exec(namespace, name, "gpuview", container=inside))]


def test_three_pods_share_one_gpu_and_each_sees_its_own_size(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("a", "8Gi", 30), share("b", "16Gi", 50), share("c", 4))
    assert [seen_gib(cluster, namespace, name) for name in "abc"] == [[8.0], [16.0], [4.0]]
    gpus = {name: cluster.sees(namespace, name) for name in "abc"}
    assert gpus["a"] == gpus["b"] == gpus["c"], "binpack puts all three on one GPU"


def test_a_pod_past_its_grant_gets_out_of_memory_and_its_neighbour_goes_on(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("neighbour", "8Gi", run=["gpuview", "hold", "6Gi"]))
    eventually(
        lambda: "holds 6.0 GiB" in cluster.log(namespace, "neighbour"),
        "the neighbour has its memory",
    )
    cluster.create(namespace, share("greedy", "8Gi", run=["gpuview", "grab", "12Gi"]))
    log = cluster.ended(namespace, "greedy", "Failed")
    assert "after 7 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY" in log
    assert cluster.pod(namespace, "neighbour")["status"]["phase"] == "Running"
    (free,) = FREE_GIB.findall(cluster.exec(namespace, "neighbour", "gpuview"))
    assert float(free) < 2.0, "it has its memory and two contexts"


def test_the_limit_is_the_containers_not_the_processes(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("two", "8Gi", run=["gpuview", "hold", "5Gi"]))
    eventually(lambda: "holds" in cluster.log(namespace, "two"), "the first process has its memory")
    with pytest.raises(Exception, match="after 1 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY"):
        cluster.exec(namespace, "two", "gpuview", "grab", "5Gi")


def test_8gi_and_8_are_the_same(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("bytes", "8Gi"), share("units", 8))
    limits = [cluster.pod(namespace, n)["spec"]["containers"][0]["resources"]["limits"] for n in ("bytes", "units")]
    assert limits[0] == limits[1] == {"tangram.sh/gpu-mem": "8"}
    assert seen_gib(cluster, namespace, "bytes") == seen_gib(cluster, namespace, "units") == [8.0]


def test_each_container_is_held_to_its_own_share(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, pod("many", container("one", mem=4, core=10), container("two", mem=6), container("none")))
    assert seen_gib(cluster, namespace, "many", "one") == [4.0]
    assert seen_gib(cluster, namespace, "many", "two") == [6.0]
    assert "libcuda.so.1" in cluster.exec(namespace, "many", "sh", "-c", "gpuview || true", container="none")


def test_an_init_container_and_a_sidecar_have_shares_too(cluster: Cluster, namespace: str) -> None:
    prepare = container("prepare", mem=8, run=["gpuview"])
    sidecar = container("sidecar", mem=2, restartPolicy="Always")
    cluster.run(namespace, pod("phases", container(mem=8), init=[prepare, sidecar]))
    log = cluster.log(namespace, "phases", "prepare")
    assert GIB.findall(log) == ["8.0"]
    assert seen_gib(cluster, namespace, "phases", "main") == [8.0]
    assert seen_gib(cluster, namespace, "phases", "sidecar") == [2.0]
    assert cluster.sees(namespace, "phases", "main") == cluster.assigned(namespace, "phases")


def test_a_pod_may_span_two_gpus(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("pair", "16Gi", 60, annotations={"tangram.sh/gpu-count": "2"}))
    assert seen_gib(cluster, namespace, "pair") == [8.0, 8.0]
    assert sorted(cluster.sees(namespace, "pair")) == sorted(cluster.assigned(namespace, "pair"))


def test_a_restricted_pod_with_no_capabilities_has_its_share(cluster: Cluster, namespace: str) -> None:
    cluster.make_namespace(namespace, **{"pod-security.kubernetes.io/enforce": "restricted"})
    cluster.run(namespace, share("nobody", "8Gi", securityContext=RESTRICTED))
    assert seen_gib(cluster, namespace, "nobody") == [8.0]
    assert cluster.exec(namespace, "nobody", "id", "-u").strip() == "65534"


def test_a_container_whose_root_is_read_only_has_its_grant(cluster: Cluster, namespace: str) -> None:
    cluster.make_namespace(namespace, **{"pod-security.kubernetes.io/enforce": "restricted"})
    cluster.run(namespace, share("frozen", "8Gi", securityContext=RESTRICTED | {"readOnlyRootFilesystem": True}))
    with pytest.raises(Exception, match="Read-only file system"):
        cluster.exec(namespace, "frozen", "touch", "/tmp/x")
    assert "container main" in cluster.exec(namespace, "frozen", "cat", "/.tangram/grant")
    assert seen_gib(cluster, namespace, "frozen") == [8.0]


def test_a_pod_that_fits_nowhere_stays_pending_with_an_event(cluster: Cluster, namespace: str) -> None:
    cluster.create(namespace, share("huge", f"{UNITS + 1}Gi"))
    events = eventually(
        lambda: [e for e in cluster.events(namespace, "huge") if e.startswith("FailedScheduling")],
        "a FailedScheduling event",
    )
    assert "no GPU of the node is large enough" in events[0]
    assert cluster.pod(namespace, "huge")["status"]["phase"] == "Pending"


def test_memory_and_core_are_always_on_the_same_gpu(cluster: Cluster, namespace: str) -> None:
    pods = [share(f"p{i}", 3 + i % 4, 5 + i) for i in range(12)]
    cluster.run(namespace, *pods)
    cluster.all_see_their_own(namespace, *(thing["metadata"]["name"] for thing in pods))
    assert cluster.kubelet_devices(namespace) == cluster.assigned_amounts(namespace), "I3"


@pytest.mark.timeout(900)
def test_a_hundred_pairs_of_same_size_pods_each_see_their_own_gpu(cluster: Cluster, namespace: str) -> None:
    for wave in range(10):
        pods = [share(f"w{wave}-{size}{twin}", size, run=["gpuview"]) for size in range(1, 11) for twin in "ab"]
        names = [thing["metadata"]["name"] for thing in pods]
        cluster.create(namespace, *pods)
        for ended, log in cluster.all_ended(namespace, *names, timeout_s=180):
            assert [uuid for uuid in assigned_to(ended) if uuid not in log] == [], log
        cluster.api.delete_all("pod", namespace)  # they have ended: no need to wait until they are gone
