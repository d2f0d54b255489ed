"""Say of each node what its best GPU lacks for a pod, and where only the sum of a node's GPUs is enough.

Pure: a `Snapshot` and an ask in, a row per node out. Whether a node takes the pod, and the reason when not, is `placement`'s word;
what is added is the card that comes nearest, which a person can act on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vgpu.fleet import Fleet
from vgpu.placement import TOO_FEW, explain
from vgpu.request import FULL_CORE_PERCENT, PodAsk, peak
from vgpu.snapshot import Snapshot, fleet_of
from vgpu.view import View


@dataclass(frozen=True, slots=True)
class Nearest:
    """The card of a node that comes nearest to what a pod asks of one card; of several cards, the last that would be taken."""

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
    lacks_cards: int = 0
    """How many more cards the node would need, of those that are large enough and allowed. 0 where that is not what it lacks."""
    models: tuple[str, ...] = ()
    """Of the cards that the node shares, whether the pod may have them or not."""
    largest_mib: int = 0
    """Of the largest card that the pod may have; 0 where it may have none, and for MIG instances."""


def rows_of(snapshot: Snapshot, ask: PodAsk) -> list[Row]:
    """Every node: first those that fit, then by how much the best card lacks, then by name."""
    fleet = fleet_of(snapshot)
    names = tuple(node.name for node in snapshot.nodes)
    excluded = {node.name: node.excluded for node in snapshot.nodes if node.excluded}
    reasons = explain(fleet, ask, names) | excluded
    rows = [_row(fleet, name, ask, reasons.get(name, "")) for name in names]
    return sorted(rows, key=lambda row: (row.reason != "", row.nearest is None, _distance(row.nearest), row.node))


@dataclass(frozen=True, slots=True)
class Scattered:
    """A node whose GPUs have enough free for a pod together. `free` is their sum, `most` what the GPU has that comes nearest."""

    node: str
    gpus: int
    """With something free, of those that the pod may have."""
    free_mib: int
    free_percent: int
    most_mib: int
    most_percent: int


def scattered(fleet: Fleet, ask: PodAsk, names: Sequence[str]) -> Scattered | None:
    """Of nodes that do not fit, one that would if its GPUs were one: that whose best GPU lacks least, then the smallest name.

    None where there is none, and for pods that ask for whole GPUs or MIG instances: those do not add up.
    """
    need = need_of(ask)
    if need is None or any(part.kind != "share" for part in ask.containers):
        return None
    view = View(fleet, ask, fleet.look_up(names), {}, emptied=False)
    books = view.books(untouched=False)
    mib = np.where(books.allowed, np.maximum(books.free_mib, 0), 0)
    percent = np.where(books.allowed, np.maximum(books.free_percent, 0), 0)
    wanted = [peak(ask.containers, lambda part: part.mib * part.cards)]
    wanted += [peak(ask.containers, lambda part: part.core_percent * part.cards)]
    enough = view.asked & (mib.sum(axis=0) >= wanted[0]) & (percent.sum(axis=0) >= wanted[1])
    if not enough.any():
        return None
    lacks = np.maximum(need[0] - mib, 0) / max(need[0], 1) + np.maximum(need[1] - percent, 0) / FULL_CORE_PERCENT
    lacks[~books.allowed] = np.inf
    least = np.where(enough, lacks.min(axis=0), np.inf)
    at = min(np.flatnonzero(least == least.min()).tolist(), key=view.names.__getitem__)
    row = int(lacks[:, at].argmin())
    sums = int(np.count_nonzero(mib[:, at])), int(mib[:, at].sum()), int(percent[:, at].sum())
    return Scattered(view.names[at], *sums, int(mib[row, at]), int(percent[row, at]))


def need_of(ask: PodAsk) -> tuple[int, int] | None:
    """(MiB, percent) that a pod asks of one card: of the container that asks for most. None when that is not in these terms."""
    shares = [part for part in ask.containers if part.kind == "share"]
    if any(part.init for part in shares):  # they all lie on the same cards
        return peak(shares, lambda part: part.mib), peak(shares, lambda part: part.core_percent)
    return max(((part.mib, part.core_percent) for part in shares), default=None)


def cards_of(ask: PodAsk) -> int:
    """Cards that a pod needs side by side for the container that wants most of them, or for all its whole ones."""
    wholes = peak([part for part in ask.containers if part.kind == "whole"], lambda part: part.cards)
    return max([wholes, *(part.cards for part in ask.containers if part.kind == "share")])


def _row(fleet: Fleet, node: str, ask: PodAsk, reason: str) -> Row:
    cards = fleet.inventory[node].cards if node in fleet else ()
    models = tuple(sorted({card.model for card in cards if card.shareable}))
    found, wanted = _usable(fleet, node, ask), cards_of(ask)
    if not found:
        return Row(node, reason, None, models=models)
    lacks_cards = max(0, wanted - sum(large for _, large in found)) if reason == TOO_FEW else 0
    largest_mib = max(one.mib for one, _ in found)
    return Row(node, reason, found[min(wanted, len(found)) - 1][0], lacks_cards, models, largest_mib)


def _usable(fleet: Fleet, node: str, ask: PodAsk) -> list[tuple[Nearest, bool]]:
    """The cards that the pod may have, nearest first, each with whether it would be large enough were it empty."""
    whole = any(part.kind == "whole" for part in ask.containers)
    need = need_of(ask)
    if node not in fleet or (need is None and not whole):
        return []
    at, found = fleet.column[node], []
    for row, card in enumerate(fleet.inventory[node].cards):
        if card.shareable and ask.allows(card.model, {card.uuid}):
            mib, percent = (card.mib, FULL_CORE_PERCENT) if whole else need or (0, 0)
            free_mib, free_percent = int(fleet.free_mib[row, at]), int(fleet.free_percent[row, at])
            lacks = max(0, mib - free_mib), max(0, percent - free_percent)
            one = Nearest(card.uuid, card.index, card.model, card.mib, free_mib, free_percent, *lacks)
            found.append((one, mib <= card.mib))
    return sorted(found, key=lambda item: (_distance(item[0]), item[0].index))


def _distance(one: Nearest | None) -> float:
    return one.lacks_mib / one.mib + one.lacks_percent / FULL_CORE_PERCENT if one is not None else 0.0


def summary(rows: Sequence[Row]) -> dict[str, int]:
    """Reason -> nodes, most frequent first; those that fit are left out."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.reason:
            counts[row.reason] = counts.get(row.reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
