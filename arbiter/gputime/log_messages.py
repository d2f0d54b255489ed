"""What the log says of containers of GPU time. Decides nothing."""

from __future__ import annotations

from math import inf
from typing import Final

import structlog

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.obstacles import PARTIAL
from arbiter.gputime.timer import now_s
from vgpu.api.enforcement import TABLE, Reason

COMPLAIN_S: Final = 10.0
"""A container that cannot be suspended is logged this often, however often it tells of other channels."""
REPORT_S: Final = 60.0
"""A reason of a container is logged this often, however often its processes report it."""
REPORTS_KEPT: Final = 4096
"""Containers and reasons that are remembered for that. Guessed."""
_log = structlog.get_logger()
_reported_s: dict[tuple[str, Reason], float] = {}
"""When each was logged last."""


def report_of_doubt(container: GpuTimeContainer) -> None:
    """The verdict on its word has changed."""
    if not container.word.suspicion.proven:
        _log.info("its word about its work counts again", grant=container.name)
    elif container.distrusted:
        _log.warning("computes while it says it is idle: it counts as working best-effort", grant=container.name)
    else:
        _log.warning("computes while it says it is idle: nothing follows from that here", grant=container.name)


def report_of_trouble(container: GpuTimeContainer, why: str, at_s: float) -> None:
    """It cannot be suspended."""
    if at_s - container.obstacles.complained_at_s >= COMPLAIN_S:
        container.obstacles.complained_at_s = at_s
        _log.error(
            "a container cannot be suspended", grant=container.name, reason=why, times=container.obstacles.failures
        )


def report_of_no_trial(container: GpuTimeContainer) -> None:
    """Once, of one that is suspended though no trial says that this works."""
    if not container.obstacles.reported_no_trial:
        _log.warning(
            "suspending was not tried on this GPU", grant=container.name, reason=container.obstacles.suspending.why
        )
        container.obstacles.reported_no_trial = True


def report_of_partial(container: GpuTimeContainer) -> None:
    """Once, of one with more channels than a list holds."""
    if container.obstacles.unlisted and not container.obstacles.reported_partial:
        _log.error(
            "a container cannot be suspended: new work is held back instead", grant=container.name, reason=PARTIAL
        )
        container.obstacles.reported_partial = True


def report_of_report(grant: str, pid: int, reason: Reason, *, active: bool) -> None:
    """A library reports a limit that it cannot enforce, or that it can again. A process that reports without end fills the debug log only."""
    if not active:
        _log.debug("a process reports the end of a reason", grant=grant, pid=pid, reason=reason)
        return
    at_s = now_s()
    if at_s - _reported_s.get((grant, reason), -inf) < REPORT_S:
        _log.debug("a limit is not enforced", grant=grant, pid=pid, reason=reason)
        return
    if len(_reported_s) >= REPORTS_KEPT:
        _reported_s.clear()
    _reported_s[grant, reason] = at_s
    _log.warning("a limit is not enforced", grant=grant, pid=pid, reason=reason, means=TABLE[reason].means)


def report_of_no_effect(container: GpuTimeContainer) -> None:
    """Its work ends while it is suspended."""
    _log.error("suspends have no effect: new work is held back too", grant=container.name)


def report_of_try(container: GpuTimeContainer) -> None:
    """Suspends are tried again on one for which they did not work."""
    _log.info("tries again to suspend", grant=container.name)


def report_of_stall(gpu: str, seconds: float) -> None:
    """The arbiter did not run, or its thread of a GPU did not."""
    _log.warning("the arbiter was stalled: nobody enforced GPU time", gpu=gpu, seconds=round(seconds, 3))
