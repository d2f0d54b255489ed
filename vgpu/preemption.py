"""Choose whom to evict so that one pod fits.

Pure, as `placement` is: it reads a `Fleet` and who holds what, and answers the least set of pods on one node whose leaving makes the
ask fit, or None. Whether a set suffices is asked of `placement` itself, on a copy of the node without them: nothing here knows how
pods are fitted. It evicts nobody and knows no Kubernetes.

What least means, in this order
    1. fewest evictions beyond what disruption budgets allow
    2. fewest latency-critical pods, then fewest standard ones: best-effort pods go first
    3. lowest highest priority
    4. fewest pods
    5. youngest: the oldest of one set started after the oldest of the other, then the second oldest, and so on
    6. smallest name of the node, then of the pods

Each of the first four never falls when a set grows and one of them rises, so no pod of the least set could be spared.

What is promised
    Of a pod that asks for a share of one card the sets are tried card by card, of others node by node. Up to `EXACT` pods
    that may go (`EXACT_OTHERS` for several containers or MIG instances), the answer is the least set; with more on one card (or node) it is one of which no pod can be spared: those that may go are
    taken off, and put back, the most important first, wherever the ask still fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from vgpu.fleet import Fleet
from vgpu.grant import Assignment, Slice
from vgpu.inventory import Card, Inventory
from vgpu.names import CLASSES, DEFAULT_POLICY
from vgpu.placement import Placement, explain, place
from vgpu.request import FULL_CORE_PERCENT, PodAsk

EXACT: Final = 12
"""Pods up to which every set counts, of asks with one container: 4,096 sets. Cards are shared by fewer as a rule."""

EXACT_OTHERS: Final = 8
"""The same of asks with several containers, or for MIG instances: each of the 256 sets may have to be tried."""

AT_ONCE: Final = 64
"""Sets, or nodes, that are tried together: `placement` takes hardly longer for 64 nodes than for one."""

_T = TypeVar("_T")

Cost: TypeAlias = tuple[int, int, int, int, int, tuple[str, ...], str, tuple[str, ...]]
"""The order above, as it compares."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod that holds something on a node."""

    uid: str
    held: tuple[Slice, ...]
    priority: int = 0
    klass: str = "standard"
    started: str = ""
    """RFC 3339 in UTC, so that it compares; empty when it has not started, which makes it the youngest."""
    budgets: frozenset[str] = frozenset()
    """Disruption budgets that it counts in."""
    spared: bool = False
    """Never to be evicted: it leaves already, is only promised its place, or was evicted too often lately."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Whom to evict, and what that gives."""

    node: str
    victims: tuple[str, ...]
    """UIDs by name; none when the ask fits as it is."""
    violations: int
    """How many of these evictions the disruption budgets do not allow."""
    assignment: Assignment
    """Where the pod would go."""
    cost: Cost = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be done for whom."""

    priority: int
    """Of the pod that is to fit. Only holders of a lower one are evicted."""
    headroom: Mapping[str, int] = field(default_factory=dict)
    """Budget -> evictions that it still allows. A budget that is not named allows none."""
    violate: bool = True
    """May budgets be violated at all, when nothing else helps?"""
    suffices: Callable[[Collection[str]], bool] | None = None
    """A condition of the caller's own on a set of UIDs; if it holds for a set it must for every larger one."""


def victims(
    fleet: Fleet,
    ask: PodAsk,
    candidates: Iterable[str],
    holders: Mapping[str, Sequence[Holder]],
    rules: Rules,
    only: Mapping[str, Set[str]] | None = None,
) -> Eviction | None:
    """The least set on one of the candidates, or None when no eviction makes room.

    `holders` must name all that hold something on the candidates: what they leave is what is free. `only` as for `place`.
    """
    ask = replace(ask, policy=DEFAULT_POLICY)
    known = [name for name in candidates if name in fleet]
    best: Eviction | None = None
    for some in _chunks(known, AT_ONCE):
        for name in _could_help(fleet, ask, some, holders, rules, only):
            found = _Node(name, fleet.inventory[name], ask, holders.get(name, ()), rules, only).least()
            if found is not None and (best is None or found.cost < best.cost):
                best = found
    return best


