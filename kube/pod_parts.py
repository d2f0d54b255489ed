"""Parts of pods that single programs read: the webhook's checks, `kube.needs`, the device plugin's check of earlier mounts.

A program that reads one of them extends `Container`, `PodSpec` or `Pod` of `kube.objects` by that field, so every field is described once,
and no other program pays for decoding it.
"""

from __future__ import annotations

from typing import Any

from kube.objects import Slim


class FieldRef(Slim, frozen=True):
    """ObjectFieldSelector: a field of the pod itself."""

    field_path: str = ""


class EnvVarSource(Slim, frozen=True):
    """Where a variable without a written value comes from."""

    field_ref: FieldRef | None = None


class EnvVar(Slim, frozen=True):
    """One environment variable."""

    name: str = ""
    value: str | None = None
    value_from: EnvVarSource | None = None

    @property
    def field_path(self) -> str:
        """The field of the pod that it reads, or nothing."""
        return self.value_from.field_ref.field_path if self.value_from and self.value_from.field_ref else ""


class ContainerPort(Slim, frozen=True):
    """A port of a container."""

    host_port: int = 0


class VolumeMount(Slim, frozen=True):
    """Where a container sees a volume."""

    name: str = ""
    mount_path: str = ""


class VolumeDevice(Slim, frozen=True):
    """Where a container sees a raw block volume."""

    name: str = ""
    device_path: str = ""


class Capabilities(Slim, frozen=True):
    """Linux capabilities beyond those of the container runtime."""

    add: tuple[str, ...] = ()


class SecurityContext(Slim, frozen=True):
    """What a container may do to its node."""

    privileged: bool | None = None
    capabilities: Capabilities | None = None
    proc_mount: str | None = None


class HostPath(Slim, frozen=True):
    """HostPathVolumeSource: a directory or file of the node."""

    path: str = ""


class Volume(Slim, frozen=True):
    """A volume that the containers of a pod may mount."""

    name: str = ""
    host_path: HostPath | None = None
    persistent_volume_claim: Any = None
    ephemeral: Any = None
