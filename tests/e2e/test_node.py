"""What an admin sees after `helm install`."""

from __future__ import annotations

import json

from hack.stack import NAMESPACE
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import UNITS


def test_the_node_offers_memory_core_whole_gpus_and_each_mig_profile(cluster: Cluster) -> None:
    status = cluster.node()["status"]
    # The kubelet keeps the capacity of a resource for 5 minutes after its plugin ended: other tests offer other profiles.
    gone = {name for name, count in status["allocatable"].items() if count == "0"}
    for part in ("capacity", "allocatable"):
        offered = {k: v for k, v in status[part].items() if k.startswith("tangram.sh/") and k not in gone}
        assert offered == {
            "tangram.sh/gpu": "2",
            "tangram.sh/gpu-core": "200",
            "tangram.sh/gpu-mem": str(2 * UNITS),
            "tangram.sh/mig-1g.10gb": "2",
            "tangram.sh/mig-3g.40gb": "1",
        }


def test_describe_node_shows_the_resources(cluster: Cluster) -> None:
    described = cluster.kubectl("describe", "node", cluster.node()["metadata"]["name"])
    assert f"tangram.sh/gpu-mem:      {2 * UNITS}" in described or f"tangram.sh/gpu-mem: {2 * UNITS}" in " ".join(
        described.split()
    )


def test_the_inventory_annotation_lists_every_gpu_and_instance(cluster: Cluster) -> None:
    document = json.loads(cluster.node()["metadata"]["annotations"]["tangram.sh/inventory"])
    gpus = document["inventory"]["cards"]
    assert [gpu["mig"] for gpu in gpus] == [False, False, True]
    assert sorted(i["profile"] for i in gpus[2]["instances"]) == ["1g.10gb", "1g.10gb", "3g.40gb"]


def test_helm_test_passes(cluster: Cluster) -> None:
    printed = cluster.kubectl.helm("test", "tangram", "-n", NAMESPACE, "--timeout", "2m")
    assert "Succeeded" in printed
