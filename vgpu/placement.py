"""Choose a node and its cards for one pod.

This is the only module that decides where anything goes. It is pure: it reads a `Fleet`, answers with a `Placement` or the
reason why not, and never touches Kubernetes, NVML, the clock or a random number. The same fleet and ask give the same answer.

A pod's containers are placed one after another on a copy of the candidates' columns, all candidates at once. Where an init
container asks too, the whole pod shares one set of cards: the kubelet hands an init container's devices on to the app
containers, so anything else would make its books differ from ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from vgpu.fleet import Bools, Fleet, Ints
from vgpu.grant import Assignment, Slice
from vgpu.policy import POLICIES, Outcome
from vgpu.request import FULL_CORE_PERCENT, Ask, PodAsk

NEVER: Final = np.int32(np.iinfo(np.int32).max)
"""Leftover of a card that cannot take the ask. Larger than any real leftover."""

NO_INVENTORY: Final = "node has no GPUs that Tangram shares"
TOO_LARGE: Final = "no GPU of the node is large enough or of an allowed model"
NO_ROOM: Final = "no single GPU has enough free gpu-mem and gpu-core"
NO_WHOLE: Final = "too few GPUs are wholly free"
NO_MIG: Final = "too few free MIG instances of the profile"
NO_MIG_EVER: Final = "node has no such MIG instances"
SWAP_RISK: Final = "a pod of the same size is starting on another GPU of the node"

UNRESOLVABLE: Final = frozenset({NO_INVENTORY, TOO_LARGE, NO_MIG_EVER})
"""Reasons that no eviction can help against."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod goes."""

    node: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a pod goes nowhere: node -> one of the constant reasons above."""

    reasons: dict[str, str] = field(default_factory=dict)


def place(
    fleet: Fleet, ask: PodAsk, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> Placement | NoRoom:
    """The best node among `candidates` and the cards there, or why there is none.

    `only` narrows a node's cards to the UUIDs given: a pod of the same size is starting there, and the kubelet may swap
    the two pods' devices (contract.md section 3).
    """
    names = [name for name in candidates if name in fleet]
    no_room = NoRoom({name: NO_INVENTORY for name in candidates if name not in fleet})
    if not names:
        return no_room
    table = _Table(fleet, ask, names, only or {})
    fits = table.place_all()
    if not fits.any():
        return NoRoom(no_room.reasons | table.reasons(fits))
    scores = POLICIES[ask.policy](table.outcome())
    best = scores[fits].min()
    node = min(names[i] for i in np.flatnonzero(fits & (scores == best)))
    return Placement(node, table.assignment(names.index(node)))


def explain(
    fleet: Fleet, ask: PodAsk, candidates: Iterable[str], only: Mapping[str, Set[str]] | None = None
) -> dict[str, str]:
    """Per candidate that cannot take the pod, the reason; those that can are left out."""
    names = [name for name in candidates if name in fleet]
    reasons = {name: NO_INVENTORY for name in candidates if name not in fleet}
    if not names:
        return reasons
    table = _Table(fleet, ask, names, only or {})
    return reasons | table.reasons(table.place_all())


class _Table:
    """The candidates' columns, and what has been taken from them so far."""

    def __init__(self, fleet: Fleet, ask: PodAsk, names: Sequence[str], only: Mapping[str, Set[str]]) -> None:
        self.fleet, self.ask, self.names = fleet, ask, names
        columns = np.fromiter((fleet.column[name] for name in names), np.intp, len(names))
        self.total: Ints = fleet.total_mib[:, columns]
        self.free: Ints = fleet.free_mib[:, columns]
        self.percent: Ints = fleet.free_percent[:, columns]
        self.tenants: Ints = fleet.tenants[:, columns]
        self.allowed: Bools = fleet.shareable[:, columns] & self._wanted(columns)
        self.before_only = self.allowed.copy()
        self._narrow(only)
        self.chosen: list[tuple[Ask, Ints]] = []
        """Per container (not MIG) its cards' rows, (cards, nodes)."""
        self.loosest: Ints = np.zeros(len(names), np.int32)

    def place_all(self) -> Bools:
        """Place every container on every candidate. Returns (nodes,) whether all of them fit."""
        fits: Bools = np.ones(len(self.names), np.bool_)
        shares = [ask for ask in self.ask.containers if ask.kind == "share"]
        if any(ask.init for ask in shares):
            fits &= self._take(shares, _combined(shares))
        else:
            for ask in shares:
                fits &= self._take([ask], ask)
        wholes = [ask for ask in self.ask.containers if ask.kind == "whole"]
        if wholes:
            fits &= self._take_whole(wholes)
        for profile, wanted in _mig_wanted(self.ask).items():
            fits &= np.fromiter(
                (len(self._instances(name, profile)) >= wanted for name in self.names), np.bool_, len(self.names)
            )
        return fits

    def outcome(self) -> Outcome:
        """What the policy sees."""
        return Outcome(np.where(self.allowed, self.free, 0).astype(np.int32), self.loosest)

    def assignment(self, at: int) -> Assignment:
        """The cards of every container on candidate number `at`."""
        node = self.names[at]
        cards = self.fleet.inventory[node].cards
        containers = {
            ask.container: tuple(
                Slice(
                    cards[row].uuid,
                    cards[row].index,
                    cards[row].mib if ask.kind == "whole" else ask.mib,
                    ask.core_percent,
                    ask.kind,
                )
                for row in rows[:, at].tolist()
            )
            for ask, rows in self.chosen
        }
        containers |= self._mig_slices(node)
        ordered = {ask.container: containers[ask.container] for ask in self.ask.containers}
        init = frozenset(ask.container for ask in self.ask.containers if ask.init)
        return Assignment(ordered, init, self.ask.klass, self.ask.level)

    def reasons(self, fits: Bools) -> dict[str, str]:
        """Per candidate that does not fit, the reason that helps most."""
        return {name: self._reason(at, name) for at, name in enumerate(self.names) if not fits[at]}

    def _reason(self, at: int, name: str) -> str:
        for profile, wanted in _mig_wanted(self.ask).items():
            if len([i for c in self.fleet.inventory[name].cards for i in c.instances if i.profile == profile]) < wanted:
                return NO_MIG_EVER
            if len(self._instances(name, profile)) < wanted:
                return NO_MIG
        usable = self.before_only[:, at]
        for ask in self.ask.containers:
            large_enough = usable & (self.total[:, at] >= ask.mib)
            if ask.kind != "mig" and np.count_nonzero(large_enough) < ask.cards:
                return TOO_LARGE
        if not np.array_equal(self.allowed[:, at], usable):
            return SWAP_RISK
        return NO_WHOLE if any(ask.kind == "whole" for ask in self.ask.containers) else NO_ROOM

    def _take(self, asks: Sequence[Ask], need: Ask) -> Bools:
        """Give each of `asks` the same cards, the tightest that hold `need`. Returns (nodes,) whether there were enough."""
        can = self.allowed & (self.free >= need.mib) & (self.percent >= need.core_percent)
        left = np.where(can, self.free - np.int32(need.mib), NEVER)
        rows, fits = self._tightest(left, need.cards)
        self._debit(rows, fits, need.mib, need.core_percent)
        self.chosen.extend((ask, rows[: ask.cards]) for ask in asks)
        return fits

    def _take_whole(self, asks: Sequence[Ask]) -> Bools:
        """App containers get cards of their own; init containers the first of those again."""
        running = sum(ask.cards for ask in asks if not ask.init)
        need = max([running, *(ask.cards for ask in asks if ask.init)])
        can = self.allowed & (self.tenants == 0) & (self.free == self.total)
        rows, fits = self._tightest(np.where(can, self.total, NEVER), need)
        self._debit(rows, fits, None, FULL_CORE_PERCENT)
        first = 0
        for ask in asks:
            start = 0 if ask.init else first
            self.chosen.append((ask, rows[start : start + ask.cards]))
            first += 0 if ask.init else ask.cards
        return fits

    def _tightest(self, left: Ints, cards: int) -> tuple[Ints, Bools]:
        """Rows of the `cards` smallest of `left` per node, (cards, nodes), ties by row; and (nodes,) whether all are real."""
        if cards > len(left):
            none: Bools = np.zeros(left.shape[1], np.bool_)
            return np.zeros((cards, left.shape[1]), np.int32), none
        if cards == 1:
            rows = left.argmin(axis=0)[np.newaxis, :]
        else:
            rows = left.argsort(axis=0, kind="stable")[:cards]
        worst = np.take_along_axis(left, rows[-1:], axis=0)[0]
        fits: Bools = worst != NEVER
        self.loosest = np.maximum(self.loosest, np.where(fits, worst, 0).astype(np.int32))
        return rows.astype(np.int32), fits

    def _debit(self, rows: Ints, fits: Bools, mib: int | None, percent: int) -> None:
        nodes = np.flatnonzero(fits)
        for row in rows[:, nodes]:
            self.free[row, nodes] -= self.total[row, nodes] if mib is None else np.int32(mib)
            self.percent[row, nodes] -= np.int32(percent)
            self.tenants[row, nodes] += 1

    def _wanted(self, columns: npt.NDArray[np.intp]) -> Bools:
        """(cards, nodes): the pod's model and UUID conditions allow the card."""
        fleet, ask = self.fleet, self.ask
        model = fleet.model[:, columns]
        wanted: Bools = np.ones(model.shape, np.bool_)
        if ask.models:
            wanted &= np.isin(model, [code for name, code in fleet.models.items() if name in ask.models])
        if ask.not_models:
            wanted &= ~np.isin(model, [code for name, code in fleet.models.items() if name in ask.not_models])
        if ask.uuids or ask.not_uuids:
            for at, name in enumerate(self.names):
                for row, card in enumerate(fleet.inventory[name].cards):
                    wanted[row, at] &= (not ask.uuids or card.uuid in ask.uuids) and card.uuid not in ask.not_uuids
        return wanted

    def _narrow(self, only: Mapping[str, Set[str]]) -> None:
        for at, name in enumerate(self.names):
            if name in only:
                for row, card in enumerate(self.fleet.inventory[name].cards):
                    self.allowed[row, at] &= card.uuid in only[name]

    def _instances(self, node: str, profile: str) -> list[tuple[int, str, int]]:
        """(card index, UUID, MiB) of the free instances that the pod's conditions allow."""
        at = self.names.index(node)
        cards = self.fleet.inventory[node].cards
        ask = self.ask
        conditions = self._card_conditions(at)
        return [
            (index, instance.uuid, instance.mib)
            for index, instance in self.fleet.free_instances(node, profile)
            if conditions[index]
            and (not ask.uuids or {instance.uuid, cards[index].uuid} & ask.uuids)
            and not {instance.uuid, cards[index].uuid} & ask.not_uuids
        ]

    def _card_conditions(self, at: int) -> dict[int, bool]:
        ask = self.ask
        return {
            card.index: (not ask.models or card.model in ask.models) and card.model not in ask.not_models
            for card in self.fleet.inventory[self.names[at]].cards
        }

    def _mig_slices(self, node: str) -> dict[str, tuple[Slice, ...]]:
        """Instances per container; init containers reuse the first ones of their profile."""
        slices: dict[str, tuple[Slice, ...]] = {}
        for profile in _mig_wanted(self.ask):
            free = [
                Slice(uuid, index, mib, FULL_CORE_PERCENT, "mig", profile)
                for index, uuid, mib in self._instances(node, profile)
            ]
            first = 0
            for ask in (a for a in self.ask.containers if a.kind == "mig" and a.profile == profile):
                start = 0 if ask.init else first
                slices[ask.container] = tuple(free[start : start + ask.cards])
                first += 0 if ask.init else ask.cards
        return slices


def _combined(shares: Sequence[Ask]) -> Ask:
    """One ask that covers app containers together and any one init container, on the same cards."""
    running = [ask for ask in shares if not ask.init]
    init = [ask for ask in shares if ask.init]
    mib = max([sum(ask.mib for ask in running), *(ask.mib for ask in init)])
    percent = max([sum(ask.core_percent for ask in running), *(ask.core_percent for ask in init)])
    return Ask("", "share", shares[0].cards, mib=mib, core_percent=percent)


def _mig_wanted(ask: PodAsk) -> dict[str, int]:
    """Profile -> instances that the pod needs at once."""
    wanted: dict[str, int] = {}
    for profile in dict.fromkeys(a.profile for a in ask.containers if a.kind == "mig"):
        asks = [a for a in ask.containers if a.kind == "mig" and a.profile == profile]
        wanted[profile] = max([sum(a.cards for a in asks if not a.init), *(a.cards for a in asks if a.init)])
    return wanted
