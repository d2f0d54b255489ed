"""Tables of every node of a fleet, kept for the next pod that requests the same, and brought up to date where nodes changed since.

Between two pods of one template few nodes change. Of a pod that requests one share all that a policy reads of a node follows from that node's own
columns, so those of the others are still right. What depends on the whole cluster (how scarce pools are, the mix of requests) is no part of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from vgpu.cards import Cards, Columns, FollowedCards, Judged
from vgpu.fleet import Bools, Candidates, Fleet
from vgpu.policy import Order
from vgpu.request import PodAsk
from vgpu.table import Table, cards_of

KEPT: Final = 16
"""Tables with a fleet, those used last: 0.6 MiB each for 10,000 nodes with 8 GPUs. As many as `recall.KINDS`."""


def table_of_all(fleet: Fleet, ask: PodAsk, order: Order) -> Table | None:
    """For this pod. Not to be used once the fleet has changed. None for pods whose tables are not kept."""
    part = ask.containers[0] if len(ask.containers) == 1 else None
    if part is None or part.kind != "share" or order != "tightest" or ask.uuids or ask.not_uuids:
        return None
    known: KeptTable | None = fleet.kept.pop(ask, None)
    if known is None or not known.renewed():
        known = KeptTable(fleet, ask)
    fleet.kept[ask] = known
    if len(fleet.kept) > KEPT:
        del fleet.kept[next(iter(fleet.kept))]
    return known


@dataclass(frozen=True, slots=True)
class Empty:
    """Where a pod would fit if no other held anything, of every column of a fleet."""

    stocked: int
    width: int
    fits: Bools
    fits_mig: Bools
    holds_largest: Bools
    """A card for the largest part of the pod, were it the only one. Such a node lacks cards, not size."""


def empty_of_all(fleet: Fleet, ask: PodAsk) -> Empty:
    """For this pod. Worked out anew when a node has come, gone or changed its GPUs."""
    known: Empty | None = fleet.kept_empty.pop(ask, None)
    if known is None or (known.stocked, known.width) != (fleet.stocked, fleet.width):
        known = empty_of(fleet, ask, Candidates(np.arange(fleet.width), ()))
    fleet.kept_empty[ask] = known
    if len(fleet.kept_empty) > KEPT:
        del fleet.kept_empty[next(iter(fleet.kept_empty))]
    return known


def empty_of(fleet: Fleet, ask: PodAsk, nodes: Candidates) -> Empty:
    """The same of some nodes, in the order of a table of them."""
    table = Table(fleet, ask, nodes, emptied=True)
    return Empty(fleet.stocked, fleet.width, table.fits, table.fits_mig, _holds_largest(table, nodes))


def _holds_largest(empty: Table, nodes: Candidates) -> Bools:
    if empty.fits.all():
        return empty.fits
    shares = [replace(part, cards=1) for part in empty.ask.containers if part.kind == "share"]
    whole = [replace(part, cards=1) for part in empty.ask.containers if part.kind == "whole"]
    if shares and not any(part.init for part in shares):  # else they all lie on one card
        shares = [max(shares, key=lambda part: part.mib)]
    alone = replace(empty.ask, containers=tuple(shares or whole[:1]))
    return Table(empty.fleet, alone, nodes, emptied=True).fits if alone else empty.fits


class KeptTable(Table):
    """Of every node."""

    def __init__(self, fleet: Fleet, ask: PodAsk) -> None:
        super().__init__(fleet, ask, Candidates(np.arange(fleet.width), ()))
        self._moment, self._shape = fleet.moment, _shape(fleet)
        self._node_free_mib = self._free_after()
        self._stocked, self._card_mib = -1, 1.0

    def renewed(self) -> bool:
        """Bring it up to date. False where it has to be made anew."""
        if self._shape != _shape(self.fleet):
            return False
        changed = np.flatnonzero(self.fleet.changed[: self.fleet.width] > self._moment)
        if 2 * len(changed) >= self.fleet.width:
            return False
        if len(changed):
            self._copy(Table(self.fleet, self.ask, Candidates(changed, ())), changed)
        self._moment = self.fleet.moment
        self.names = self.view.names = self.fleet.names
        return True

    def _copy(self, some: Table, at: Columns) -> None:
        """What another table says of its nodes."""
        self.fits[at] = some.fits
        self._loosest_mib[at] = some._loosest_mib
        self._share_rows[:, at] = some._share_rows
        if (
            self._node_free_mib is not None and self._left is not None and some._left is not None
        ):  # as of one share they are
            self._node_free_mib[at] = some._free_after()
            self._left[:, at] = some._left

    def _look(self) -> tuple[Judged, Judged]:
        """As they are now."""
        fleet = self.fleet
        if self._stocked != fleet.stocked:
            self._stocked, self._card_mib = fleet.stocked, cards_of(fleet, slice(0, fleet.width)).card_mib
        changed, cpu = fleet.changed[: fleet.width], fleet.free_cpu_milli[: fleet.width]
        return (
            FollowedCards(self._moment, changed, self._before, cpu, self._card_mib),
            FollowedCards(self._moment, changed, self._then, cpu - np.int32(self.ask.cpu_milli), self._card_mib),
        )

    def _before(self, nodes: Columns) -> Cards:
        return cards_of(self.fleet, nodes)

    def _then(self, nodes: Columns) -> Cards:
        return self._with_share(cards_of(self.fleet, nodes), self._share_rows[:, nodes])


def _shape(fleet: Fleet) -> tuple[int, ...]:
    return (*fleet.total_mib.shape, fleet.width)
