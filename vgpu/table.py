"""Try one pod on every candidate node at once, on copies of their columns.

What is promised
    A candidate fits exactly when its cards hold the pod, for pods of up to `EXACT_CONTAINERS` containers with a share and
    any number with whole GPUs or MIG instances. Largest asks first, each on the tightest cards that hold it; where that
    fails `packing` finds another way if there is one. With more containers with shares only the first is tried.

    Where an init container asks for a share too, all shares of the pod lie on one set of cards: the kubelet hands an init
    container's devices on to the app containers, so anything else would make its books differ from ours.

Units and shapes as in `fleet`; a column is a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np

from vgpu.fleet import Bools, Columns, Fleet, Ints
from vgpu.grant import Assignment, Slice
from vgpu.inventory import Card, MigInstance
from vgpu.packing import Books, Need, pack
from vgpu.policy import Outcome
from vgpu.quantity import LARGEST_CARD_MIB
from vgpu.request import FULL_CORE_PERCENT, Ask, PodAsk, peak

NEVER: Final = np.int32(np.iinfo(np.int32).max)
"""Leftover of a card that cannot take the ask. Larger than any real leftover."""

EXACT_CONTAINERS: Final = 4
"""Containers with a share up to which fitting is exact: the work grows as 3 to this power. Pulled out of the air."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Containers that are given the same cards, and what they need of them at their peak."""

    asks: tuple[Ask, ...]
    need: Need


