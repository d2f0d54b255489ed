"""examples/fake-gpu/08-many-models on a node: three servers on a GPU that has room for one take turns, and none of their memory is lost.

The GPU is short by a pod that uses most of it. Every answer says whether all cells of its server's weights are right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hack.kubectl import ROOT, CommandFailed
from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.objects import container, pod

BURST: dict[str, Any] = {
    "enabled": True,
    "max": {"*": "2Gi"},
    "hostPool": "2Gi",
    "hostReserve": "1Gi",
    # GPU memory of the fake driver is host memory. The kernel charges it to the copier, which touches a block first when it comes back
    "pool": {"overhead": "3Gi"},
}
EXAMPLE = "examples/fake-gpu/08-many-models"
CLIENT = (ROOT / "examples/08-many-models/client.py").read_text()
SERVERS = {"latency-critical": "chat", "standard": "search", "best-effort": "batch"}
ANNOTATION = "tangram.sh/gpu-mem-burst"
BURST_FILES = "cat /var/lib/tangram/grants/*/burst"
RECORDS = "cat /var/lib/tangram/arbiter/swap/*.swap.json"
REMOVE_POOL = "rm /pool/tmpfs/*.pool"

Client = Callable[..., str]


@pytest.fixture(scope="module")
def models(pooled: Cluster) -> Iterator[str]:
    """The namespace in which the three servers are ready. Afterwards the pool's files are gone, which would keep their memory."""
    name = "e2e-many-models"
    pooled.pool_pod()
    pooled.make_namespace(name)
    pooled.kubectl("-n", name, "apply", "-k", EXAMPLE)
    pooled.ready(name, "ballast", *SERVERS.values(), timeout_s=120)
    yield name
    pooled.drop_namespaces(name)
    pooled.exec(NAMESPACE, pooled.pool_pod(), "sh", "-c", REMOVE_POOL, container="pool")


@pytest.fixture
def client(pooled: Cluster, models: str) -> Client:
    """Runs the example's client in the cluster; returns what it printed. It fails if a request fails or a cell is wrong."""
    servers = [f"{name}={pooled.pod(models, pod)['status']['podIP']}:8000" for name, pod in SERVERS.items()]

    def run(*, seconds: int, rate: float) -> str:
        words = ["--seconds", str(seconds), "--rate", str(rate), "--tokens", "2", *servers]
        return pooled.exec(models, "ballast", "python3", "-c", CLIENT, *words)

    return run


def in_arbiter(cluster: Cluster, command: str) -> str:
    return cluster.exec(NAMESPACE, cluster.node_pod(), "sh", "-c", command, container="arbiter")


def swaps_out(cluster: Cluster) -> int:
    return cluster.api.log(NAMESPACE, cluster.node_pod(), "arbiter").count('"event": "swap out"')


def all_answered(printed: str) -> bool:
    rows = [line.split() for line in printed.splitlines()[1:]]
    return [row[0] for row in rows] == list(SERVERS) and all(int(row[1]) > 0 and row[2] == "0" for row in rows)


def test_they_share_a_gpu_and_each_sees_its_limit(pooled: Cluster, models: str) -> None:
    gpus = {tuple(pooled.assigned(models, name)) for name in ("ballast", *SERVERS.values())}
    assert len(gpus) == 1
    limits = re.findall(r"mib=(\d+)", in_arbiter(pooled, BURST_FILES))
    assert limits == ["1450"] * 3


def test_all_requests_are_answered_while_memory_moves(pooled: Cluster, models: str, client: Client) -> None:
    before = swaps_out(pooled)
    printed = client(seconds=20, rate=0.25)
    assert all_answered(printed), printed
    assert swaps_out(pooled) >= before + 2
    nobody_ended(pooled, models)


def test_requests_go_on_when_the_pool_has_a_new_pod(pooled: Cluster, models: str, client: Client) -> None:
    eventually(lambda: '"away"' in in_arbiter(pooled, RECORDS), "memory is in the host pool", timeout_s=30)
    old = pooled.pool_pod()
    pooled.api.delete("pod", old, NAMESPACE)
    printed = client(seconds=8, rate=0.5)
    assert all_answered(printed), printed
    assert pooled.pool_pod(without=old)
    nobody_ended(pooled, models)


def test_the_limit_of_a_running_pod_may_be_edited(pooled: Cluster, models: str, client: Client) -> None:
    for mib in (1400, 1500):
        edit(pooled, models, f"{mib}Mi")
        eventually(
            lambda mib=mib: f"mib={mib} " in in_arbiter(pooled, BURST_FILES), f"a limit of {mib} MiB", timeout_s=30
        )
        eventually(
            lambda mib=mib: f"mib={mib} " in own_limits(pooled, models), f"the container has {mib} MiB", timeout_s=30
        )
    with pytest.raises(CommandFailed, match="at most 2Gi in namespace e2e-many-models"):
        edit(pooled, models, "3Gi")
    printed = client(seconds=4, rate=1)
    assert all_answered(printed), printed
    nobody_ended(pooled, models)


@pytest.mark.parametrize(
    "limits",
    [{"gpu": 1}, {"mig": "1g.10gb"}, {"mem": "3Gi"}],
    ids=["a whole GPU", "a MIG instance", "more than its limit"],
)
def test_a_burst_that_cannot_be_is_refused(pooled: Cluster, namespace: str, limits: dict[str, Any]) -> None:
    answer = pooled.refused(namespace, pod("a", container(**limits), annotations={ANNOTATION: "2Gi"}))
    assert f"annotation {ANNOTATION}" in answer


def own_limits(cluster: Cluster, namespace: str) -> str:
    """The limits as the container's processes can read them."""
    return cluster.exec(namespace, "batch", "cat", "/.tangram/burst")


def edit(cluster: Cluster, namespace: str, limit: str) -> None:
    cluster.api.patch("pod", "batch", namespace, {"metadata": {"annotations": {ANNOTATION: limit}}})


def nobody_ended(cluster: Cluster, namespace: str) -> None:
    """No container ended since the pods were made, and no pod is being deleted."""
    pods = cluster.api.listed("pod", namespace)
    assert len(pods) == 4
    assert [one["status"]["containerStatuses"][0]["restartCount"] for one in pods] == [0] * 4
    assert not any("deletionTimestamp" in one["metadata"] for one in pods)
