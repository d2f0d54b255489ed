"""What of a pod the kubelet aligns: by its spec, as the API shows it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kube.alignment import container_needs, guaranteed
from kube.objects import PodSpec
from vgpu.api.numa import ContainerNeeds

BOTH = {"cpu": "2", "memory": "1Gi"}


def spec(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **more: Any) -> PodSpec:
    return msgspec.convert({"containers": containers, "initContainers": init, **more}, PodSpec)


def container(
    name: str = "c", limits: dict[str, Any] | None = None, requests: Any = None, **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "resources": {"limits": limits or {}, "requests": limits if requests is None else requests},
        **more,
    }


def test_every_container_in_the_kubelets_order() -> None:
    limits = {
        **BOTH,
        "tangram.sh/gpu-mem": "8",
        "example.com/nic": 1,
        "hugepages-2Mi": "2Mi",
        "ephemeral-storage": "1Gi",
    }
    sidecar, once = container("s", BOTH, restartPolicy="Always"), container("i", {"cpu": 1, "memory": "1Gi"})
    assert container_needs(spec(container("c", limits), init=(sidecar, once))) == (
        ContainerNeeds("s", 2),
        ContainerNeeds("i", 1, init=True),
        ContainerNeeds("c", 2, {"tangram.sh/gpu-mem": 8, "example.com/nic": 1}),
    )


@pytest.mark.parametrize(
    ("one", "cpus"),
    [
        (container(limits=BOTH), 2),
        (container(limits=BOTH, requests={}), 2),
        (container(limits={"cpu": "2000m", "memory": "1Gi"}, requests=BOTH), 2),
        (container(limits={"cpu": "1500m", "memory": "1Gi"}), 0),
        (container(limits=BOTH, requests={"cpu": "1", "memory": "1Gi"}), 0),
        (container(limits=BOTH, requests={"cpu": "2", "memory": "1"}), 0),
        (container(limits={"cpu": "2"}), 0),
        (container(limits={"cpu": "0", "memory": "1Gi"}), 0),
        (container(), 0),
    ],
)
def test_cpus_are_a_containers_own_in_a_guaranteed_pod_that_requests_whole_ones(one: dict[str, Any], cpus: int) -> None:
    assert [need.cpus for need in container_needs(spec(one))] == [cpus]


def test_one_container_without_limits_takes_them_from_all() -> None:
    assert not guaranteed(spec(container(limits=BOTH), container("d")))
    assert not guaranteed(spec(container(limits=BOTH), init=(container("d"),)))
    assert guaranteed(spec(container(limits=BOTH), init=(container("d", BOTH),)))


def test_resources_of_the_pod_as_a_whole_take_them_too() -> None:
    assert not guaranteed(spec(container(limits=BOTH), resources={"limits": BOTH, "requests": BOTH}))
    assert guaranteed(spec(container(limits=BOTH), resources={}))
