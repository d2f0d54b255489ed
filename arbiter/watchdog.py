"""Who is to run, has work and was not heard of for long: perhaps somebody else suspended it, and it is resumed.

`vgpu.healing` decides when one container is due; this module finds the one that is, for the thread of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from arbiter.counts import Counts
from arbiter.tenant import TenantTurns
from vgpu import wire


class Watchdog:
    """Of one node. `wait_s`: 0 = nobody is resumed. Under the lock of `Turns`."""

    def __init__(self, depending: Callable[[str], Sequence[TenantTurns]], counts: Counts, wait_s: float) -> None:
        self._depending, self._counts, self._wait_s = depending, counts, wait_s

    def heard(self, tenant: TenantTurns, message: wire.Message, at_s: float) -> None:
        """A message of its came. That it launches does not say that it runs."""
        what = message.what if isinstance(message, wire.Activity) else None
        if what is wire.What.IDLE:
            tenant.healing.ended(at_s, self._wait_s)
        if what is not wire.What.STILL:
            tenant.healing.heard(at_s)

    def heal(self, card: str, at_s: float) -> TenantTurns | None:
        """One that is due on a GPU. The caller resumes it."""
        for tenant in self._watched(card):
            if at_s >= tenant.healing.due_s(card, self._wait_s):
                tenant.healing.healed(card, at_s, self._wait_s)
                tenant.heals += 1
                self._counts.heals += 1
                return tenant
        return None

    def next_s(self, card: str) -> float:
        """When `heal` has something to do at the earliest; inf = not before somebody says something."""
        return min((tenant.healing.due_s(card, self._wait_s) for tenant in self._watched(card)), default=inf)

    def _watched(self, card: str) -> Iterator[TenantTurns]:
        for tenant in self._depending(card) if self._wait_s else ():
            if tenant.wanted and not tenant.obstacles.denied and tenant.says_work() and tenant.seats(card):
                yield tenant
