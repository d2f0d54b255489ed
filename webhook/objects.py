"""The part of a pod that admission looks at.

Slim structs for msgspec: what is not named here is neither read nor changed. A field that holds the wrong kind of value
fails the conversion, so everything behind it may trust the types.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Slim(msgspec.Struct, rename="camel", kw_only=True):
    """Base: Kubernetes' field names, unknown fields ignored."""


class FieldRef(Slim):
    """Where an environment variable reads a field of its own pod."""

    field_path: str = ""


class ValueFrom(Slim):
    """A variable that is not written out."""

    field_ref: FieldRef | None = None


class Env(Slim):
    """One environment variable."""

    name: str = ""
    value: str | None = None
    value_from: ValueFrom | None = None

    @property
    def field_path(self) -> str:
        """The field it reads, or nothing."""
        return self.value_from.field_ref.field_path if self.value_from and self.value_from.field_ref else ""


class Resources(Slim):
    """Quantities by resource name."""

    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class VolumeMount(Slim):
    """Where a volume is seen."""

    name: str = ""
    mount_path: str = ""


class HostPath(Slim):
    """A folder or file of the node."""

    path: str = ""


class Volume(Slim):
    """What containers may mount."""

    name: str = ""
    host_path: HostPath | None = None


class VolumeDevice(Slim):
    """Where a raw block volume is seen."""

    name: str = ""
    device_path: str = ""


class Capabilities(Slim):
    """Linux capabilities beyond the runtime's own."""

    add: list[str] | None = None


class SecurityContext(Slim):
    """What a container may do to its node."""

    privileged: bool | None = None
    capabilities: Capabilities | None = None
    proc_mount: str | None = None


class Container(Slim):
    """A container of any sort: init, app or ephemeral."""

    name: str = ""
    env: list[Env] | None = None
    resources: Resources | None = None
    volume_mounts: list[VolumeMount] | None = None
    volume_devices: list[VolumeDevice] | None = None
    security_context: SecurityContext | None = None
    termination_message_path: str | None = None

    def resource_names(self) -> frozenset[str]:
        """Every resource it names, under limits or requests."""
        resources = self.resources or Resources()
        return frozenset(resources.limits or ()) | frozenset(resources.requests or ())


class Spec(Slim):
    """What a pod should be."""

    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    ephemeral_containers: list[Container] | None = None
    resources: Resources | None = None
    volumes: list[Volume] | None = None
    scheduler_name: str | None = None
    runtime_class_name: str | None = None
    priority_class_name: str | None = None
    priority: int | None = None
    preemption_policy: str | None = None
    node_name: str | None = None
    host_pid: bool | None = msgspec.field(name="hostPID", default=None)


class Metadata(Slim):
    """Who a pod is."""

    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    annotations: dict[str, str] | None = None


class Pod(Slim):
    """A pod as it asks to be admitted."""

    metadata: Metadata
    spec: Spec

    def located(self) -> list[tuple[str, Container]]:
        """Init and app containers, each with the JSON pointer to it."""
        init, app = self.spec.init_containers or [], self.spec.containers or []
        return [(f"/spec/initContainers/{i}", container) for i, container in enumerate(init)] + [
            (f"/spec/containers/{i}", container) for i, container in enumerate(app)
        ]

    def every(self) -> list[tuple[str, Container]]:
        """Containers of any sort, each with what its sort is called in a sentence."""
        sorts = (
            ("container", [container for _, container in self.located()]),
            ("ephemeral container", self.spec.ephemeral_containers or []),
        )
        return [(sort, container) for sort, containers in sorts for container in containers]


def pod_of(document: Any) -> Pod:
    """The pod in a decoded JSON document.

    Raises msgspec.ValidationError, which names the field, when it is none.
    """
    return msgspec.convert(document, Pod)
