"""Whom to stop the moment a request comes, found out before it comes.

To hear a message, decide and look for what is to be switched takes Python 0.25 ms when it has slept before (measured on the H200's
machine: its code is not in the processor's cache by then), and the request waits. So when a card's thread has nothing left to do, it
asks the policy whom each latency-critical tenant would drive away, and stops the first of these when that tenant has work. What else there
is to stop follows as always.

Orders are found out anew whenever the thread has nothing left to do, and forgotten when anything happens. They name only tenants that nobody but this
thread hears of and switches: none with several cards, granted or used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from arbiter.seat import Seat
from arbiter.tenant import TenantTurns
from vgpu import wire
from vgpu.share import Share

BEGINS: Final = (wire.What.WORK, wire.What.HINT, wire.What.BEGIN_SECTION)


class Order(NamedTuple):
    """Whom to stop first, and what of it there is on the card."""

    tenant: TenantTurns
    seats: list[Seat]


class Orders:
    """Of all cards. Under the lock of `Turns`."""

    def __init__(self, lead_s: float) -> None:
        self._lead_us = lead_s * 1e6
        """What is announced for later is no order yet."""
        self._cards: dict[str, dict[TenantTurns, Order]] = {}

    def give(
        self, card: str, depending: Iterable[TenantTurns], tenants: Mapping[str, TenantTurns], share: Share
    ) -> None:
        """As things stand now; `depending`: those of the tenants that the card's thread reads or switches."""
        urgent = [t for t in depending if t.urgent and _is_this_threads(t, card) and not t.distrusted]
        found = {t: [o for name in share.gives_way(t.name) if _obeys(o := tenants[name], card)] for t in urgent}
        self._cards[card] = {t: Order(stops[0], stops[0].seats(card)) for t, stops in found.items() if stops}

    def forget(self, cards: Iterable[str] | None = None) -> None:
        """Things stand otherwise on these, or on all."""
        for card in list(self._cards) if cards is None else cards:
            self._cards.pop(card, None)

    def of(self, card: str, tenant: TenantTurns, message: wire.Message) -> Order | None:
        """Whom to stop there first for this message."""
        orders = self._cards.get(card)
        if not orders or not isinstance(message, wire.Activity) or message.what not in BEGINS:
            return None
        if message.what is wire.What.HINT and message.value > self._lead_us:
            return None
        return orders.get(tenant)


def _is_this_threads(tenant: TenantTurns, card: str) -> bool:
    return tenant.cards == tenant.depends_on() == {card}


def _obeys(tenant: TenantTurns, card: str) -> bool:
    """Is it known to be suspended when it is told to? All of it runs."""
    return _is_this_threads(tenant, card) and not tenant.gates and tenant.is_on(card)
