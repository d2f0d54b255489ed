"""What the arbiter does when a container is over its limit: it says so, and kills where the policy is to kill.

Whether it is over `vgpu.guard` decides. Events and evictions are the device plugin's, which reads the status.
"""

from __future__ import annotations

from typing import Final

import structlog

from arbiter import host
from arbiter.meter import Reading
from vgpu.grant import Grant
from vgpu.guard import Excess, Held, Lookout

MIB: Final = 2**20
_log = structlog.get_logger()


def look(lookout: Lookout, grant: Grant, reading: Reading, held: dict[str, list[Held]]) -> int:
    """Take a reading in and act on it. How many processes were killed."""
    newly = lookout.look({card.uuid: card.mib * MIB for card in grant.cards}, held)
    about = {"pod": f"{grant.namespace}/{grant.pod}", "container": grant.container, "policy": grant.guard}
    for excess in newly:
        _log.error("a container holds more GPU memory than it was granted", **about, **_told(excess))
    if grant.guard != "kill":
        return 0
    kills = 0
    for excess in lookout.excesses:
        seen = reading.seen.get(excess.offender)
        if excess.uuid in held and seen is not None and host.kill(excess.offender, seen.started):
            kills += 1
            _log.error("killed the process that went around its limit", **about, **_told(excess))
    return kills


def _told(excess: Excess) -> dict[str, object]:
    return {
        "gpu": excess.uuid,
        "pid": excess.offender,
        "command": host.command_of(excess.offender),
        "measured_mib": excess.measured_bytes // MIB,
        "limit_mib": excess.limit_bytes // MIB,
    }
