"""A CDI specification as another program wrote it: its fields, and how much of it is read. Pure.

It is data of a peer. So its size, its number of entries and the length of its texts are bounded, and a field that is not named here refuses it whole: what is not
understood is not passed on. What it may say is checked in `cdi_vendor`.

Format: github.com/cncf-tags/container-device-interface, SPEC.md, versions 0.3.0 to 1.1.0, without the fields for RDT and network devices.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
import yaml

from vgpu.api.errors import TangramError

LARGEST_BYTES: Final = 1 << 20
"""Of a file. Guessed: one of NVIDIA's tool for eight GPUs has some 60 KiB."""
VERSIONS: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""In their order. Specified."""
MOST_DEPTH: Final = 16
"""Of values in values. A specification has 7; specified."""
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C reads the largest file in a second, that in Python in a minute."""

Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""PATH_MAX, for everything that is text."""
Texts = Annotated[tuple[Text, ...], msgspec.Meta(max_length=1024)]


class BadSpec(TangramError):
    """The file is no CDI specification that can be used. The text says why, as a clause."""


class _Fields(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    pass


class DeviceNode(_Fields, frozen=True):
    """A device node of a container."""

    path: Text
    host_path: Text = ""
    """Empty: as `path`."""
    type: Text = ""
    major: int = 0
    minor: int = 0
    file_mode: int = 0
    permissions: Text = ""
    uid: int = 0
    gid: int = 0


class Mount(_Fields, frozen=True):
    """A bind mount."""

    host_path: Text
    container_path: Text
    options: Texts = ()
    type: Text = ""


class Hook(_Fields, frozen=True):
    """A program that the runtime starts, as root on the host."""

    hook_name: Text
    path: Text
    args: Texts = ()
    env: Texts = ()
    timeout: int | None = None


class Edits(_Fields, frozen=True):
    """What a container gets."""

    env: Texts = ()
    device_nodes: Annotated[tuple[DeviceNode, ...], msgspec.Meta(max_length=256)] = ()
    mounts: Annotated[tuple[Mount, ...], msgspec.Meta(max_length=1024)] = ()
    hooks: Annotated[tuple[Hook, ...], msgspec.Meta(max_length=64)] = ()
    additional_gids: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = msgspec.field(
        default=(), name="additionalGids"
    )


class Device(_Fields, frozen=True):
    """A device and what it adds to the edits of the specification."""

    name: Text
    container_edits: Edits
    annotations: dict[str, str] | None = None


class Spec(_Fields, frozen=True):
    """A document."""

    cdi_version: Text
    kind: Text
    devices: Annotated[tuple[Device, ...], msgspec.Meta(max_length=1024)]
    container_edits: Edits = Edits()
    annotations: dict[str, str] | None = None

    def device(self, name: str) -> Device | None:
        """The device of this name."""
        return next((one for one in self.devices if one.name == name), None)


def spec_from_text(content: bytes) -> Spec:
    """Of a file in YAML or JSON. Raises BadSpec."""
    if len(content) > LARGEST_BYTES:
        raise BadSpec(f"it has {len(content)} bytes: at most {LARGEST_BYTES} are read")
    try:
        if content.lstrip()[:1] == b"{":
            return msgspec.json.decode(content, type=Spec)
        return msgspec.convert(_yaml(content), Spec)
    except (msgspec.MsgspecError, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise BadSpec(f"it cannot be read: {str(error).splitlines()[0][:200]}") from None
    except RecursionError:
        raise BadSpec("it cannot be read: its values are nested too deeply") from None


def _yaml(content: bytes) -> Any:
    """Without references, of which few bytes may stand for gigabytes of values, and not nested more than a specification is."""
    depth = 0
    for event in yaml.parse(content, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise BadSpec("it cannot be read: it has references")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise BadSpec("it cannot be read: its values are nested too deeply")
    return yaml.load(content, Loader=_LOADER)  # noqa: S506 (a safe loader)
