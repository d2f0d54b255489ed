"""Say of each node what its best GPU lacks for a pod.

Pure: a `Snapshot` and an ask in, a row per node out. Whether a node takes the pod, and the reason when not, is `placement`'s word;
what is added is the card that comes nearest, which a person can act on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vgpu.fleet import Fleet
from vgpu.inventory import Card
from vgpu.placement import explain
from vgpu.request import FULL_CORE_PERCENT, PodAsk, peak
from vgpu.snapshot import Snapshot, fleet_of


@dataclass(frozen=True, slots=True)
class Nearest:
    """The card of a node that comes nearest to what a pod asks of one card."""

    uuid: str
    index: int
    model: str
    mib: int
    free_mib: int
    free_percent: int
    lacks_mib: int
    lacks_percent: int


@dataclass(frozen=True, slots=True)
class Row:
    """One node."""

    node: str
    reason: str
    """Empty when the pod fits."""
    nearest: Nearest | None
    """None where no card may be shared with this pod at all, and for MIG instances."""


def rows_of(snapshot: Snapshot, ask: PodAsk) -> list[Row]:
    """Every node: first those that fit, then by how much the best card lacks, then by name."""
    fleet = fleet_of(snapshot)
    names = tuple(node.name for node in snapshot.nodes)
    excluded = {node.name: node.excluded for node in snapshot.nodes if node.excluded}
    reasons = explain(fleet, ask, names) | excluded
    rows = [Row(name, reasons.get(name, ""), _nearest(fleet, name, ask)) for name in names]
    return sorted(rows, key=lambda row: (row.reason != "", row.nearest is None, _distance(row.nearest), row.node))


def need_of(ask: PodAsk) -> tuple[int, int] | None:
    """(MiB, percent) that a pod asks of one card: of the container that asks for most. None when that is not in these terms."""
    shares = [part for part in ask.containers if part.kind == "share"]
    if any(part.init for part in shares):  # they all lie on the same cards
        return peak(shares, lambda part: part.mib), peak(shares, lambda part: part.core_percent)
    return max(((part.mib, part.core_percent) for part in shares), default=None)


def _nearest(fleet: Fleet, node: str, ask: PodAsk) -> Nearest | None:
    if node not in fleet:
        return None
    whole = any(part.kind == "whole" for part in ask.containers)
    need = need_of(ask)
    if need is None and not whole:
        return None
    at, found = fleet.column[node], []
    for row, card in enumerate(fleet.inventory[node].cards):
        if card.shareable and _allowed(ask, card):
            mib, percent = (card.mib, FULL_CORE_PERCENT) if whole else need or (0, 0)
            free_mib, free_percent = int(fleet.free_mib[row, at]), int(fleet.free_percent[row, at])
            lacks = max(0, mib - free_mib), max(0, percent - free_percent)
            found.append(Nearest(card.uuid, card.index, card.model, card.mib, free_mib, free_percent, *lacks))
    return min(found, key=lambda one: (_distance(one), one.index), default=None)


def _distance(one: Nearest | None) -> float:
    return one.lacks_mib / one.mib + one.lacks_percent / FULL_CORE_PERCENT if one is not None else 0.0


def _allowed(ask: PodAsk, card: Card) -> bool:
    return (
        (not ask.models or card.model in ask.models)
        and card.model not in ask.not_models
        and (not ask.uuids or card.uuid in ask.uuids)
        and card.uuid not in ask.not_uuids
    )


def summary(rows: Sequence[Row]) -> dict[str, int]:
    """Reason -> nodes, most frequent first; those that fit are left out."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.reason:
            counts[row.reason] = counts.get(row.reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
