"""The arbiter's action on processes that bypass the library: it reports them, and kills them if `vgpu.memory.bypass` decides so.

The device plugin reads the status, and makes Events and evictions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Protocol

import msgspec
import structlog

from arbiter import host
from arbiter.memory.meter import MemoryReading
from vgpu.api.cgroup import NOWHERE, CgroupOwner
from vgpu.api.grant import Grant
from vgpu.api.names import OverLimitAction
from vgpu.memory.bypass import (
    QUIET_S,
    Bypass,
    BypassDetector,
    ProcessMemory,
    RepeatedKills,
    Traces,
    action_now,
    bypassing,
)
from vgpu.memory.over_limit import MeasuredProcess
from vgpu.protocol.status import BypassStatus, KillStatus

MIB: Final = 2**20
_log = structlog.get_logger()


class TraceSource(Protocol):
    """Examines processes that are not connected."""

    def traces(self, pid: int, started: int) -> Traces | None:
        """None = not examined yet."""


@dataclass(frozen=True, slots=True)
class BypassRules:
    """The rules of all containers of a node; from the settings."""

    action: OverLimitAction = "report"
    beyond_bytes: int = 0
    """Context room and slack."""
    began_s: float = -inf
    """The arbiter's start."""
    quiet_s: float = QUIET_S
    visible: bool = True
    """Whether the arbiter can see the node's processes."""
    trace_source: TraceSource | None = None

    def bypasses(self, pid: int, reading: MemoryReading) -> bool | None:
        """Whether an unconnected process of this reading bypasses the library. None = unknown."""
        if self.trace_source is None or pid not in reading.seen:
            return None
        return bypassing(self.trace_source.traces(pid, reading.seen[pid].started), reading.at_s)

    def now(self, at_s: float) -> OverLimitAction:
        """The present action."""
        return action_now(self.action, runs_s=at_s - self.began_s, visible=self.visible, quiet_s=self.quiet_s)


@dataclass(frozen=True, slots=True)
class _LastReading:
    """One container's part of the last reading."""

    grant: Grant
    limits_bytes: Mapping[str, int]
    reading: MemoryReading
    held: Mapping[str, Sequence[MeasuredProcess]]
    unconnected_usage: frozenset[int]
    """Pids of the processes that are not connected."""
    place: CgroupOwner
    """The container's cgroup; without an ID = unknown so far."""


class BypassEnforcement:
    """The enforcement of one container."""

    def __init__(self, rules: BypassRules) -> None:
        self._rules, self._detector, self._repeated_kills = rules, BypassDetector(rules.beyond_bytes), RepeatedKills()
        self._last: _LastReading | None = None
        self._found: dict[str, Bypass] = {}
        self._action: OverLimitAction = "report"
        """The action at the last reading."""
        self._ended: set[tuple[int, int]] = set()
        """Processes that were killed and are still listed."""

    def evaluate(
        self,
        grant: Grant,
        limits_bytes: Mapping[str, int],
        reading: MemoryReading,
        held: Mapping[str, Sequence[MeasuredProcess]],
        unconnected_usage: Collection[int],
        at_s: float,
        place: CgroupOwner = NOWHERE,
    ) -> list[KillStatus]:
        """Evaluate a reading and its unconnected processes. Returns the killed processes. `limits_bytes`: in all, by GPU; `place`: the container's cgroup."""
        if not held:  # its GPUs did not answer: the last result stays valid
            return []
        self._last = _LastReading(grant, limits_bytes, reading, held, frozenset(unconnected_usage), place)
        return self._judge(self._last, at_s)

    def again(self, at_s: float) -> list[KillStatus]:
        """Evaluate the last reading again with newer facts about its processes. Returns the killed processes."""
        return self._judge(self._last, at_s) if self._last is not None and self._last.unconnected_usage else []

    def pids(self) -> frozenset[int]:
        """Processes of the last reading that bypass the library."""
        if self._last is None:
            return frozenset()
        return frozenset(pid for pid in self._last.unconnected_usage if self._rules.bypasses(pid, self._last.reading))

    def met(self, pid: int) -> None:
        """The process has connected."""
        if self._last is not None:
            self._last = replace(self._last, unconnected_usage=self._last.unconnected_usage - {pid})

    def _judge(self, last: _LastReading, at_s: float) -> list[KillStatus]:
        grant, reading, held = last.grant, last.reading, last.held
        shares = {
            uuid: [ProcessMemory(p.pid, p.measured_bytes, self._bypasses(last, p.pid)) for p in of]
            for uuid, of in held.items()
        }
        found = self._detector.evaluate(reading.at_s, last.limits_bytes, shares)
        self._found = {uuid: one for uuid, one in self._found.items() if uuid not in held}
        self._found |= {one.uuid: one for one in found}
        self._action = self._rules.now(at_s)
        listed = {(pid, seen.started) for pid, seen in reading.seen.items()}
        self._ended &= listed
        if self._action != "kill":
            return []
        kills = [
            kill for one in found for pid in one.pids if (kill := self._kill(grant, one, pid, reading)) is not None
        ]
        if kills and self._repeated_kills.ended(reading.at_s) and last.place.container:
            whole = _end(grant, last.place) > 0
            return [msgspec.structs.replace(kill, whole=whole) for kill in kills]
        return kills

    def status(self) -> tuple[BypassStatus, ...]:
        """GPUs on which the container now exceeds its limit by bypassing processes."""
        return tuple(
            BypassStatus(one.uuid, one.pids, one.held_bytes, one.limit_bytes, self._action)
            for one in self._found.values()
        )

    def _bypasses(self, last: _LastReading, pid: int) -> bool | None:
        return self._rules.bypasses(pid, last.reading) if pid in last.unconnected_usage else False

    def _kill(self, grant: Grant, found: Bypass, pid: int, reading: MemoryReading) -> KillStatus | None:
        seen = reading.seen.get(pid)
        if seen is None or (pid, seen.started) in self._ended:
            return None
        command = host.command_of(pid)  # before the process ends
        if not host.kill(pid, seen.started):
            return None
        self._ended.add((pid, seen.started))
        pod = f"{grant.namespace}/{grant.pod}"
        _log.error(
            "killed a process that goes around the library", pod=pod, container=grant.container, gpu=found.uuid, pid=pid,
            command=command, measured_mib=found.held_bytes // MIB, limit_mib=found.limit_bytes // MIB,
        )  # fmt: skip
        return KillStatus(
            f"{pid}-{seen.started}", grant.uid, pod, grant.container, found.uuid, pid, command, found.held_bytes,
            found.limit_bytes, bypass=True,
        )  # fmt: skip


def _end(grant: Grant, place: CgroupOwner) -> int:
    """Kill all processes of the container, because one of them starts the others repeatedly. Returns how many existed."""
    count = host.kill_all(place)
    if count:
        _log.error(
            "killed all processes of a container that starts processes that go around the library again and again",
            pod=f"{grant.namespace}/{grant.pod}", container=grant.container, processes=count,
        )  # fmt: skip
    return count
