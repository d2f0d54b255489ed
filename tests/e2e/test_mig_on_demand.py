"""One node with fractions, whole GPUs, declared MIG instances and instances on demand at once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hack.stack import install_fake_driver
from hack.waiting import eventually
from tests.e2e.cluster import UUID, Cluster
from tests.e2e.gpus import GPUS, UNITS
from tests.e2e.objects import container, pod, share
from vgpu.api.codec import assignment_from_json
from vgpu.api.mig_device import slot_of_device

MIXED = "gpu a100-80 count=4\nmig 2 1g.10gb 1g.10gb 3g.40gb\nmig 3\n"
"""Two GPUs to share or to give whole, one with declared instances, one in MIG mode without any."""
ALL_FREE = {
    "gpu": 2, "gpu-mem": 2 * UNITS, "mig-1g.10gb": 2 + 7, "mig-2g.20gb": 3, "mig-3g.40gb": 1 + 2, "mig-4g.40gb": 1, "mig-7g.80gb": 1,
}  # fmt: skip
"""Declared instances and slots together."""
IDLE_S = 2


@pytest.fixture(scope="module")
def mixed(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with these GPUs and MIG on demand; afterwards as the other tests need it."""
    install_fake_driver(cluster.kubectl, MIXED)
    try:
        cluster.upgrade({"node": {"migOnDemand": True, "migIdleSeconds": IDLE_S}})
        cluster.wait_for_gpus("tangram.sh/mig-7g.80gb")
        yield cluster
    finally:
        install_fake_driver(cluster.kubectl, GPUS)
        cluster.upgrade({})
        cluster.wait_for_gpus("tangram.sh/mig-1g.10gb")


def offered(cluster: Cluster) -> dict[str, int]:
    """What the node has to give by resource, those of 0 left out."""
    allocatable = cluster.node()["status"]["allocatable"]
    found = {
        key.removeprefix("tangram.sh/"): int(value)
        for key, value in allocatable.items()
        if key.startswith("tangram.sh/")
    }
    return {key: value for key, value in found.items() if value}


def instances(cluster: Cluster) -> set[str]:
    """UUIDs of the MIG instances that the last GPU has, as the inventory lists them, without their prefix."""
    document = json.loads(cluster.node()["metadata"]["annotations"]["tangram.sh/inventory"])
    last = document["inventory"]["cards"][-1]
    assert last["on_demand"]
    return {one["uuid"].removeprefix("MIG-") for one in last["instances"]}


def on_demand(cluster: Cluster, namespace: str, name: str) -> bool:
    """Was it assigned a slot, and no instance that was declared?"""
    assignment = assignment_from_json(cluster.pod(namespace, name)["metadata"]["annotations"]["tangram.sh/assignment"])
    return all(slot_of_device(one) for one in assignment.uuids("main"))


def test_all_kinds_run_on_one_node(mixed: Cluster, namespace: str) -> None:
    eventually(lambda: ALL_FREE.items() <= offered(mixed).items(), f"the node offers {ALL_FREE}")
    mixed.run(
        namespace, share("part", "8Gi"), pod("whole", container(gpu=1)), pod("declared", container(mig="1g.10gb")),
        pod("half", container(mig="2g.20gb")), timeout_s=120,
    )  # fmt: skip
    for name in ("part", "whole", "declared"):
        assert mixed.sees(namespace, name) == mixed.assigned(namespace, name)
    assert not on_demand(mixed, namespace, "declared")
    assert on_demand(mixed, namespace, "half")
    (uuid,) = eventually(lambda: instances(mixed), "the instance in the inventory")
    assert mixed.sees(namespace, "half") == [uuid]
    listed = mixed.exec(namespace, "half", "nvidia-smi", "-L").splitlines()
    assert [UUID.findall(line) for line in listed if "MIG-" in line] == [[uuid]]
    assert eventually(lambda: "mig-7g.80gb" not in offered(mixed), "the profile that fits no more leaves the node")


def test_an_instance_goes_after_its_pod_and_a_profile_that_it_ruled_out_can_be_had(
    mixed: Cluster, namespace: str
) -> None:
    mixed.run(namespace, pod("small", container(mig="4g.40gb")))
    mixed.create(namespace, pod("all", container(mig="7g.80gb")))
    mixed.event(namespace, "all", lambda text: "FailedScheduling" in text, "it waits")
    mixed.delete(namespace, "small")
    mixed.ready(namespace, "all", timeout_s=180)
    (uuid,) = mixed.sees(namespace, "all")
    mixed.delete(namespace, "all")
    eventually(lambda: uuid not in instances(mixed), "the idle instance is removed", timeout_s=60)


def test_a_restarted_node_pod_keeps_the_instance_of_a_running_pod(mixed: Cluster, namespace: str) -> None:
    mixed.run(namespace, pod("stays", container(mig="3g.40gb", run=["gpuview", "view", "--then-wait"])))
    mixed.run(namespace, pod("second", container(mig="3g.40gb")), pod("ends", container(mig="2g.20gb")))
    names = [name for name in ("stays", "second", "ends") if on_demand(mixed, namespace, name)]
    assert "ends" in names
    seen = {name: mixed.sees(namespace, name) for name in names}
    mixed.restart_component("node", "daemonset/tangram-node")
    mixed.wait_for_gpus("tangram.sh/mig-2g.20gb")
    mixed.delete(namespace, "ends")
    eventually(lambda: not instances(mixed) & set(seen["ends"]), "its instance is removed", timeout_s=60)
    for name in set(names) - {"ends"}:
        assert mixed.sees(namespace, name) == seen[name]
        assert set(seen[name]) <= instances(mixed)


def test_a_share_and_an_instance_in_one_container_are_denied_with_the_reason(mixed: Cluster, namespace: str) -> None:
    both = container(mem="4Gi", mig="1g.10gb")
    assert "a container takes either a share" in mixed.refused(namespace, pod("both", both))
