"""Which grant a process's GPU memory counts against. Pure.

The cgroup decides: its pod, and of the pod's grants the one of its container. The device plugin writes a container's ID beside the grant as
soon as the pod's status has it. Until then, and for a container of the pod that has no grant, the pod's grants count as one: such memory
makes a container exceed its limit only where all of the pod exceeds the sum.

The mount that a process shows decides among the grants that its cgroup leaves. It decides alone if the cgroup names no pod with a grant, as for
runs without a cluster. The arbiter reports the memory of a process that belongs to no grant.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vgpu.api.cgroup import CgroupOwner


@dataclass(frozen=True, slots=True)
class Owner:
    """A grant directory, and the container to which it belongs."""

    key: str
    uid: str
    container_id: str = ""
    """Empty = the pod's status does not have it yet."""


class Owners:
    """The grants of one node, at one moment."""

    def __init__(self, owners: Iterable[Owner]) -> None:
        self._of_pod: dict[str, list[Owner]] = {}
        self._keys = set[str]()
        for owner in owners:
            self._of_pod.setdefault(owner.uid, []).append(owner)
            self._keys.add(owner.key)

    def of(self, place: CgroupOwner, shown: str | None) -> tuple[str, ...]:
        """Keys of the grants that a process may belong to, sorted: one = it does; several = they count as one; none = it has no grant.

        `shown`: the key of the grant directory that is mounted where the process sees it.
        """
        in_pod = self._of_pod.get(place.pod, []) if place.pod else []
        if not in_pod:
            return (shown,) if shown in self._keys and shown is not None else ()
        in_container = [owner for owner in in_pod if place.container and owner.container_id == place.container]
        keys = sorted(owner.key for owner in in_container or in_pod)
        return (shown,) if shown in keys and shown is not None else tuple(keys)


def divided(held_bytes: int, room_bytes: Mapping[str, int]) -> dict[str, int]:
    """The memory of a process that belongs to one of several grants, as parts of these grants by key.

    Each grant gets as much as it has free; the last one also the rest. So none exceeds its limit by this process unless all do.
    """
    parts: dict[str, int] = {}
    for key in sorted(room_bytes):
        parts[key] = min(held_bytes, max(0, room_bytes[key]))
        held_bytes -= parts[key]
    if held_bytes and parts:
        parts[max(parts)] += held_bytes
    return parts
