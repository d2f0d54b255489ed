"""What was decided for a pod, and what one of its containers is held to.

An `Assignment` is the extender's decision: it travels in a pod annotation, written with the Binding. A `Grant` is the part
of it that one container needs: the device plugin writes it as a file that the library and the arbiter read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vgpu.names import DEFAULT_CLASS, DEFAULT_LEVEL
from vgpu.request import Kind


@dataclass(frozen=True, slots=True)
class Slice:
    """A container's part of one card."""

    uuid: str
    """Of the card, or of the MIG instance."""
    index: int
    """Of the card in the node's inventory."""
    mib: int
    core_percent: int = 0
    """0 = no cap was asked for."""
    kind: Kind = "share"
    profile: str = ""
    """MIG profile; MIG only."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Per container of a pod, the cards it was given. `init` names those that run before the others and share with them."""

    containers: dict[str, tuple[Slice, ...]]
    init: frozenset[str] = frozenset()
    klass: str = DEFAULT_CLASS
    level: int = DEFAULT_LEVEL

    def uuids(self, container: str) -> tuple[str, ...]:
        """UUIDs that a container sees, in order."""
        return tuple(piece.uuid for piece in self.containers.get(container, ()))

    def held(self) -> tuple[Slice, ...]:
        """What the pod occupies: per card, the larger of all its app containers together and any one init container."""
        running: dict[str, Slice] = {}
        for name, pieces in self.containers.items():
            if name not in self.init:
                for piece in pieces:
                    running[piece.uuid] = _together(running.get(piece.uuid), piece)
        for name in self.init:
            for piece in self.containers.get(name, ()):
                running[piece.uuid] = _larger(running.get(piece.uuid), piece)
        return tuple(running[uuid] for uuid in sorted(running))


def _together(one: Slice | None, other: Slice) -> Slice:
    if one is None:
        return other
    return Slice(one.uuid, one.index, one.mib + other.mib, one.core_percent + other.core_percent, one.kind, one.profile)


def _larger(one: Slice | None, other: Slice) -> Slice:
    if one is None:
        return other
    return Slice(
        one.uuid, one.index, max(one.mib, other.mib), max(one.core_percent, other.core_percent), one.kind, one.profile
    )


@dataclass(frozen=True, slots=True)
class GrantCard:
    """A container's limits on one card."""

    uuid: str
    mib: int
    core_percent: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """What one container is held to."""

    namespace: str
    pod: str
    uid: str
    container: str
    cards: tuple[GrantCard, ...] = field(default=())
    klass: str = DEFAULT_CLASS
    level: int = DEFAULT_LEVEL
