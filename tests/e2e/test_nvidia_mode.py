"""Access mode `nvidia`: NVIDIA's own container runtime reads the variable that the kubelet resolves from the pod's annotation.

The runtime is the real one, over a CDI specification that NVIDIA's own tool generates from the fake driver. That tool cannot describe
MIG instances of a driver without /proc entries, so these GPUs have none.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hack.stack import FAKE_DRIVER_ROOT, NO_FAKE_DRIVER, install_fake_driver
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import GPUS
from tests.e2e.nvidia import generate_specification, remove_specification
from tests.e2e.objects import container, pod, share


@pytest.fixture(scope="module")
def nvidia(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster in mode `nvidia`; in mode `cdi` again afterwards."""
    install_fake_driver(cluster.kubectl, "gpu a100-80 count=2\n")
    try:
        socket = f"{FAKE_DRIVER_ROOT}/run/nvidia-persistenced/socket"
        generate_specification(
            FAKE_DRIVER_ROOT, FAKE_DRIVER_ROOT, f"{FAKE_DRIVER_ROOT}/lib", TANGRAM_FAKE_DRIVER=socket
        )
        cluster.upgrade({"accessMode": "nvidia", "runtimeClassName": "nvidia", "node": NO_FAKE_DRIVER})
        yield cluster
    finally:
        remove_specification()
        install_fake_driver(cluster.kubectl, GPUS)
        cluster.upgrade({})
        cluster.wait_for_gpus("tangram.sh/mig-1g.10gb")


def test_pods_have_their_shares_through_nvidias_runtime(nvidia: Cluster, namespace: str) -> None:
    nvidia.run(namespace, share("a", "8Gi", 30), share("b", "70Gi"), share("c", "60Gi"))
    for name, size in (("a", "8.0"), ("b", "70.0"), ("c", "60.0")):
        assert f": {size} GiB, of which" in nvidia.exec(namespace, name, "gpuview")
        assert nvidia.sees(namespace, name) == nvidia.assigned(namespace, name)
        assert nvidia.pod(namespace, name)["spec"]["runtimeClassName"] == "nvidia"


def test_a_pod_past_its_grant_is_refused_there_too(nvidia: Cluster, namespace: str) -> None:
    nvidia.create(namespace, share("greedy", "8Gi", run=["gpuview", "grab", "12Gi"]))
    assert "after 7 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY" in nvidia.ended(namespace, "greedy", "Failed")


def test_a_whole_gpu_and_a_container_without_any(nvidia: Cluster, namespace: str) -> None:
    nvidia.run(namespace, pod("whole", container(gpu=1), container("none")))
    assert nvidia.sees(namespace, "whole", "main") == nvidia.assigned(namespace, "whole")
    assert "no CUDA driver" in nvidia.exec(namespace, "whole", "sh", "-c", "gpuview || true", container="none")
