"""What the arbiter believes of containers: whether each can be suspended, and whether its word about its work counts.

The evidence is of each container (`arbiter.obstacles`, `arbiter.evidence`, `arbiter.word`). This module brings the news to it, counts the
verdicts of all containers, and says in the log what changed. What follows from a verdict is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from arbiter.complaints import tell_of_doubt, tell_of_no_effect, tell_of_no_trial, tell_of_trouble, tell_of_try
from arbiter.counts import Counts
from arbiter.tenant import TenantTurns
from vgpu import wire
from vgpu.trial import Suspending

SILENT_S: Final = 0.5
"""A container whose thread has not come round for so long may resume itself. Specified: the library waits 0.6 s."""
CHECKED_S: Final = 10.0
"""Nothing was compared with the driver's count for so long: it is not checked. Guessed: some looks."""


class Trust:
    """Of all containers; under the lock of `Turns`. `suspending`: may the channels on these GPUs be suspended, by the trial of this boot?"""

    def __init__(self, counts: Counts, suspending: Callable[[Iterable[str]], Suspending]) -> None:
        self._counts, self._suspending = counts, suspending
        self._checked_at_s = -inf

    def checks(self, at_s: float) -> bool:
        """Is what containers say compared with what the driver counts?"""
        return at_s - self._checked_at_s < CHECKED_S

    def checked(self, at_s: float) -> None:
        """The driver's count was read."""
        self._checked_at_s = at_s

    def weigh(self, tenant: TenantTurns, at_s: float, seen_s: float, *, whole: bool) -> None:
        """Since the last look the driver saw it compute for so long; `whole`: and saw all there was."""
        if tenant.weigh(at_s, seen_s):
            self._doubts(tenant)
        self._counts.decays += tenant.decays(at_s, seen_s if whole else None)

    def forgets(self, tenant: TenantTurns, at_s: float) -> bool:
        """Whether the verdict on its word ends, as nothing was compared for long."""
        forgets = tenant.word.forgets(at_s)
        if forgets:
            self._doubts(tenant)
        return forgets

    def judge(self, tenant: TenantTurns, at_s: float) -> None:
        """May it be suspended, as far as its GPUs and their driver go?"""
        obstacles = tenant.obstacles
        obstacles.suspending = self._suspending([card.uuid for card in tenant.grant.cards])
        if obstacles.denied:
            tell_of_trouble(tenant, obstacles.suspending.why, at_s)
        elif obstacles.suspending.why:
            tell_of_no_trial(tenant)

    def refused(self, tenant: TenantTurns, on: bool, status: int, at_s: float) -> None:
        """The driver refused to resume or suspend it."""
        self._counts.failures += not on
        tenant.obstacles.failures += not on
        why = f"the driver answered {status & 0xFFFFFFFF:#x} to a {'resume' if on else 'suspend'}"
        tenant.obstacles.refused(at_s, why)
        tell_of_trouble(tenant, why, at_s)

    def tries(self, tenant: TenantTurns, at_s: float) -> bool:
        """Whether it is suspended again from now on, if the driver does it, after that did not work."""
        tries = tenant.tries(at_s)
        if tries:
            tell_of_try(tenant)
        return tries

    def hear(self, tenant: TenantTurns, number: int, said: wire.Activity, at_s: float, silent_s: float) -> None:
        """What its process says may show that suspends have no effect. `silent_s`: of one that resumed itself, how long the page said nothing."""
        if tenant.contradicts(number, said, at_s, silent=silent_s > SILENT_S):
            tell_of_no_effect(tenant)

    def _doubts(self, tenant: TenantTurns) -> None:
        self._counts.untold += tenant.word.suspicion.proven
        tell_of_doubt(tenant)
