"""ResourceSlices (resource.k8s.io): the devices that a DRA driver offers on a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kube.objects import Metadata, Slim

VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""Those that this module reads, the best first. v1 is of Kubernetes 1.34, the others of 1.33 and 1.32."""
UUID_ATTRIBUTES: Final = ("uuid", "parentUUID")
"""Of a GPU or MIG instance, and of the GPU that has the instance. From NVIDIA's DRA driver."""


class Attribute(Slim, frozen=True):
    """A DeviceAttribute. `string` is None where it is of another type."""

    string: str | None = None


class BasicDevice(Slim, frozen=True):
    """What v1beta1 puts around the attributes."""

    attributes: dict[str, Attribute] | None = None


class Device(Slim, frozen=True):
    """One device of a slice."""

    name: str = ""
    attributes: dict[str, Attribute] | None = None
    basic: BasicDevice | None = None

    def uuids(self, driver: str) -> Iterator[str]:
        """That its attributes name. An attribute of the driver may be written with the driver's domain, and without it."""
        attributes = self.attributes or (self.basic.attributes if self.basic is not None else None) or {}
        for name in UUID_ATTRIBUTES:
            found = attributes.get(name) or attributes.get(f"{driver}/{name}")
            if found is not None and found.string:
                yield found.string


class SliceSpec(Slim, frozen=True):
    """What of its spec matters."""

    driver: str = ""
    node_name: str = ""
    devices: tuple[Device, ...] = ()


class ResourceSlice(Slim, frozen=True):
    """A ResourceSlice."""

    metadata: Metadata = Metadata()
    spec: SliceSpec = SliceSpec()

    @property
    def key(self) -> str:
        """Its name."""
        return self.metadata.name


class _Version(Slim, frozen=True):
    version: str = ""


class _Group(Slim, frozen=True):
    versions: tuple[_Version, ...] = ()


def served_version(body: bytes) -> str | None:
    """The best version of the API group that a server serves, by its answer to `paths.RESOURCE_API`. Raises msgspec.MsgspecError."""
    served = {one.version for one in msgspec.json.decode(body, type=_Group).versions}
    return next((one for one in VERSIONS if one in served), None)
