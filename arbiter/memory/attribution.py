"""Whose the processes are that NVML lists: each counts against a grant, against the grants of its pod as one, or against none.

`vgpu.memory.attribution` decides by cgroup and mount. A process that is connected belongs to the container at whose socket it is, where its cgroup
leaves several. A process that belongs to no grant and stays is listed, with its memory.

Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from arbiter.memory.container import Container
from arbiter.memory.meter import Reading, Seen
from vgpu.memory.attribution import Owner, Owners, divided

STAYS_S: Final = 0.9
"""A process that is just ending has no grant any more: two readings a second apart do not both show it. Guessed."""
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Ungranted:
    """A process with memory of a GPU that has grants, which belongs to none."""

    uuid: str
    pid: int
    pod: str
    """UID by its cgroup; empty = it is in no pod."""
    held_bytes: int | None
    """None = the driver does not tell."""


class Attributing:
    """Of one node. `visible`: are the node's processes seen? If not, nobody is listed."""

    def __init__(self, *, visible: bool = True) -> None:
        self.visible = visible
        self.ungranted: tuple[Ungranted, ...] = ()
        """By the last reading of each GPU."""
        self._since_s: dict[tuple[str, int, int], float] = {}
        """GPU, pid and start -> when the process was seen first to belong to none."""
        self._of: dict[int, tuple[str, ...]] = {}
        """Of each process of the last reading, the grants that it may belong to."""

    def take(self, reading: Reading, containers: Mapping[str, Container]) -> Reading:
        """The reading with the grant of each process."""
        grants = {key: one.grant for key, one in containers.items() if one.grant is not None}
        owners = Owners(Owner(key, grant.uid, containers[key].container_id) for key, grant in grants.items())
        connected = _connected(containers)
        seen: dict[int, Seen] = {}
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
            self._list(known, of, limits)
        return known

    def _list(
        self, reading: Reading, of: Mapping[int, tuple[str, ...]], limits: Mapping[str, Mapping[str, int]]
    ) -> None:
        """What the last reading said of a GPU that did not answer stays."""
        none = [
            (uuid, pid, reading.seen[pid])
            for uuid, pids in reading.gpus.items()
            for pid, held in pids.items()
            if held != 0 and pid in of and not any(uuid in limits.get(key, ()) for key in of[pid])
        ]
        since_s = {who: at_s for who, at_s in self._since_s.items() if who[0] not in reading.gpus}
        kept = [one for one in self.ungranted if one.uuid not in reading.gpus]
        for uuid, pid, seen in none:
            who = uuid, pid, seen.started
            since_s[who] = self._since_s.get(who, reading.at_s)
            if reading.at_s - since_s[who] >= STAYS_S:
                kept.append(Ungranted(uuid, pid, seen.place.pod, reading.gpus[uuid][pid]))
        self._since_s, self.ungranted = since_s, tuple(kept)


def _connected(containers: Mapping[str, Container]) -> dict[int, str]:
    """Host pid -> key."""
    return {
        connection.pid: key
        for key, container in containers.items()
        for connection in container.connections.values()
        if connection.welcomed and connection.pid
    }


def _parts(
    reading: Reading, of: Mapping[int, tuple[str, ...]], limits: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, dict[int, int]]]:
    """Of processes that belong to one of several grants. The room of a grant is what its own processes leave of its limit."""
    parts: dict[str, dict[str, dict[int, int]]] = {}
    for uuid, pids in reading.gpus.items():
        shared = [pid for pid in sorted(pids) if len(of.get(pid, ())) > 1]
        room = {key: gpus[uuid] for key, gpus in limits.items() if uuid in gpus} if shared else {}
        for pid in pids if shared else ():
            if len(keys := of.get(pid, ())) == 1 and keys[0] in room:
                room[keys[0]] -= pids[pid] or 0
        for pid in shared:
            for key, part_bytes in divided(pids[pid] or 0, {key: room[key] for key in of[pid] if key in room}).items():
                room[key] -= part_bytes
                if part_bytes:
                    parts.setdefault(key, {}).setdefault(uuid, {})[pid] = part_bytes
    return parts
