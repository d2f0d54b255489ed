"""A pod as the webhook reads it: that of `kube.objects`, with the fields that only admission checks.

What is not named here is neither read nor changed. A field with a value of the wrong kind fails the conversion, so every check behind it
may trust the types.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import msgspec.inspect

from kube.objects import Container, Pod, PodSpec
from kube.pod_parts import EnvVar, SecurityContext, Volume, VolumeDevice, VolumeMount


class AdmissionContainer(Container, frozen=True):
    """An init, app or ephemeral container."""

    env: tuple[EnvVar, ...] = ()
    volume_mounts: tuple[VolumeMount, ...] = ()
    volume_devices: tuple[VolumeDevice, ...] = ()
    security_context: SecurityContext = SecurityContext()
    termination_message_path: str = ""

    def resource_names(self) -> frozenset[str]:
        """Every resource under its limits or requests."""
        return frozenset(self.resources.limits or ()) | frozenset(self.resources.requests or ())


class AdmissionSpec(PodSpec, frozen=True):
    """The spec of a pod that is being created."""

    containers: tuple[AdmissionContainer, ...] = ()
    init_containers: tuple[AdmissionContainer, ...] = ()
    ephemeral_containers: tuple[AdmissionContainer, ...] = ()
    volumes: tuple[Volume, ...] = ()
    runtime_class_name: str = ""
    priority_class_name: str = ""
    host_pid: bool = msgspec.field(name="hostPID", default=False)


class AdmissionPod(Pod, frozen=True):
    """A pod that is being created."""

    spec: AdmissionSpec = AdmissionSpec()

    def located(self) -> list[tuple[str, AdmissionContainer]]:
        """Init and app containers, each with the JSON pointer to it."""
        return [
            (f"/spec/{field}/{index}", container)
            for field, containers in (
                ("initContainers", self.spec.init_containers),
                ("containers", self.spec.containers),
            )
            for index, container in enumerate(containers)
        ]

    def every(self) -> list[tuple[str, AdmissionContainer]]:
        """All containers, each with the name of its sort for a sentence."""
        return [("container", container) for _, container in self.located()] + [
            ("ephemeral container", container) for container in self.spec.ephemeral_containers
        ]


def pod_of(document: Any) -> AdmissionPod:
    """The pod in a decoded JSON document. A member that is null counts as left out, as in the API server's decoder.

    Raises msgspec.ValidationError, which names the field, when the document is no pod.
    """
    given = _without_nulls(document, _POD)
    for part in ("metadata", "spec"):
        if isinstance(given, dict) and part not in given:
            raise msgspec.ValidationError(f"Object missing required field `{part}`")
    return msgspec.convert(given, AdmissionPod)


def _without_nulls(value: Any, kind: msgspec.inspect.Type) -> Any:
    """The members that admission reads, and no other: however large and deep the rest of a document is, it costs nothing here."""
    if isinstance(kind, msgspec.inspect.UnionType):  # of something and None
        kind = next(one for one in kind.types if not isinstance(one, msgspec.inspect.NoneType))
    if isinstance(value, dict) and isinstance(kind, msgspec.inspect.StructType):
        read = ((field, value.get(field.encode_name)) for field in kind.fields)
        return {field.encode_name: _without_nulls(member, field.type) for field, member in read if member is not None}
    if isinstance(value, dict) and isinstance(kind, msgspec.inspect.DictType):
        return {key: member for key, member in value.items() if member is not None}
    if isinstance(value, list) and isinstance(kind, msgspec.inspect.VarTupleType):
        return [_without_nulls(element, kind.item_type) for element in value]
    return value


_POD: Final = msgspec.inspect.type_info(AdmissionPod)
