"""What the arbiter does when a container is over its limit: it says so, and kills where the policy is to kill.

Whether it is over `vgpu.memory.over_limit` decides. Events and evictions are the device plugin's, which reads the status. A kill ends what it is
for within milliseconds, and the container may be gone as soon: so kills are remembered apart from containers.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import structlog

from arbiter import host
from arbiter.memory.meter import Reading
from vgpu.api.grant import Grant
from vgpu.memory.over_limit import Excess, Held, Lookout
from vgpu.protocol.status import KillStatus

MIB: Final = 2**20
REMEMBERED_S: Final = 60.0
"""The device plugin looks every 0.8 s; it may be restarting. Guessed."""
REMEMBERED: Final = 256
"""No more than that. Guessed."""
_log = structlog.get_logger()


class Kills:
    """The last ones of a node."""

    def __init__(self) -> None:
        self._kills: deque[tuple[float, KillStatus]] = deque(maxlen=REMEMBERED)

    def add(self, kill: KillStatus, at_s: float) -> bool:
        """It has just been done. Was it not known? Two reasons may end one process."""
        known = any(one.id == kill.id for _, one in self._kills)
        if not known:
            self._kills.append((at_s, kill))
        return not known

    def lately(self, at_s: float) -> tuple[KillStatus, ...]:
        """Of the last minute, oldest first."""
        return tuple(kill for killed_at_s, kill in self._kills if at_s - killed_at_s < REMEMBERED_S)


def look(lookout: Lookout, grant: Grant, reading: Reading, held: dict[str, list[Held]]) -> list[KillStatus]:
    """Take a reading in and act on it. Which processes were killed."""
    newly = lookout.look({gpu.uuid: gpu.mib * MIB for gpu in grant.gpus}, held)
    about = {"pod": f"{grant.namespace}/{grant.pod}", "container": grant.container, "policy": grant.guard}
    for excess in newly:
        _log.error("a container uses more GPU memory than it was granted", **about, **_reported(excess))
    if grant.guard != "kill":
        return []
    kills = []
    for excess in lookout.excesses:
        seen = reading.seen.get(excess.offender)
        if excess.uuid not in held or seen is None:
            continue
        reported = _reported(excess)  # while it lives
        if host.kill(excess.offender, seen.started):
            kills.append(_kill(grant, excess, seen.started, str(reported["command"])))
            _log.error("killed the process that went around its limit", **about, **reported)
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
