"""What the arbiter does about processes that go around the library: it reports them, and ends them where `vgpu.memory.bypass` says so.

Events and evictions are the device plugin's, which reads the status.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Protocol

import msgspec
import structlog

from arbiter import host
from arbiter.memory.meter import Reading
from vgpu.api.cgroup import NOWHERE, Place
from vgpu.api.grant import Grant
from vgpu.memory.bypass import QUIET_S, Bypass, Patience, Policy, ProcessMemory, Returns, Traces, action, bypassing
from vgpu.memory.over_limit import Held
from vgpu.protocol.status import BypassStatus, KillStatus

MIB: Final = 2**20
_log = structlog.get_logger()


class Traced(Protocol):
    """Who looks at processes that are not connected."""

    def traces(self, pid: int, started: int) -> Traces | None:
        """None = nobody looked yet."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What all containers of a node share; from the settings."""

    policy: Policy = "report"
    beyond_bytes: int = 0
    """Context room and slack."""
    began_s: float = -inf
    """The arbiter's start."""
    quiet_s: float = QUIET_S
    visible: bool = True
    """Are the node's processes seen?"""
    traced: Traced | None = None

    def bypasses(self, pid: int, reading: Reading) -> bool | None:
        """Does this process, which this reading found and which is not connected, go around the library? None = it is unknown."""
        if self.traced is None or pid not in reading.seen:
            return None
        return bypassing(self.traced.traces(pid, reading.seen[pid].started), reading.at_s)

    def now(self, at_s: float) -> Policy:
        """What is done about it."""
        return action(self.policy, runs_s=at_s - self.began_s, visible=self.visible, quiet_s=self.quiet_s)


@dataclass(frozen=True, slots=True)
class _Last:
    """The last reading, as one container has it."""

    grant: Grant
    reading: Reading
    held: Mapping[str, Sequence[Held]]
    unconnected_usage: frozenset[int]
    """Pids of those that are not connected."""
    place: Place
    """Of the container; without an ID = nobody knows it yet."""


class Bypassing:
    """Of one container."""

    def __init__(self, rules: Rules) -> None:
        self._rules, self._patience, self._returns = rules, Patience(rules.beyond_bytes), Returns()
        self._last: _Last | None = None
        self._found: dict[str, Bypass] = {}
        self._policy: Policy = "report"
        """What was done at the last reading."""
        self._ended: set[tuple[int, int]] = set()
        """Processes that were signalled and are still listed."""

    def take(
        self,
        grant: Grant,
        reading: Reading,
        held: Mapping[str, Sequence[Held]],
        unconnected_usage: Collection[int],
        at_s: float,
        place: Place = NOWHERE,
    ) -> list[KillStatus]:
        """A reading, and who in it is not connected. Which processes were killed. `place`: the container's cgroup."""
        if not held:  # its GPUs did not answer: what was found stands
            return []
        self._last = _Last(grant, reading, held, frozenset(unconnected_usage), place)
        return self._judge(self._last, at_s)

    def again(self, at_s: float) -> list[KillStatus]:
        """More may be known of the processes of the last reading. Which were killed."""
        return self._judge(self._last, at_s) if self._last is not None and self._last.unconnected_usage else []

    def pids(self) -> frozenset[int]:
        """Processes of the last reading that go around the library."""
        if self._last is None:
            return frozenset()
        return frozenset(pid for pid in self._last.unconnected_usage if self._rules.bypasses(pid, self._last.reading))

    def met(self, pid: int) -> None:
        """It has connected."""
        if self._last is not None:
            self._last = replace(self._last, unconnected_usage=self._last.unconnected_usage - {pid})

    def _judge(self, last: _Last, at_s: float) -> list[KillStatus]:
        grant, reading, held = last.grant, last.reading, last.held
        shares = {
            uuid: [ProcessMemory(p.pid, p.measured_bytes, self._bypasses(last, p.pid)) for p in of]
            for uuid, of in held.items()
        }
        found = self._patience.look(reading.at_s, {gpu.uuid: gpu.mib * MIB for gpu in grant.gpus}, shares)
        self._found = {uuid: one for uuid, one in self._found.items() if uuid not in held}
        self._found |= {one.uuid: one for one in found}
        self._policy = self._rules.now(at_s)
        listed = {(pid, seen.started) for pid, seen in reading.seen.items()}
        self._ended &= listed
        if self._policy != "kill":
            return []
        kills = [
            kill for one in found for pid in one.pids if (kill := self._kill(grant, one, pid, reading)) is not None
        ]
        if kills and self._returns.ended(reading.at_s) and last.place.container:
            whole = _end(grant, last.place) > 0
            return [msgspec.structs.replace(kill, whole=whole) for kill in kills]
        return kills

    def status(self) -> tuple[BypassStatus, ...]:
        """GPUs on which the container is over its limit in this way now."""
        return tuple(
            BypassStatus(one.uuid, one.pids, one.held_bytes, one.limit_bytes, self._policy)
            for one in self._found.values()
        )

    def _bypasses(self, last: _Last, pid: int) -> bool | None:
        return self._rules.bypasses(pid, last.reading) if pid in last.unconnected_usage else False

    def _kill(self, grant: Grant, found: Bypass, pid: int, reading: Reading) -> KillStatus | None:
        seen = reading.seen.get(pid)
        if seen is None or (pid, seen.started) in self._ended:
            return None
        command = host.command_of(pid)  # while it lives
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


def _end(grant: Grant, place: Place) -> int:
    """What starts these processes again and again is in the same container. Answers how many processes were there."""
    count = host.kill_all(place)
    if count:
        _log.error(
            "killed all processes of a container that starts processes that go around the library again and again",
            pod=f"{grant.namespace}/{grant.pod}", container=grant.container, processes=count,
        )  # fmt: skip
    return count
