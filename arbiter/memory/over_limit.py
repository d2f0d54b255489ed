"""The arbiter's action on a container over its limit: it reports that, and kills if the over-limit action is `kill`.

`vgpu.memory.over_limit` decides whether it is over its limit. The device plugin reads the status, and makes Events and evictions. A kill ends the
excess within milliseconds, and the container may end as soon: so kills are stored separately from containers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import structlog

from arbiter import host
from arbiter.memory.meter import MemoryReading
from vgpu.api.grant import Grant
from vgpu.memory.over_limit import Excess, MeasuredProcess, OverLimitDetector
from vgpu.protocol.status import KillStatus

MIB: Final = 2**20
REMEMBERED_S: Final = 60.0
"""The device plugin reads the status every 0.8 s; it may be restarting. Guessed."""
REMEMBERED: Final = 256
"""Largest number of stored kills. Guessed."""
_log = structlog.get_logger()


class Kills:
    """The last kills of a node."""

    def __init__(self) -> None:
        self._kills: deque[tuple[float, KillStatus]] = deque(maxlen=REMEMBERED)

    def add(self, kill: KillStatus, at_s: float) -> bool:
        """Store a new kill. Returns whether it was unknown: there may be two reasons to kill one process."""
        known = any(one.id == kill.id for _, one in self._kills)
        if not known:
            self._kills.append((at_s, kill))
        return not known

    def lately(self, at_s: float) -> tuple[KillStatus, ...]:
        """Kills of the last minute, oldest first."""
        return tuple(kill for killed_at_s, kill in self._kills if at_s - killed_at_s < REMEMBERED_S)


def evaluate(
    detector: OverLimitDetector,
    grant: Grant,
    limits_bytes: Mapping[str, int],
    reading: MemoryReading,
    held: dict[str, list[MeasuredProcess]],
) -> list[KillStatus]:
    """Evaluate a reading and act on it. `limits_bytes`: in all, by GPU. Returns the killed processes."""
    newly = detector.evaluate(limits_bytes, held)
    about = {"pod": f"{grant.namespace}/{grant.pod}", "container": grant.container, "policy": grant.over_limit_action}
    for excess in newly:
        _log.error("a container uses more GPU memory than it was granted", **about, **_reported(excess))
    if grant.over_limit_action != "kill":
        return []
    kills = []
    for excess in detector.excesses:
        seen = reading.seen.get(excess.offender)
        if excess.uuid not in held or seen is None:
            continue
        reported = _reported(excess)  # before the process ends
        if host.kill(excess.offender, seen.started):
            kills.append(_kill(grant, excess, seen.started, str(reported["command"])))
            _log.error("killed the process that exceeded its limit", **about, **reported)
    return kills


def _kill(grant: Grant, excess: Excess, started: int, command: str) -> KillStatus:
    return KillStatus(
        id=f"{excess.offender}-{started}",
        uid=grant.uid,
        pod=f"{grant.namespace}/{grant.pod}",
        container=grant.container,
        gpu=excess.uuid,
        pid=excess.offender,
        command=command,
        held_bytes=excess.measured_bytes,
        limit_bytes=excess.limit_bytes,
    )


def _reported(excess: Excess) -> dict[str, object]:
    return {
        "gpu": excess.uuid,
        "pid": excess.offender,
        "command": host.command_of(excess.offender),
        "measured_mib": excess.measured_bytes // MIB,
        "limit_mib": excess.limit_bytes // MIB,
    }