class Table:
    """The candidates that the fleet knows, and what placing the pod on each would mean.

    names       the candidates known, in the order asked
    fits        (nodes,) whether the pod fits
    fits_mig    (nodes,) whether its MIG instances alone do
    """

    def __init__(
        self,
        fleet: Fleet,
        ask: PodAsk,
        candidates: Sequence[str],
        only: Mapping[str, Set[str]] | None = None,
        *,
        emptied: bool = False,
    ) -> None:
        """`emptied`: as if no pod held anything."""
        self.fleet, self.ask, self._only, self._emptied = fleet, ask, only or {}, emptied
        self._conditions = bool(ask.models or ask.not_models or ask.uuids or ask.not_uuids)
        self.names, self._columns = fleet.columns_of(candidates)
        self._every = np.arange(len(self.names))
        books = self._books(self._every)
        self._wholes = [part for part in ask.containers if part.kind == "whole"]
        self._bundles = _bundles([part for part in ask.containers if part.kind == "share"])
        self._allowed = books.allowed.copy() if any(part.kind == "mig" for part in ask.containers) else books.allowed
        """Grows by the MIG cards taken, so that the policy sees them."""
        several = len(self._bundles) + bool(self._wholes) > 1
        self._free = books.free_mib.copy() if several else books.free_mib
        self._percent = books.free_percent.copy() if several else books.free_percent
        self._rows: list[Columns] = []
        self._mig: dict[str, dict[int, list[tuple[Card, MigInstance]]]] = {}
        self._loosest: Ints = np.zeros(len(self.names), np.int32)
        self.fits = self._place(books)
        self.fits_mig = self._take_instances()
        self.fits &= self.fits_mig

    def outcome(self) -> Outcome:
        """What the policy sees."""
        return Outcome(np.where(self._allowed, self._free, np.int32(0)), self._loosest)

    def assignment(self, at: int) -> Assignment:
        """The cards of every container on candidate number `at`, which must fit."""
        cards = self.fleet.inventory[self.names[at]].cards
        given: dict[str, tuple[Slice, ...]] = {}
        for bundle, rows in zip(self._bundles, self._rows, strict=False):
            for ask in bundle.asks:
                given[ask.container] = tuple(
                    Slice(cards[row].uuid, cards[row].index, ask.mib, ask.core_percent) for row in rows[:, at].tolist()
                )
        if self._wholes:
            pieces = [
                Slice(cards[row].uuid, cards[row].index, cards[row].mib, FULL_CORE_PERCENT, "whole")
                for row in self._rows[-1][:, at].tolist()
            ]
            given |= _dealt(pieces, self._wholes)
        for profile, chosen in self._mig.items():
            pieces = [
                Slice(instance.uuid, card.index, instance.mib, FULL_CORE_PERCENT, "mig", profile)
                for card, instance in chosen[at]
            ]
            given |= _dealt(pieces, _of_profile(self.ask, profile))
        ordered = {ask.container: given[ask.container] for ask in self.ask.containers}
        init = frozenset(ask.container for ask in self.ask.containers if ask.init)
        return Assignment(ordered, init, self.ask.klass, self.ask.level)

    def _books(self, at: Columns) -> Books:
        """What is free on the candidates numbered `at`, before the pod."""
        fleet, columns = self.fleet, self._columns[at]
        allowed = fleet.shareable.take(columns, axis=1)
        self._narrow(allowed, at)
        if self._emptied:
            total = fleet.total_mib.take(columns, axis=1)
            return Books(total, np.full_like(total, FULL_CORE_PERCENT), allowed, allowed)
        untouched = allowed
        if any(part.kind == "whole" for part in self.ask.containers):
            untouched = allowed & (fleet.tenants.take(columns, axis=1) == 0)
        return Books(fleet.free_mib.take(columns, axis=1), fleet.free_percent.take(columns, axis=1), allowed, untouched)

    def _narrow(self, allowed: Bools, at: Columns) -> None:
        """Take out the cards that the pod's conditions or `only` exclude."""
        fleet, ask = self.fleet, self.ask
        if ask.models or ask.not_models:
            codes = [
                code
                for model, code in fleet.models.items()
                if (not ask.models or model in ask.models) and model not in ask.not_models
            ]
            allowed &= np.isin(fleet.model.take(self._columns[at], axis=1), codes)
        if not (ask.uuids or ask.not_uuids or self._only):
            return
        for column, name in enumerate([self.names[i] for i in at.tolist()]):
            if ask.uuids or ask.not_uuids or name in self._only:
                for row, card in enumerate(fleet.inventory[name].cards):
                    allowed[row, column] &= self._may_use(name, card, card.uuid)

    def _may_use(self, name: str, card: Card, *uuids: str) -> bool:
        """Do the pod's conditions and `only` allow a card, or an instance on it? `uuids` are those it answers to."""
        ask, known = self.ask, set(uuids)
        return (
            (not ask.models or card.model in ask.models)
            and card.model not in ask.not_models
            and (not ask.uuids or bool(known & ask.uuids))
            and not known & ask.not_uuids
            and (name not in self._only or bool(known & self._only[name]))
        )

    def _place(self, books: Books) -> Bools:
        """Shares and whole GPUs. Returns (nodes,) whether all of them fit."""
        needs = [bundle.need for bundle in self._bundles]
        wholes = peak(self._wholes, lambda ask: ask.cards)
        fits: Bools = np.ones(len(self.names), np.bool_)
        whole_rows: list[Columns] = []
        if wholes:
            total = self.fleet.total_mib.take(self._columns, axis=1)
            rows, found = _tightest(np.where(books.untouched, total, NEVER), wholes)
            self._debit_whole(rows, self._every)
            whole_rows, fits = [rows], fits & found
        for need in needs:
            can = self._allowed & (self._free >= need.mib) & (self._percent >= need.percent)
            rows, found = _tightest(np.where(can, self._free - np.int32(need.mib), NEVER), need.cards)
            self._debit(need, rows, self._every)
            self._rows.append(rows)
            fits &= found
        self._rows += whole_rows
        if len(self._rows) > 1 and len(needs) <= EXACT_CONTAINERS and not fits.all():
            fits |= self._place_exactly(needs, wholes, np.flatnonzero(~fits & _plausible(books, needs, wholes)))
        self._note_loosest()
        return fits

    def _place_exactly(self, needs: Sequence[Need], wholes: int, at: Columns) -> Bools:
        """Place again where the tightest cards led nowhere. Returns (nodes,) where there was another way."""
        fits: Bools = np.zeros(len(self.names), np.bool_)
        if not len(at):
            return fits
        books = self._books(at)
        found, ways = pack(books, needs, wholes)
        fits[at] = found
        self._free[:, at], self._percent[:, at] = books.free_mib, books.free_percent
        for known, rows in zip(self._rows, ways, strict=False):
            known[:, at] = rows
        for need, rows in zip(needs, ways, strict=False):
            self._debit(need, rows, at)
        if wholes:
            self._debit_whole(ways[-1], at)
        return fits

    def _debit(self, need: Need, rows: Columns, at: Columns) -> None:
        self._free[rows, at] -= np.int32(need.mib)
        self._percent[rows, at] -= np.int32(need.percent)

    def _debit_whole(self, rows: Columns, at: Columns) -> None:
        self._free[rows, at] = 0
        self._percent[rows, at] = 0

    def _note_loosest(self) -> None:
        for at, rows in enumerate(self._rows):
            if at < len(self._bundles):
                left = self._free[rows, self._every]
            else:
                left = self.fleet.total_mib[rows, self._columns]
            np.maximum(self._loosest, left.max(axis=0), out=self._loosest)

    def _take_instances(self) -> Bools:
        """MIG instances, from the cards with the fewest free. Returns (nodes,) whether there are enough."""
        fits: Bools = np.ones(len(self.names), np.bool_)
        for profile in dict.fromkeys(ask.profile for ask in self.ask.containers if ask.kind == "mig"):
            wanted = peak(_of_profile(self.ask, profile), lambda ask: ask.cards)
            chosen = self._mig[profile] = {}
            enough: Bools = np.zeros(len(self.names), np.bool_)
            for at, name in enumerate(self.names):
                free = self._instances(name, profile) if name in self.fleet.with_mig else []
                if len(free) >= wanted:
                    enough[at] = True
                    chosen[at] = self._tightest_instances(at, free, wanted)
            fits &= enough
        return fits

    def _instances(self, name: str, profile: str) -> list[tuple[Card, MigInstance]]:
        """Instances of a profile that are free and that the pod may use."""
        if self._emptied:
            cards = self.fleet.inventory[name].cards
            offered = [(card, i) for card in cards for i in card.offered_instances if i.profile == profile]
        else:
            offered = self.fleet.free_instances(name, profile)
        if not self._conditions and name not in self._only:
            return offered
        return [(card, i) for card, i in offered if self._may_use(name, card, card.uuid, i.uuid)]

    def _tightest_instances(
        self, at: int, free: list[tuple[Card, MigInstance]], wanted: int
    ) -> list[tuple[Card, MigInstance]]:
        """`wanted` of `free`, and on their cards what is left, for the policy."""
        left: dict[str, int] = {}
        for card, instance in free:
            left[card.uuid] = left.get(card.uuid, 0) + instance.mib
        chosen = sorted(free, key=lambda found: (left[found[0].uuid], found[0].index))[:wanted]
        for card, instance in chosen:
            left[card.uuid] -= instance.mib
        rows = {card.uuid: row for row, card in enumerate(self.fleet.inventory[self.names[at]].cards)}
        for uuid, mib in left.items():
            self._free[rows[uuid], at] = mib
            self._allowed[rows[uuid], at] = True
        self._loosest[at] = max(self._loosest[at], *(left[card.uuid] for card, _ in chosen))
        return chosen


