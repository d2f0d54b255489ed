"""Assigns the processes that NVML lists: each counts against a grant, against the grants of its pod as one, or against none.

`vgpu.memory.attribution` decides by cgroup and mount. If the cgroup of a connected process leaves several grants, it belongs to the container of its
socket. A process that belongs to no grant and stays is listed, with its memory.

Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from arbiter.memory.container import ServedContainer
from arbiter.memory.meter import MemoryReading, SeenProcess
from vgpu.memory.attribution import Owner, Owners, divided

STAYS_S: Final = 0.9
"""A process that is ending has no grant any more: two readings a second apart do not both show it. Guessed."""
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Ungranted:
    """A process that has memory of a GPU with grants and belongs to none of them."""

    uuid: str
    pid: int
    pod: str
    """UID of its pod by its cgroup; empty = it is in no pod."""
    held_bytes: int | None
    """None = the driver does not report it."""


class Attributor:
    """The attributor of one node. `visible`: whether the arbiter can see the node's processes. If not, no process is listed."""

    def __init__(self, *, visible: bool = True) -> None:
        self.visible = visible
        self.ungranted: tuple[Ungranted, ...] = ()
        """Processes without a grant, by the last reading of each GPU."""
        self._since_s: dict[tuple[str, int, int], float] = {}
        """GPU, pid and start -> when the process was first found without a grant."""
        self._of: dict[int, tuple[str, ...]] = {}
        """For each process of the last reading, the grants to which it may belong."""

    def attribute(
        self, reading: MemoryReading, containers: Mapping[str, ServedContainer], own: Collection[int] = ()
    ) -> MemoryReading:
        """The reading with the grant of each process. `own`: processes that are part of Tangram, by host pid."""
        grants = {key: one.grant for key, one in containers.items() if one.grant is not None}
        owners = Owners(Owner(key, grant.uid, containers[key].container_id) for key, grant in grants.items())
        connected = _connected(containers)
        seen: dict[int, SeenProcess] = {}
        of: dict[int, tuple[str, ...]] = {}
        for pid, found in reading.seen.items():
            keys = owners.of(found.place, found.key)
            if (at := connected.get(pid)) is not None and (at in keys or not keys):
                keys = (at,)
            of[pid] = keys
            key = keys[0] if len(keys) == 1 else None
            seen[pid] = found if found.key == key else replace(found, key=key)
        limits = {key: {gpu.uuid: gpu.mib * MIB for gpu in grant.gpus} for key, grant in grants.items()}
        steady = frozenset(
            uuid
            for uuid in reading.unchanged
            if all(len(of[pid]) < 2 and of[pid] == self._of.get(pid) for pid in reading.gpus[uuid])
        )
        self._of = of
        known = replace(reading, seen=seen, parts=_parts(reading, of, limits), unchanged=steady)
        if self.visible:
            self._list(known, of, limits, own)
        return known

    def _list(
        self,
        reading: MemoryReading,
        of: Mapping[int, tuple[str, ...]],
        limits: Mapping[str, Mapping[str, int]],
        own: Collection[int],
    ) -> None:
        """Update the list. For a GPU that did not answer, the last reading counts."""
        none = [
            (uuid, pid, reading.seen[pid])
            for uuid, pids in reading.gpus.items()
            for pid, held in pids.items()
            if held != 0 and pid in of and pid not in own and not any(uuid in limits.get(key, ()) for key in of[pid])
        ]
        since_s = {identity: at_s for identity, at_s in self._since_s.items() if identity[0] not in reading.gpus}
        kept = [one for one in self.ungranted if one.uuid not in reading.gpus]
        for uuid, pid, seen in none:
            identity = uuid, pid, seen.started
            since_s[identity] = self._since_s.get(identity, reading.at_s)
            if reading.at_s - since_s[identity] >= STAYS_S:
                kept.append(Ungranted(uuid, pid, seen.place.pod, reading.gpus[uuid][pid]))
        self._since_s, self.ungranted = since_s, tuple(kept)


def _connected(containers: Mapping[str, ServedContainer]) -> dict[int, str]:
    """Host pid -> key."""
    return {
        connection.pid: key
        for key, container in containers.items()
        for connection in container.connections.values()
        if connection.welcomed and connection.pid
    }


def _parts(
    reading: MemoryReading, of: Mapping[int, tuple[str, ...]], limits: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, dict[int, int]]]:
    """Parts of the processes that belong to one of several grants. A grant's free memory is its limit less that of its own processes."""
    parts: dict[str, dict[str, dict[int, int]]] = {}
    for uuid, pids in reading.gpus.items():
        shared = [pid for pid in sorted(pids) if len(of.get(pid, ())) > 1]
        free_bytes = {key: gpus[uuid] for key, gpus in limits.items() if uuid in gpus} if shared else {}
        for pid in pids if shared else ():
            if len(keys := of.get(pid, ())) == 1 and keys[0] in free_bytes:
                free_bytes[keys[0]] -= pids[pid] or 0
        for pid in shared:
            for key, part_bytes in divided(
                pids[pid] or 0, {key: free_bytes[key] for key in of[pid] if key in free_bytes}
            ).items():
                free_bytes[key] -= part_bytes
                if part_bytes:
                    parts.setdefault(key, {}).setdefault(uuid, {})[pid] = part_bytes
    return parts
