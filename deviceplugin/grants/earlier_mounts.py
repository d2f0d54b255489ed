"""Containers that name the library where the release before this one mounted it.

Its webhook wrote that path into LD_PRELOAD of pods that may start only now. The grant is mounted there too for these containers: else the
loader complains about the path on standard error, in each process. Pods that are created now name the new path, so this ends by itself.

Only the watch of the node's pods decodes variables, and `without_variables` drops all others: they may be secret.
"""

from __future__ import annotations

import msgspec

from kube.objects import Container, Pod, PodSpec
from kube.pod_parts import EnvVar
from vgpu.api.contract import EARLIER_CONTAINER_LIBRARY, PRELOAD_ENV


class PreloadingContainer(Container, frozen=True):
    """A container with its variables."""

    env: tuple[EnvVar, ...] = ()


class PreloadingSpec(PodSpec, frozen=True):
    """A spec of such containers."""

    containers: tuple[PreloadingContainer, ...] = ()
    init_containers: tuple[PreloadingContainer, ...] = ()


class PreloadingPod(Pod, frozen=True):
    """A pod of such containers."""

    spec: PreloadingSpec = PreloadingSpec()


def without_variables(pod: Pod) -> Pod:
    """The same pod with no variable but LD_PRELOAD."""
    if not isinstance(pod, PreloadingPod):
        return pod
    spec = msgspec.structs.replace(
        pod.spec,
        containers=tuple(map(_preloading, pod.spec.containers)),
        init_containers=tuple(map(_preloading, pod.spec.init_containers)),
    )
    return msgspec.structs.replace(pod, spec=spec)


def _preloading(container: PreloadingContainer) -> PreloadingContainer:
    kept = tuple(variable for variable in container.env if variable.name == PRELOAD_ENV)
    return msgspec.structs.replace(container, env=kept)


def containers_with_earlier_preload(pod: Pod) -> frozenset[str]:
    """Names of its containers whose LD_PRELOAD has the earlier path."""
    if not isinstance(pod, PreloadingPod):
        return frozenset()
    return frozenset(
        container.name
        for container in (*pod.spec.init_containers, *pod.spec.containers)
        for variable in container.env
        if variable.name == PRELOAD_ENV and EARLIER_CONTAINER_LIBRARY in (variable.value or "").split(":")
    )
