"""What GPUs this machine has: an inventory, gathered GPU by GPU.

Each GPU is a call of its own, so that one that does not answer delays no other, and other callers have their turn in between.
"""

from __future__ import annotations

from dataclasses import replace

from nvml.errors import NvmlAway, NvmlError
from nvml.queries import Nvml
from vgpu.inventory import AccessMode, Card, Inventory


def probe(nvml: Nvml, *, unit_mib: int, access: AccessMode, last: Inventory | None = None) -> Inventory:
    """Everything NVML reports of this machine's GPUs.

    A card that does not answer now and did in `last` stands as it was, unhealthy. Raises NvmlError when a card that was
    never seen does not answer, or NVML as a whole does not.
    """
    counted = nvml.count()
    cards = []
    for index in range(counted.count):
        known = next((card for card in last.cards if card.index == index), None) if last else None
        try:
            cards.append(nvml.card_at(index, known.uuid if known is not None else ""))
        except NvmlAway:
            raise
        except NvmlError:
            if known is None:
                raise
            cards.append(replace(known, healthy=False))
    seen = {card.uuid for card in cards}
    lost = [card for card in (last.cards if last else ()) if card.index >= counted.count and card.uuid not in seen]
    cards += [replace(card, healthy=False) for card in lost]
    return Inventory(_linked(cards), unit_mib=unit_mib, access=access, driver=counted.driver)


def _linked(cards: list[Card]) -> tuple[Card, ...]:
    """Peers by UUID. Links that end at no card (NVSwitches) join every card that has such links."""
    by_pci = {card.pci: card.uuid for card in cards if card.pci}
    uuids = {card.uuid for card in cards}
    switched = {
        card.uuid: sum(n for peer, n in card.nvlinks.items() if peer not in by_pci and peer not in uuids)
        for card in cards
    }
    linked = []
    for card in cards:
        peers = {
            by_pci.get(peer, peer): links for peer, links in card.nvlinks.items() if peer in by_pci or peer in uuids
        }
        if switched[card.uuid]:
            for other in cards:
                if other.uuid != card.uuid and switched[other.uuid]:
                    peers[other.uuid] = peers.get(other.uuid, 0) + min(switched[card.uuid], switched[other.uuid])
        linked.append(replace(card, nvlinks=peers))
    return tuple(linked)
