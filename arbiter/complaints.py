"""What the log says of tenants of GPU time. Decides nothing."""

from __future__ import annotations

from math import inf
from typing import Final

import structlog

from arbiter.obstacles import PARTIAL
from arbiter.tenant import TenantTurns
from arbiter.timer import now_s
from vgpu.enforcement import TABLE, Reason

COMPLAIN_S: Final = 10.0
"""A tenant that cannot be suspended is logged this often, however often it tells of other channels."""
REPORT_S: Final = 60.0
"""A reason of a container is logged this often, however often its processes report it."""
REPORTS_KEPT: Final = 4096
"""Containers and reasons that are remembered for that. Guessed."""
_log = structlog.get_logger()
_reported_s: dict[tuple[str, Reason], float] = {}
"""When each was logged last."""


def tell_of_doubt(tenant: TenantTurns) -> None:
    """The verdict on its word has changed."""
    if not tenant.word.suspicion.proven:
        _log.info("its word about its work counts again", grant=tenant.name)
    elif tenant.distrusted:
        _log.warning("computes while it says it is idle: it counts as working best-effort", grant=tenant.name)
    else:
        _log.warning("computes while it says it is idle: nothing follows from that here", grant=tenant.name)


def tell_of_trouble(tenant: TenantTurns, why: str, at_s: float) -> None:
    """It cannot be suspended."""
    if at_s - tenant.obstacles.complained_at_s >= COMPLAIN_S:
        tenant.obstacles.complained_at_s = at_s
        _log.error("a tenant cannot be suspended", grant=tenant.name, reason=why, times=tenant.obstacles.failures)


def tell_of_no_trial(tenant: TenantTurns) -> None:
    """Once, of one that is suspended though no trial says that this works."""
    if not tenant.obstacles.told_no_trial:
        _log.warning("suspending was not tried on this GPU", grant=tenant.name, reason=tenant.obstacles.suspending.why)
        tenant.obstacles.told_no_trial = True


def tell_of_partial(tenant: TenantTurns) -> None:
    """Once, of one with more channels than a list holds."""
    if tenant.obstacles.unlisted and not tenant.obstacles.told_partial:
        _log.error("a tenant cannot be suspended: new work is held back instead", grant=tenant.name, reason=PARTIAL)
        tenant.obstacles.told_partial = True


def tell_of_report(grant: str, pid: int, reason: Reason, *, active: bool) -> None:
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


def tell_of_no_effect(tenant: TenantTurns) -> None:
    """Its work ends while it is suspended."""
    _log.error("suspends have no effect: new work is held back too", grant=tenant.name)


def tell_of_try(tenant: TenantTurns) -> None:
    """Suspends are tried again on one for which they did not work."""
    _log.info("tries again to suspend", grant=tenant.name)


def tell_of_stall(card: str, seconds: float) -> None:
    """The arbiter did not run, or its thread of a GPU did not."""
    _log.warning("the arbiter was stalled: nobody enforced GPU time", gpu=card, seconds=round(seconds, 3))
