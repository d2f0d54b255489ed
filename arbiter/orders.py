"""Whom to stop the moment a request comes, found out before it comes.

To hear a message, decide and look for what is to be switched takes Python 0.25 ms when it has slept before (measured,
bench/gpu_time: its code is not in the processor's cache by then), and the request waits. So when a card's thread has nothing left to do, it
asks the policy whom each latency-critical tenant would drive away, and stops those first when that tenant has work.

Orders hold until anything happens; all that they stop the policy would stop, and it is asked right after. A gang's cards are not switched by
one thread, so nobody with several cards has orders or is in any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from arbiter.seat import Runs, Seat
from arbiter.tenant import TenantTurns, Trial
from vgpu import wire
from vgpu.share import Share

BEGINS = (wire.What.WORK, wire.What.HINT, wire.What.BEGIN_SECTION)


class Orders:
    """Of all cards. Under the lock of `Turns`."""

    def __init__(self, lead_s: float) -> None:
        self._lead_us = lead_s * 1e6
        """What is announced for later is no order yet."""
        self._cards: dict[str, dict[TenantTurns, list[tuple[TenantTurns, list[Seat]]]]] = {}

    def give(self, card: str, tenants: Mapping[str, TenantTurns], share: Share) -> None:
        """As things stand now."""
        if card in self._cards:
            return
        self._cards[card] = {
            tenant: stops
            for tenant in tenants.values()
            if tenant.urgent
            and _is_only_on(tenant, card)
            and not tenant.distrusted
            and (
                stops := [
                    (o, o.seats(card)) for name in share.gives_way(tenant.name) if _obeys(o := tenants[name], card)
                ]
            )
        }

    def forget(self, cards: Iterable[str] | None = None) -> None:
        """Things stand otherwise on these, or on all."""
        for card in list(self._cards) if cards is None else cards:
            self._cards.pop(card, None)

    def of(self, card: str, tenant: TenantTurns, message: wire.Message) -> list[TenantTurns]:
        """Whom to stop there for this message, still on."""
        orders = self._cards.get(card)
        if not orders or not isinstance(message, wire.Activity) or message.what not in BEGINS:
            return []
        if message.what is wire.What.HINT and message.value > self._lead_us:
            return []
        return [other for other, seats in orders.get(tenant, ()) if all(seat.runs is Runs.ON for seat in seats)]


def _is_only_on(tenant: TenantTurns, card: str) -> bool:
    return tenant.cards == {card}


def _obeys(tenant: TenantTurns, card: str) -> bool:
    """Is it known to be suspended when it is told to?"""
    return _is_only_on(tenant, card) and not tenant.gates and tenant.trial is Trial.DONE
