"""Memory of the node's shared GPUs that NVML lists for no process: `vgpu.memory.unlisted` decides, this module collects the figures and reports it.

Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Final

import structlog

from arbiter.memory.container import ServedContainer
from arbiter.memory.device_openers import DeviceOpeners, Opener, OpenerSearch
from arbiter.memory.meter import MemoryReading
from vgpu.memory.attribution import Owner, Owners
from vgpu.memory.records import Part
from vgpu.memory.unlisted import Holder, Unlisted, UnlistedDetector, difference, tolerance_bytes
from vgpu.protocol.status import UnlistedStatus

APART_S: Final = 0.5
"""Readings closer together are skipped, because each evaluates all connections of a GPU. Guessed: half of their period."""
REPORT_S: Final = 60.0
"""A GPU is logged this often at most, however often it comes and goes. Guessed."""
MIB: Final = 2**20
_log = structlog.get_logger()


class UnlistedMemory:
    """The unlisted memory of one node. `openers` finds the container that may have it; None = no search, because the node's processes are not visible."""

    def __init__(self, openers: DeviceOpeners | None = None) -> None:
        self.openers = openers
        self.known: frozenset[str] = frozenset()
        """GPUs of the last readings with a known result."""
        self._detector = UnlistedDetector()
        self._read_s = -inf
        self._logged_s: dict[str, float] = {}

    @property
    def found(self) -> tuple[Unlisted, ...]:
        """The unlisted memory, by GPU."""
        return tuple(one for _, one in sorted(self._detector.found.items()))

    def statuses(self, containers: Mapping[str, ServedContainer]) -> tuple[UnlistedStatus, ...]:
        """The entries of the status document."""
        openers = self.openers.found if self.openers is not None else {}
        return tuple(_status(one, openers.get(one.uuid), containers) for one in self.found)

    def evaluate(self, reading: MemoryReading, containers: Mapping[str, ServedContainer]) -> None:
        """Evaluate a reading. A GPU that did not answer keeps its result; a GPU that no grant names any more is dropped."""
        if reading.at_s - self._read_s < APART_S:
            return
        self._read_s = reading.at_s
        wanted = {gpu.uuid for one in containers.values() if one.grant is not None for gpu in one.grant.gpus}
        read = wanted & reading.gpus.keys()
        reported = {uuid for uuid in read if _left(uuid, reading) is not None}
        self.known = ((self.known & wanted) - read) | reported
        before = frozenset(self._detector.found)
        self._detector.evaluate(reading.at_s, {uuid: _judged(uuid, reading, containers) for uuid in read})
        self._detector.forget(but=wanted)
        self._report(before, reading.at_s)
        if self.openers is not None:
            self.openers.want(
                _wanted(self._detector.found, reading, containers) if self._detector.found else OpenerSearch()
            )

    def _report(self, before: frozenset[str], at_s: float) -> None:
        for one in self.found:
            if one.uuid not in before and at_s - self._logged_s.get(one.uuid, -inf) >= REPORT_S:
                self._logged_s[one.uuid] = at_s
                _log.warning(
                    "GPU memory is in use and NVML lists it for no process",
                    gpu=one.uuid, mib=one.bytes // MIB, used_mib=one.used_bytes // MIB,
                )  # fmt: skip
        for uuid in before - self._detector.found.keys():
            _log.info("no GPU memory is unlisted any more", gpu=uuid)


def _status(one: Unlisted, opener: Opener | None, containers: Mapping[str, ServedContainer]) -> UnlistedStatus:
    grant = containers[opener.key].grant if opener is not None and opener.key in containers else None
    if opener is None or grant is None:
        return UnlistedStatus(one.uuid, one.bytes, one.used_bytes)
    return UnlistedStatus(
        one.uuid, one.bytes, one.used_bytes, grant.uid, f"{grant.namespace}/{grant.pod}", grant.container, opener.pids
    )


def _wanted(found: Collection[str], reading: MemoryReading, containers: Mapping[str, ServedContainer]) -> OpenerSearch:
    granted = {key: one.grant for key, one in containers.items() if one.grant is not None}
    keys = {
        uuid: frozenset(key for key, grant in granted.items() if uuid in {gpu.uuid for gpu in grant.gpus})
        for uuid in found
    }
    owners = Owners(Owner(key, grant.uid, containers[key].container_id) for key, grant in granted.items())
    connected = {connection.pid for one in containers.values() for connection in one.connections.values()}
    return OpenerSearch(keys, owners, frozenset(connected | reading.seen.keys()))


def _left(uuid: str, reading: MemoryReading) -> int | None:
    """Used memory beyond all that NVML lists."""
    return difference(reading.used.get(uuid), map(Holder, reading.gpus[uuid].values()))


def _judged(uuid: str, reading: MemoryReading, containers: Mapping[str, ServedContainer]) -> Unlisted | None:
    """Unlisted memory beyond the tolerance; None also if that is unknown. The charge is looked up only if it matters."""
    listed, used_bytes, left_bytes = reading.gpus[uuid], reading.used.get(uuid), _left(uuid, reading)
    if used_bytes is None or left_bytes is None or left_bytes <= tolerance_bytes(len(listed)):
        return None
    charged, of_nobody_bytes = _charged(uuid, containers)
    holders = {pid: _holder(listed.get(pid, 0), charged.get(pid, ())) for pid in listed.keys() | charged.keys()}
    left_bytes = difference(used_bytes, holders.values(), of_nobody_bytes)
    beyond = left_bytes is not None and left_bytes > tolerance_bytes(len(holders))
    return Unlisted(uuid, left_bytes or 0, used_bytes) if beyond else None


def _holder(listed_bytes: int | None, parts: Collection[Part]) -> Holder:
    return Holder(
        listed_bytes,
        charged_bytes=sum(map(_charge_bytes, parts)),
        managed_bytes=sum(part.managed_bytes for part in parts),
        unused_bytes=sum(max(0, part.leased_bytes - part.used_bytes) for part in parts),
        still=all(part.still for part in parts),
    )


def _charge_bytes(part: Part) -> int:
    return part.leased_bytes + max(part.context_bytes, part.made_bytes)


def _charged(uuid: str, containers: Mapping[str, ServedContainer]) -> tuple[dict[int, list[Part]], int]:
    """Host pid -> the parts of its connections; and the bytes that are charged to no known process."""
    charged: dict[int, list[Part]] = {}
    of_nobody_bytes = 0
    for container in containers.values():
        for number, gpu in enumerate(container.grant.gpus if container.grant is not None else ()):
            if gpu.uuid != uuid:
                continue
            of_nobody_bytes += container.ledger.shared_bytes(number)
            for connection in container.connections.values():
                if not connection.welcomed:
                    continue
                part = container.ledger.part_of(connection.number, number)
                if connection.pid:
                    charged.setdefault(connection.pid, []).append(part)
                else:
                    of_nobody_bytes += _charge_bytes(part)
    return charged, of_nobody_bytes
