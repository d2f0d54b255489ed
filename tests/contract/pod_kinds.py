"""Pods of every kind that requests may be written in, made up from a seed."""

from __future__ import annotations

import random
from typing import Any

RESOURCES = (
    "cpu", "memory", "ephemeral-storage", "hugepages-2Mi", "tangram.sh/gpu-mem", "tangram.sh/gpu-core", "example.com/thing",
)  # fmt: skip
CPU = ("0", "1", "2.5", "100m", "1500m", "0.1", "1e-3", "33n", "100001u", "1k", 3, 0.25)
AMOUNTS = ("0", "1", "1Gi", "512Mi", "1.5Gi", "100M", "123456789", "0.5Ki", "1e3", "2E2", "7m", "1Pi", 5)


def amounts(random_: random.Random, *, at_most: int = 4, resources: tuple[str, ...] = RESOURCES) -> dict[str, Any]:
    """A ResourceList."""
    named = random_.sample(resources, random_.randint(0, min(at_most, len(resources))))
    return {name: random_.choice(CPU if name == "cpu" else AMOUNTS) for name in named}


def resources(random_: random.Random) -> dict[str, Any]:
    """ResourceRequirements, possibly empty."""
    parts = {"requests": amounts(random_), "limits": amounts(random_)}
    return {name: parts[name] for name in parts if random_.random() < 0.8}


def _status(random_: random.Random, name: str) -> dict[str, Any]:
    status: dict[str, Any] = {"name": name}
    if random_.random() < 0.7:
        status["resources"] = resources(random_)
    if random_.random() < 0.7:
        status["allocatedResources"] = amounts(random_)
    return status


def _container(random_: random.Random, name: str) -> dict[str, Any]:
    return {"name": name} | ({"resources": resources(random_)} if random_.random() < 0.9 else {})


def made_up(random_: random.Random) -> dict[str, Any]:
    """One pod, as the API might show it."""
    containers = [_container(random_, f"c{at}") for at in range(random_.randint(0, 3))]
    init = [_container(random_, f"i{at}") for at in range(random_.randint(0, 3))]
    for one in init:
        if random_.random() < 0.5:
            one["restartPolicy"] = random_.choice(("Always", "Always", "OnFailure"))
    spec: dict[str, Any] = {"containers": containers, "initContainers": init, "nodeName": "n1"}
    if random_.random() < 0.4:
        spec["resources"] = resources(random_)
    if random_.random() < 0.4:
        spec["overhead"] = amounts(random_, resources=("cpu", "memory", "example.com/other"))
    status: dict[str, Any] = {
        "containerStatuses": [_status(random_, one["name"]) for one in containers if random_.random() < 0.8],
        "initContainerStatuses": [_status(random_, one["name"]) for one in init if random_.random() < 0.8],
    }
    if random_.random() < 0.5:
        status["resources"] = resources(random_)
    if random_.random() < 0.5:
        status["allocatedResources"] = amounts(random_)
    if random_.random() < 0.4:
        reason = random_.choice(("Infeasible", "Deferred", ""))
        status["conditions"] = [{"type": "PodResizePending", "status": "True", "reason": reason}]
    if random_.random() < 0.1:
        status.setdefault("conditions", []).insert(
            0, {"type": "PodResizePending", "status": "True", "reason": "Deferred"}
        )
    return {"metadata": {"name": "p", "namespace": "default", "uid": "u"}, "spec": spec, "status": status}
