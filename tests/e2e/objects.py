"""Kubernetes objects for the end-to-end tests, in the words of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORKLOAD = "localhost/tangram-workload:dev"
"""Python and `gpuview` (examples/workload)."""

RESTRICTED = {
    "runAsNonRoot": True, "runAsUser": 65534, "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
"""A container that the `restricted` Pod Security level admits."""


def container(
    name: str = "main",
    *,
    mem: str | int | None = None,
    core: int | None = None,
    gpu: int | None = None,
    mig: str | None = None,
    run: Sequence[str] = ("gpuview", "view", "--then-wait"),
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A container that requests what is named and runs a command."""
    limits = {"gpu-mem": mem, "gpu-core": core, "gpu": gpu, f"mig-{mig}": 1 if mig else None}
    return {
        "name": name,
        "image": WORKLOAD,
        "imagePullPolicy": "IfNotPresent",
        "command": list(run),
        "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        "resources": {
            "limits": {f"tangram.sh/{key}": str(value) for key, value in limits.items() if value is not None}
        },
        **more,
    }


def pod(
    name: str,
    *containers: dict[str, Any],
    annotations: Mapping[str, str] | None = None,
    init: Sequence[dict[str, Any]] = (),
    **spec: Any,
) -> dict[str, Any]:
    """A pod that dies at once when it is deleted. Without containers it gets one that requests nothing."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": dict(annotations or {}), "labels": {"suite": "e2e"}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "restartPolicy": "Never",
            "initContainers": list(init),
            "containers": list(containers) or [container()],
            **spec,
        },
    }


def share(name: str, mem: str | int, core: int | None = None, **more: Any) -> dict[str, Any]:
    """A pod with one container and a share of a GPU; `run`, `env` go to the container, the rest to the pod."""
    inner = {key: more.pop(key) for key in ("run", "env", "securityContext") if key in more}
    return pod(name, container(mem=mem, core=core, **inner), **more)
