"""Beside another device plugin and a DRA driver: what they offer is withdrawn from new pods of Tangram, whichever came first. Local cluster only.

The other device plugin is a process of this machine, and registers with the first node's kubelet as NVIDIA's does. The DRA driver is a ResourceSlice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hack.cluster.layout import Layout
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import UNITS
from tests.e2e.objects import share
from tests.other_device_plugin import OtherPluginProcess, other_plugin
from vgpu.api.codec import inventory_from_json
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.names import DEFAULT
from vgpu.health.owners import RETURN_S

WITHIN_S = 10.0
"""Specified: issue K."""
BACK_S = RETURN_S + 2 * WITHIN_S
"""A GPU is back by then."""
OTHERS = "nvidia.com/gpu"


def gpus(cluster: Cluster) -> tuple[Gpu, ...]:
    """Of the first node's inventory: two GPUs to share, and one with MIG instances."""
    return inventory(cluster).gpus


def inventory(cluster: Cluster) -> Inventory:
    return inventory_from_json(cluster.node()["metadata"]["annotations"][DEFAULT.inventory])


def clashes(gpu: Gpu, other: str = OTHERS) -> bool:
    """Does the inventory say who else has it?"""
    return any(one.reason == "GpuClash" and other in one.message for one in gpu.withdrawn)


def allocatable(cluster: Cluster, resource: str) -> int:
    return int(cluster.node()["status"]["allocatable"].get(resource, 0))


def reported(cluster: Cluster, reason: str, *words: str) -> None:
    """Wait for an Event of the node."""
    name = cluster.node()["metadata"]["name"]
    cluster.event(
        "default", name, lambda note: note.startswith(f"{reason}: ") and all(word in note for word in words),
        f"Event {reason} with {', '.join(words)}",
    )  # fmt: skip


def follows(what: Callable[[], bool], sentence: str) -> None:
    """Within the time that is specified."""
    began_s = time.monotonic()
    eventually(what, sentence)
    assert time.monotonic() - began_s < WITHIN_S, sentence


def comes_back(cluster: Cluster) -> None:
    """Every GPU is offered again."""
    eventually(
        lambda: (
            not any(gpu.withdrawn for gpu in gpus(cluster))
            and (allocatable(cluster, DEFAULT.gpu), allocatable(cluster, DEFAULT.gpu_mem)) == (2, 2 * UNITS)
        ),
        "every GPU is offered again", timeout_s=BACK_S,
    )  # fmt: skip


@pytest.fixture
def other(cluster: Cluster) -> Iterator[OtherPluginProcess]:
    """It offers nothing yet. Afterwards it is gone, and every GPU is back."""
    with other_plugin(Layout().node(1).own("/var/lib/kubelet/device-plugins"), OTHERS) as process:
        yield process
    comes_back(cluster)


def state_of(cluster: Cluster, namespace: str, name: str) -> tuple[Any, int]:
    status = cluster.pod(namespace, name)["status"]["containerStatuses"][0]
    return status["state"]["running"]["startedAt"], status["restartCount"]


def test_gpus_that_another_plugin_begins_to_offer_are_withdrawn_and_come_back_when_it_goes(
    cluster: Cluster, namespace: str, other: OtherPluginProcess
) -> None:
    cluster.run(namespace, share("steady", 8, run=["gpuview", "hold", "5Gi"]))
    (used,) = cluster.assigned(namespace, "steady")
    before = state_of(cluster, namespace, "steady")
    clash, free = sorted(gpus(cluster)[:2], key=lambda gpu: used not in gpu.uuid)
    mig = gpus(cluster)[2]

    def now(uuid: str) -> Gpu:
        found = inventory(cluster).gpu(uuid)
        assert found is not None
        return found

    other.offer(clash.uuid)
    follows(
        lambda: allocatable(cluster, DEFAULT.gpu) == 1 and allocatable(cluster, DEFAULT.gpu_mem) == UNITS + 8,
        "the kubelet has the free units of one GPU, and of the other those in use",
    )
    eventually(lambda: clashes(now(clash.uuid)), "the inventory names the other plugin")
    reported(cluster, "GpuWithdrawn", clash.uuid, OTHERS)
    cluster.run(namespace, share("new", UNITS))
    assert cluster.assigned(namespace, "new") == [free.uuid.removeprefix("GPU-")]
    cluster.create(namespace, share("waits", 8))
    cluster.event(namespace, "waits", lambda note: "FailedScheduling" in note, "no GPU is left for it")
    cluster.delete(namespace, "new")

    other.offer(clash.uuid, str(free.index), f"{mig.instances[0].uuid}::0")
    follows(
        lambda: allocatable(cluster, DEFAULT.gpu) == 0 and allocatable(cluster, DEFAULT.mig("1g.10gb")) == 0,
        "a GPU by its index, and one by a replica of an instance",
    )
    eventually(lambda: all(map(clashes, gpus(cluster))), "the inventory names the other plugin at each")
    assert "holds" in cluster.log(namespace, "steady")
    assert state_of(cluster, namespace, "steady") == before

    other.end()
    comes_back(cluster)
    reported(cluster, "GpuOffered", clash.uuid)
    cluster.ready(namespace, "waits")
    assert state_of(cluster, namespace, "steady") == before


def test_a_gpu_of_a_plugin_that_came_first_is_not_offered(
    cluster: Cluster, namespace: str, other: OtherPluginProcess
) -> None:
    first, second, _ = gpus(cluster)
    other.offer(f"{first.uuid}::0", f"{first.uuid}::1")
    cluster.restart_component("node", "daemonset/tangram-node")
    eventually(lambda: clashes(gpus(cluster)[0]), "the first GPU is withdrawn")
    eventually(lambda: allocatable(cluster, DEFAULT.gpu) == 1, "one GPU is offered")
    cluster.run(namespace, share("a", 40), share("b", 40))
    for name in ("a", "b"):
        assert cluster.assigned(namespace, name) == [second.uuid.removeprefix("GPU-")]


def test_a_gpu_that_the_dra_driver_offers_is_withdrawn(cluster: Cluster, namespace: str) -> None:
    first, second, _ = gpus(cluster)
    node = cluster.node()["metadata"]["name"]
    thing = {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "e2e-beside"},
        "spec": {
            "driver": "gpu.nvidia.com", "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": first.uuid}}}],
        },
    }  # fmt: skip
    cluster.api.create(thing)
    try:
        follows(lambda: allocatable(cluster, DEFAULT.gpu) == 1, "the kubelet has one GPU")
        eventually(lambda: clashes(gpus(cluster)[0], "gpu.nvidia.com"), "the inventory names the driver")
        reported(cluster, "GpuWithdrawn", first.uuid, "gpu.nvidia.com")
        cluster.run(namespace, share("a", 40), share("b", 40))
        assert {one for name in "ab" for one in cluster.assigned(namespace, name)} == {second.uuid.removeprefix("GPU-")}
    finally:
        cluster.api.delete("resourceslice", "e2e-beside")
    comes_back(cluster)
