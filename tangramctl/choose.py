"""Which card a run is given: the cluster's own placement, over a fleet of one node. Pure.

What is free of a card is its memory less what runs were granted, whether they use it or not, less what processes of nobody's run
hold now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tangramctl.errors import BadOption, NoRoom
from vgpu.fleet import Fleet
from vgpu.grant import Slice
from vgpu.inventory import Card, Inventory
from vgpu.placement import TOO_LARGE, Placement, place
from vgpu.request import PodAsk

HERE: Final = "this machine"


@dataclass(frozen=True, slots=True)
class Holding:
    """What a run was granted."""

    piece: Slice
    by: str
    """For a person: `pid 4711, python train.py`."""


def choose(
    ask: PodAsk, inventory: Inventory, holdings: Iterable[Holding], foreign_mib: Mapping[str, int], hint: str = ""
) -> Slice:
    """The slice to grant. Raises BadOption, with `hint` at its end, when no card is large enough even when empty, and NoRoom when one
    would be."""
    held = list(holdings)
    rows = {card.uuid: card.index for card in inventory.cards}
    foreign = [Slice(uuid, rows[uuid], mib) for uuid, mib in foreign_mib.items() if mib > 0 and uuid in rows]
    fleet = Fleet()
    fleet.set_node(HERE, inventory, [*(holding.piece for holding in held), *foreign])
    answer = place(fleet, ask, [HERE])
    if isinstance(answer, Placement):
        (piece,) = answer.assignment.containers["run"]
        return piece
    (wanted,) = ask.containers
    allowed = [card for card in inventory.cards if not ask.uuids or card.uuid in ask.uuids]
    if answer.reasons[HERE] == TOO_LARGE:
        raise BadOption(_too_large(wanted.mib, allowed, hint))
    free = {card.uuid: _free(fleet, row) for row, card in enumerate(inventory.cards)}
    cap = f" and {wanted.core_percent} % of its time" if wanted.core_percent else ""
    lines = [f"no GPU has {wanted.mib} MiB{cap} free:"]
    for card in allowed:
        lines += _card_lines(card, free[card.uuid], foreign_mib.get(card.uuid, 0), held)
    raise NoRoom("\n".join(lines))


def _free(fleet: Fleet, row: int) -> tuple[int, int]:
    column = fleet.column[HERE]
    return max(0, int(fleet.free_mib[row, column])), max(0, int(fleet.free_percent[row, column]))


def _too_large(mib: int, allowed: list[Card], hint: str) -> str:
    shared = [card for card in allowed if card.shareable]
    if not shared:
        return f"--gpu-mem is {mib} MiB: none of the {len(allowed)} GPUs may be shared (ill, or in MIG mode)"
    largest = max(shared, key=lambda card: card.mib)
    return (
        f"--gpu-mem is {mib} MiB: it must be 1 to {largest.mib} MiB, "
        f"what GPU {largest.index} ({largest.model}, the largest here) has{hint}"
    )


def _card_lines(card: Card, free: tuple[int, int], foreign_mib: int, held: list[Holding]) -> list[str]:
    name = f"  GPU {card.index} ({card.model}, {card.uuid})"
    if not card.shareable:
        return [f"{name}: may not be shared ({'MIG mode' if card.mig else 'ill'})"]
    lines = [f"{name}: {free[0]} of {card.mib} MiB and {free[1]} % free"]
    for holding in sorted(held, key=lambda holding: -holding.piece.mib):
        if holding.piece.uuid == card.uuid:
            core = f", {holding.piece.core_percent} %" if holding.piece.core_percent else ""
            lines.append(f"    {holding.piece.mib} MiB{core} granted to {holding.by}")
    if foreign_mib:
        lines.append(f"    {foreign_mib} MiB held by processes outside tangramctl")
    return lines