def cost_of(node: str, evicted: Collection[Holder], headroom: Mapping[str, int]) -> Cost:
    """What a set costs, in the order that the module names."""
    classes = Counter(one.klass for one in evicted)
    return (
        violations_of(evicted, headroom),
        classes[CLASSES[0]],
        classes[CLASSES[1]],
        max((one.priority for one in evicted), default=-(2**31)),
        len(evicted),
        tuple(_youth(one.started) for one in sorted(evicted, key=lambda one: (one.started == "", one.started))),
        node,
        tuple(sorted(one.uid for one in evicted)),
    )


def violations_of(evicted: Iterable[Holder], headroom: Mapping[str, int]) -> int:
    """Evictions beyond what budgets allow. A pod in several budgets counts in each."""
    counts = Counter(budget for one in evicted for budget in one.budgets)
    return sum(max(0, count - max(0, headroom.get(budget, 0))) for budget, count in counts.items())


def _youth(started: str) -> str:
    """Smaller for who started later; smallest for who has not."""
    return "".join(chr(0x10FFFF - ord(letter)) for letter in started)


def _could_help(
    fleet: Fleet,
    ask: PodAsk,
    names: Sequence[str],
    holders: Mapping[str, Sequence[Holder]],
    rules: Rules,
    only: Mapping[str, Set[str]] | None,
) -> list[str]:
    """Those of the nodes where the ask would fit if all left that may be evicted."""
    emptied = Fleet()
    for name in names:
        stay = [piece for one in holders.get(name, ()) if not _may_go(one, rules) for piece in one.held]
        emptied.set_node(name, fleet.inventory[name], stay)
    reasons = explain(emptied, ask, names, only)
    return [name for name in names if name not in reasons]


def _may_go(one: Holder, rules: Rules) -> bool:
    return not one.spared and one.priority < rules.priority


