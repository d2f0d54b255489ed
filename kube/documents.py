"""What the API server sends around objects: pages of a list and lines of a watch."""

from __future__ import annotations

from typing import Final

import msgspec

from kube.objects import Slim


class _ListMeta(Slim, frozen=True):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class ListPage(msgspec.Struct, gc=False):
    """Of a list."""

    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct, gc=False):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


EVENTS: Final = msgspec.json.Decoder(WatchEvent)

THERE: Final = frozenset({"ADDED", "MODIFIED"})
"""Types of nearly all events."""


class _Name(Slim, frozen=True):
    """Of an object's metadata."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class Anonymous(msgspec.Struct, gc=False):
    """Any object: enough to identify it, also where the rest of its metadata cannot be decoded."""

    metadata: _Name = _Name()
    code: int = 0
    message: str = ""
