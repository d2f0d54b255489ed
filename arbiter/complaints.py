"""What the log says of tenants of GPU time. Decides nothing."""

from __future__ import annotations

from typing import Final

import structlog

from arbiter.tenant import PARTIAL, TenantTurns

COMPLAIN_S: Final = 10.0
"""A tenant that cannot be suspended is logged this often, however often it tells of other channels."""
_log = structlog.get_logger()


def tell_of_doubt(tenant: TenantTurns) -> None:
    """The verdict on its word has changed."""
    if not tenant.suspicion.proven:
        _log.info("its word about its work counts again", grant=tenant.name)
    elif tenant.distrusted:
        _log.warning("computes while it says it is idle: it counts as working best-effort", grant=tenant.name)
    else:
        _log.warning("computes while it says it is idle: nothing follows from that here", grant=tenant.name)


def tell_of_trouble(tenant: TenantTurns, why: str, at_s: float) -> None:
    """It cannot be suspended."""
    if at_s - tenant.complained_at_s >= COMPLAIN_S:
        tenant.complained_at_s = at_s
        _log.error("a tenant cannot be suspended", grant=tenant.name, reason=why, times=tenant.failures)


def tell_of_partial(tenant: TenantTurns) -> None:
    """Once, of one with more channels than a list holds."""
    if tenant.partial and not tenant.told_partial:
        _log.error("a tenant cannot be suspended: new work is held back instead", grant=tenant.name, reason=PARTIAL)
        tenant.told_partial = True


def tell_of_no_effect(tenant: TenantTurns) -> None:
    """Its work ends while it is suspended."""
    _log.error("suspends have no effect: new work is held back too", grant=tenant.name)