class _Node:
    """The search on one node."""

    def __init__(
        self,
        name: str,
        inventory: Inventory,
        ask: PodAsk,
        holders: Sequence[Holder],
        rules: Rules,
        only: Mapping[str, Set[str]] | None,
    ) -> None:
        self._name, self._inventory, self._ask, self._holders, self._rules = name, inventory, ask, holders, rules
        self._only = (only or {}).get(name)
        self._may_go = [one for one in holders if _may_go(one, rules)]
        self._one_container = len(ask.containers) == 1 and ask.containers[0].kind != "mig"
        """Then sums over cards say exactly what fits."""

    def least(self) -> Eviction | None:
        """The least set here."""
        small: list[list[Holder]] = []
        large: list[list[Holder]] = []
        for group in self._groups():
            most = EXACT if self._one_container else EXACT_OTHERS
            (small if len(group) <= most else large).append(group)
        found = self._first(self._sets(small))
        for group in large:
            spare = self._reprieve(group)
            if spare is not None and (found is None or spare.cost < found.cost):
                found = spare
        return found

    def _groups(self) -> list[list[Holder]]:
        """Pods of which a set must be chosen together: those on one card, for a pod that takes but one; else all."""
        part = self._ask.containers[0]
        if len(self._ask.containers) > 1 or part.kind != "share" or part.cards > 1:
            return [self._may_go]
        by_card = [
            [one for one in self._may_go if any(piece.uuid == card.uuid for piece in one.held)]
            for card in self._inventory.cards
        ]
        return [group for group in by_card if group] or [[]]

    def _sets(self, groups: Iterable[Sequence[Holder]]) -> list[tuple[Cost, tuple[Holder, ...]]]:
        """The sets of each group that are worth a try, the least first."""
        found: dict[Cost, tuple[Holder, ...]] = {}
        for group in groups:
            for mask in self._masks(group):
                some = tuple(one for at, one in enumerate(group) if mask >> at & 1)
                cost = cost_of(self._name, some, self._rules.headroom)
                if self._rules.violate or not cost[0]:
                    found[cost] = some
        return sorted(found.items(), key=lambda item: item[0])

    def _masks(self, group: Sequence[Holder]) -> list[int]:
        """Sets of a group, a bit for each pod. Where sums say what fits, only those of which nobody could be spared."""
        masks = np.arange(1 << len(group))
        if not self._one_container:
            return [mask for mask in masks.tolist() if self._suffices(group, mask)]
        leave = (masks[:, np.newaxis] >> np.arange(len(group))) & 1
        fits = self._fits(group, leave)
        if self._rules.suffices is not None:
            fits[fits] = [self._suffices(group, mask) for mask in masks[fits].tolist()]
        least = fits.copy()
        for at in range(len(group)):
            having = np.flatnonzero(leave[:, at])
            least[having] &= ~fits[having ^ (1 << at)]
        spare_none: list[int] = masks[least].tolist()
        return spare_none

    def _suffices(self, group: Sequence[Holder], mask: int) -> bool:
        uids = {one.uid for at, one in enumerate(group) if mask >> at & 1}
        return self._rules.suffices is None or self._rules.suffices(uids)

    def _fits(self, group: Sequence[Holder], leave: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """(sets,) whether a pod of one container fits, by sums over the cards that it may have."""
        part, cards = self._ask.containers[0], [card for card in self._inventory.cards if self._allowed(card)]
        row = {card.uuid: at for at, card in enumerate(cards)}
        held = np.zeros((3, len(self._holders), len(cards)), np.int64)
        for at, one in enumerate(self._holders):
            for piece in one.held:
                if piece.uuid in row:
                    whole = cards[row[piece.uuid]].mib, FULL_CORE_PERCENT
                    amount = whole if piece.kind == "whole" else (piece.mib, piece.core_percent)
                    held[:, at, row[piece.uuid]] += (*amount, 1)
        index = {one.uid: at for at, one in enumerate(self._holders)}
        back = leave @ held[:, [index[one.uid] for one in group], :]
        mib, percent, tenants = held.sum(axis=1)[:, np.newaxis, :] - back
        if part.kind == "whole":
            can = tenants == 0
        else:
            total = np.array([card.mib for card in cards], np.int64)
            can = (total - mib >= part.mib) & (FULL_CORE_PERCENT - percent >= part.core_percent)
        enough: npt.NDArray[np.bool_] = np.count_nonzero(can, axis=1) >= part.cards
        return enough

    def _allowed(self, card: Card) -> bool:
        ask = self._ask
        return (
            card.shareable
            and (not ask.models or card.model in ask.models)
            and card.model not in ask.not_models
            and (not ask.uuids or card.uuid in ask.uuids)
            and card.uuid not in ask.not_uuids
            and (self._only is None or card.uuid in self._only)
        )

    def _first(self, sets: Iterable[tuple[Cost, tuple[Holder, ...]]]) -> Eviction | None:
        """The first of the sets that makes room."""
        for some in _chunks(sets, 1 if self._one_container else AT_ONCE):
            fleet, names = self._without([leaving for _, leaving in some])
            only = None if self._only is None else dict.fromkeys(names, self._only)
            reasons = explain(fleet, self._ask, names, only)
            for name, (cost, leaving) in zip(names, some, strict=True):
                if name in reasons:
                    continue
                placement = place(fleet, self._ask, [name], only)
                if isinstance(placement, Placement):
                    uids = tuple(sorted(one.uid for one in leaving))
                    return Eviction(self._name, uids, cost[0], placement.assignment, cost)
        return None

    def _without(self, sets: Sequence[Sequence[Holder]]) -> tuple[Fleet, list[str]]:
        """This node as often as there are sets, each time without one of them."""
        fleet, names = Fleet(), [f"{at:06}" for at in range(len(sets))]
        for name, leaving in zip(names, sets, strict=True):
            gone = {one.uid for one in leaving}
            stay = [piece for one in self._holders if one.uid not in gone for piece in one.held]
            fleet.set_node(name, self._inventory, stay)
        return fleet, names

    def _reprieve(self, group: Sequence[Holder]) -> Eviction | None:
        """All of a group leave; then each may stay, the most important first, if the ask fits all the same."""
        leaving = list(group)
        found = self._try(leaving)
        if found is None:
            return None
        for one in sorted(group, key=lambda one: cost_of("", [one], self._rules.headroom), reverse=True):
            fewer = [other for other in leaving if other is not one]
            without = self._try(fewer)
            if without is not None:
                leaving, found = fewer, without
        return None if found.violations and not self._rules.violate else found

    def _try(self, leaving: Sequence[Holder]) -> Eviction | None:
        if self._rules.suffices is not None and not self._rules.suffices({one.uid for one in leaving}):
            return None
        return self._first([(cost_of(self._name, leaving, self._rules.headroom), tuple(leaving))])


def _chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