def _tightest(left: Ints, cards: int) -> tuple[Columns, Bools]:
    """Rows of the `cards` smallest of `left` per node, (cards, nodes), ties by row; and (nodes,) whether all are real."""
    if cards > len(left):
        return np.zeros((cards, left.shape[1]), np.intp), np.zeros(left.shape[1], np.bool_)
    if cards == 1:
        return left.argmin(axis=0)[np.newaxis, :], left.min(axis=0) != NEVER
    rows = left.argsort(axis=0, kind="stable")[:cards]
    found: Bools = left[rows[-1], np.arange(left.shape[1])] != NEVER
    return rows, found


def _plausible(books: Books, needs: Sequence[Need], wholes: int) -> Bools:
    """(nodes,) no sum rules the needs out: most nodes that are full are told apart here, cheaply."""
    free = np.where(books.allowed, books.free_mib, 0).clip(min=0).sum(axis=0, dtype=np.int64)
    percent = np.where(books.allowed, books.free_percent, 0).clip(min=0).sum(axis=0, dtype=np.int64)
    plausible: Bools = free >= sum(need.mib * need.cards for need in needs)
    plausible &= percent >= sum(need.percent * need.cards for need in needs)
    plausible &= np.count_nonzero(books.untouched, axis=0) >= wholes
    for need in needs:
        can = books.allowed & (books.free_mib >= need.mib) & (books.free_percent >= need.percent)
        plausible &= np.count_nonzero(can, axis=0) >= need.cards
    return plausible


def _bundles(shares: Sequence[Ask]) -> list[_Bundle]:
    """Which containers share their cards, largest first. A need beyond any card is kept within the arrays' numbers."""
    groups = [tuple(shares)] if any(ask.init for ask in shares) else [(ask,) for ask in shares]
    bundles = [
        _Bundle(
            group,
            Need(
                max(ask.cards for ask in group),
                min(peak(group, lambda ask: ask.mib), LARGEST_CARD_MIB + 1),
                peak(group, lambda ask: ask.core_percent),
            ),
        )
        for group in groups
    ]
    return sorted(bundles, key=lambda bundle: (-bundle.need.mib, -bundle.need.percent))


def _of_profile(ask: PodAsk, profile: str) -> list[Ask]:
    return [part for part in ask.containers if part.kind == "mig" and part.profile == profile]


def _dealt(pieces: Sequence[Slice], asks: Sequence[Ask]) -> dict[str, tuple[Slice, ...]]:
    """Pieces per container: each after those of the containers that keep running, so that an init container's are reused."""
    dealt: dict[str, tuple[Slice, ...]] = {}
    first = 0
    for ask in asks:
        dealt[ask.container] = tuple(pieces[first : first + ask.cards])
        first += 0 if ask.init else ask.cards
    return dealt
