"""What the cheapest set of victims on each of many nodes costs at least, by sums: so that few nodes need a real search.

A bound compares as a cost does (`vgpu.holder`) and is never above that of the cheapest set. Each of its numbers is the least that any set has, or
that any set has whose earlier numbers are the least; where only that can be said, a set with higher ones costs more anyway.

Groups
    Pods are looked at in groups: those on one card, for a pod that wants a share or the whole of one; all that hold an instance of the profile,
    for one that wants MIG instances; those of one node, for what else must be freed. A group frees an amount in each of some
    dimensions (MiB and percent of the card, instances, thousandths of a processor) and a demand stands against each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Final, TypeAlias

import numpy as np

from vgpu.holder import LOWEST, MOST, Holder, violations_of
from vgpu.names import CLASSES
from vgpu.node_view import RANKS, Bools, Ints, NodeView
from vgpu.request import FULL_CORE_PERCENT, Ask, PodAsk

NEVER: Final = 2**40
"""Stands for more than any number in a bound."""

MOST_TOGETHER: Final = 2**53
"""No set of pods frees as much, as each counts for `MOST` at most."""

BEST_EFFORT: Final = RANKS[CLASSES[2]]

Bound: TypeAlias = tuple[int, int, int, int, int, tuple[int, ...], str]
"""As `vgpu.holder.Cost`, without the names of pods."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What else holds on one node."""

    must_go: frozenset[str] = frozenset()
    """UIDs without which a set does not count."""
    frees: Mapping[str, int] = field(default_factory=dict)
    """Resource that is not Tangram's -> how much of it a set must free."""
    aside: frozenset[str] = frozenset()
    """UIDs of holders that make way by themselves: they count as gone."""
    beside_violations: int = 0
    """Of victims that hold no GPU, and go too: evictions beyond what budgets allow, their highest priority, how many they are."""
    beside_highest: int = LOWEST
    beside: int = 0


NO_TERMS: Final = Terms()


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be done for whom."""

    priority: int
    """Of the pod that is to fit. Only holders of a lower one are evicted."""
    headroom: Mapping[str, int] = field(default_factory=dict)
    """Budget -> evictions that it still allows. A budget that is not named allows none."""
    violate: bool = True
    """May budgets be violated at all, when nothing else helps?"""
    terms: Mapping[str, Terms] = field(default_factory=dict)
    """Node -> what else holds there."""
    may_be_nobody: bool = True
    """Is a node an answer where nobody has to go?"""

    def on(self, node: str) -> Terms:
        """What else holds on this node."""
        return self.terms.get(node, NO_TERMS)


@dataclass(slots=True)
class _Lows:
    """(groups,) each number of a bound, and whether any set suffices at all."""

    feasible: Bools
    beyond: Ints
    critical: Ints
    standard: Ints
    highest: Ints
    count: Ints

    @staticmethod
    def of_nobody(groups: int) -> _Lows:
        zeros = [np.zeros(groups, np.int64) for _ in range(5)]
        zeros[3][:] = LOWEST
        return _Lows(np.ones(groups, np.bool_), *zeros)

    def raise_to(self, other: _Lows) -> None:
        """Both hold. `standard` does for sets without a latency-critical pod, and those there are only where both say so."""
        self.critical = np.maximum(self.critical, other.critical)
        self.standard = np.where(self.critical > 0, 0, np.maximum(self.standard, other.standard))
        self.feasible &= other.feasible
        for name in ("beyond", "highest", "count"):
            setattr(self, name, np.maximum(getattr(self, name), getattr(other, name)))

    def at(self, groups: Ints) -> _Lows:
        """Those of other groups."""
        return _Lows(*(getattr(self, one.name)[groups] for one in fields(self)))


class _Groups:
    """Entries are pods in groups: (entries,) `group` and `pod`; a pod may be in several groups."""

    def __init__(self, pods: _Pods, group: Ints, pod: Ints, groups: int) -> None:
        self.group, self.pod, self.groups = group, pod, groups
        self.may = pods.may[pod]
        self.live = pods.live[pod]
        self.rank, self.priority, self.started = pods.rank[pod], pods.priority[pod], pods.started[pod]
        self.within = self.may & ~pods.beyond[pod]
        """Of those that may go, those whose eviction keeps to every budget as far as it alone goes."""

    def sums(self, amounts: Ints, some: Bools) -> Ints:
        """(groups,) of some entries together. Exact: sums stay below 2**53."""
        return np.bincount(self.group, weights=amounts * some, minlength=self.groups).astype(np.int64)

    def lows(self, dimensions: Sequence[tuple[Ints, Ints]]) -> _Lows:
        """`dimensions`: (entries,) amounts and (groups,) demand of each."""
        lows = _Lows.of_nobody(self.groups)
        by_priority = np.lexsort((self.priority, self.group))
        for amounts, demand in dimensions:
            by_amount = np.lexsort((-amounts, self.group))
            first, second = self.may & (self.rank == 0), self.may & (self.rank == 1)
            others = self.sums(amounts, self.may & (self.rank == BEST_EFFORT))
            both = others + self.sums(amounts, second)
            lows.feasible &= self.sums(amounts, self.may) >= demand
            lows.beyond = np.maximum(lows.beyond, self.sums(amounts, self.within) < demand)
            lows.critical = np.maximum(lows.critical, self._fewest(by_amount, amounts, first, demand - both))
            lows.standard = np.maximum(lows.standard, self._fewest(by_amount, amounts, second, demand - others))
            lows.count = np.maximum(lows.count, self._fewest(by_amount, amounts, self.may, demand))
            needed = by_priority[self._needed(by_priority, amounts, self.may, demand)]
            highest = np.full(self.groups, LOWEST, np.int64)
            highest[self.group[needed]] = self.priority[needed]  # of one group the last, which is the highest, stays
            lows.highest = np.maximum(lows.highest, highest)
        lows.standard[lows.critical > 0] = 0
        return lows

    def _needed(self, order: Ints, amounts: Ints, some: Bools, demand: Ints) -> Bools:
        """(entries,) in this order, by groups: those before which the demand is not met yet by those before them."""
        group, taken = self.group[order], (amounts * some)[order]
        before = np.cumsum(taken) - taken
        starts = np.searchsorted(group, np.arange(self.groups))
        before -= np.append(before, 0)[starts][group]
        needed: Bools = (before < demand[group]) & (taken > 0)
        return needed

    def _fewest(self, order: Ints, amounts: Ints, some: Bools, demand: Ints) -> Ints:
        """(groups,) how many of some entries meet the demand at least: the largest first."""
        needed = self._needed(order, amounts, some, demand)
        return np.bincount(self.group[order], weights=needed, minlength=self.groups).astype(np.int64)

    def kth_youngest(self, groups: Ints, counts: Ints) -> Ints:
        """(n,) when the `counts`-th youngest that may go of each of n groups started; -1 where there is none."""
        order = np.lexsort((-self.started, self.group))
        order = order[self.may[order]]
        edges = np.searchsorted(self.group[order], np.arange(self.groups + 1))
        at = edges[groups] + counts - 1
        there = (counts > 0) & (at < edges[groups + 1])
        found = np.full(len(groups), -1, np.int64)
        found[there] = self.started[order[at[there]]]
        return found


class _Pods:
    """The pods of some nodes, one node after the other."""

    def __init__(self, views: Sequence[NodeView], rules: Rules) -> None:
        self.first = np.cumsum([0, *(len(view.pods) for view in views)])
        self.node = np.repeat(np.arange(len(views)), np.diff(self.first))
        self.priority, self.rank, self.started = (
            np.concatenate([getattr(view, name) for view in views]) for name in ("priority", "rank", "started")
        )
        self.may: Bools = np.concatenate([view.evictable for view in views]).astype(np.bool_)
        self.may &= self.priority < rules.priority
        self.live = np.ones(len(self.may), np.bool_)
        self.beyond = np.zeros(len(self.may), np.bool_)
        exhausted = {budget for budget, left in rules.headroom.items() if left <= 0}
        for first, view in zip(self.first.tolist(), views, strict=False):
            for at, budgets in view.budgeted:
                if not exhausted.isdisjoint(budgets) or any(budget not in rules.headroom for budget in budgets):
                    self.beyond[first + at] = True
        if not rules.violate:
            self.may &= ~self.beyond
        self.forced: dict[int, list[Holder]] = {}
        """Node -> its pods that must go; of a node where one of those may not go, nothing but None."""
        self.impossible = np.zeros(len(views), np.bool_)
        for node, view in enumerate(views):
            terms = rules.on(view.name)
            gone = view.indices(terms.aside)
            known = [at for at in view.indices(terms.must_go) if self.may[self.first[node] + at]]
            self.impossible[node] = len(known) < len(terms.must_go)
            if known:
                self.forced[node] = [view.pods[at] for at in known]
            self.live[[self.first[node] + at for at in (*gone, *known)]] = False
        self.may &= self.live


def lower_bounds(
    views: Sequence[NodeView], ask: PodAsk, rules: Rules, only: Mapping[str, Set[str]]
) -> list[tuple[Bound, NodeView]]:
    """Of those nodes where a set may suffice. `only` as for `vgpu.placement.place`."""
    if not views:
        return []
    pods, part = _Pods(views, rules), most_of(ask)
    by_card = part.kind != "mig"
    if by_card:
        groups, dimensions, allowed = _cards(views, pods, ask, part, only)
    else:
        groups, dimensions, allowed = _instances(views, pods, part)
    node = np.repeat(np.arange(len(views)), [len(view.total_mib) if by_card else 1 for view in views])
    everyone, wanted = _elsewhere(views, pods, rules)
    alone = is_sum_of_one_card(ask)
    enough = np.ones(groups.groups, np.bool_)
    if alone:
        here = [(amounts[groups.pod], demand[node]) for amounts, demand in wanted]
        for amounts, demand in here:
            enough &= groups.sums(amounts, groups.may) >= demand
        dimensions += [(amounts, np.where(enough, demand, 0)) for amounts, demand in here]
    lows = groups.lows(dimensions)
    lows.feasible &= allowed
    if by_card and not alone:
        lows, node = _of_nodes(lows, node, part.cards, views), np.arange(len(views))
    if wanted:
        lows.raise_to(everyone.lows(wanted).at(node))
    youth = np.full(len(node), -1, np.int64)
    if alone:
        own, all_there = groups.kth_youngest(np.arange(len(node)), lows.count), everyone.kth_youngest(node, lows.count)
        youth = np.where(enough, own, all_there)
    lows.feasible &= ~pods.impossible[node]
    return _by_node(views, pods, rules, lows, node, youth)


def most_of(ask: PodAsk) -> Ask:
    """The container that is hardest to place. Where it does not fit the pod does not; of a pod with one container the reverse holds too."""
    kinds = ("share", "whole", "mig")
    return min(ask.containers, key=lambda part: (kinds.index(part.kind), -part.mib, -part.cards))


def is_sum_of_one_card(ask: PodAsk) -> bool:
    """Does it need but one card, of which sums say whether it fits?"""
    (first, *others) = ask.containers
    return not others and first.kind != "mig" and first.cards == 1


_Dimensions: TypeAlias = list[tuple[Ints, Ints]]


def _cards(
    views: Sequence[NodeView], pods: _Pods, ask: PodAsk, part: Ask, only: Mapping[str, Set[str]]
) -> tuple[_Groups, _Dimensions, Bools]:
    first = np.cumsum([0, *(len(view.total_mib) for view in views)])
    group = np.concatenate([view.row + base for view, base in zip(views, first.tolist(), strict=False)])
    pod = np.concatenate([view.owner + base for view, base in zip(views, pods.first.tolist(), strict=False)])
    groups = _Groups(pods, group, pod, int(first[-1]))
    allowed = np.concatenate([view.allowed(ask, only.get(view.name)) for view in views])
    if part.kind == "whole":
        ones = np.ones(len(group), np.int64)
        return groups, [(ones, groups.sums(ones, groups.live))], allowed
    mib, percent = (np.concatenate([getattr(view, name) for view in views]) for name in ("mib", "percent"))
    free_mib = np.concatenate([view.total_mib for view in views]) - groups.sums(mib, groups.live)
    free_percent = FULL_CORE_PERCENT - groups.sums(percent, groups.live)
    return groups, [(mib, part.mib - free_mib), (percent, part.core_percent - free_percent)], allowed


def _instances(views: Sequence[NodeView], pods: _Pods, part: Ask) -> tuple[_Groups, _Dimensions, Bools]:
    """All that hold an instance of the profile, a group for each node. Which cards may be taken is left out of account."""
    held = [
        (node, base + at)
        for node, (view, base) in enumerate(zip(views, pods.first.tolist(), strict=False))
        for at, piece in view.mig
        if piece.profile == part.profile
    ]
    group, pod = np.array(held, np.int64).reshape(-1, 2).T
    groups, ones = _Groups(pods, group, pod, len(views)), np.ones(len(group), np.int64)
    there = np.array([view.instances(part.profile) for view in views], np.int64)
    return groups, [(ones, part.cards - (there - groups.sums(ones, groups.live)))], there >= part.cards


def _elsewhere(views: Sequence[NodeView], pods: _Pods, rules: Rules) -> tuple[_Groups, _Dimensions]:
    """The pods of each node, and what they must free that is not Tangram's, beyond what those free who must go."""
    wanted = sorted({resource for view in views for resource in rules.on(view.name).frees})
    dimensions = []
    for resource in wanted:
        demand = [rules.on(view.name).frees.get(resource, 0) for view in views]
        for node, forced in pods.forced.items():
            demand[node] -= sum(min(MOST, one.requests.get(resource, 0)) for one in forced)
        amounts = np.concatenate([view.requests(resource) for view in views])
        dimensions.append((amounts, np.array([min(one, MOST_TOGETHER) for one in demand], np.int64)))
    return _Groups(pods, pods.node, np.arange(len(pods.node)), len(views)), dimensions


def _of_nodes(lows: _Lows, node: Ints, cards: int, views: Sequence[NodeView]) -> _Lows:
    """Of so many cards of each node together, from those of each card: the lowest ones."""
    most = max(len(view.total_mib) for view in views)
    at = np.arange(len(node)) - np.searchsorted(node, np.arange(len(views)))[node]
    apart = ~np.array([view.spans for view in views])
    lows.standard = np.where(lows.critical > 0, NEVER, lows.standard)
    found = {}
    for name in ("beyond", "critical", "standard", "highest", "count"):
        table = np.full((len(views), max(most, cards)), NEVER, np.int64)
        table[node, at] = np.where(lows.feasible, getattr(lows, name), NEVER)
        table.sort(axis=1)
        adds_up = apart if name in ("critical", "standard", "count") else np.zeros(len(views), np.bool_)
        found[name] = np.where(adds_up, table[:, :cards].sum(axis=1), table[:, cards - 1])
    found["standard"] = np.where(found["critical"] > 0, 0, found["standard"])
    return _Lows(found["count"] < NEVER, **found)


def _by_node(
    views: Sequence[NodeView], pods: _Pods, rules: Rules, lows: _Lows, node: Ints, youth: Ints
) -> list[tuple[Bound, NodeView]]:
    best: dict[int, tuple[int, ...]] = {}
    kept = np.flatnonzero(lows.feasible)
    columns = (lows.beyond, lows.critical, lows.standard, lows.highest, lows.count, -youth, node)
    for *numbers, at in zip(*(column[kept].tolist() for column in columns), strict=True):
        one = tuple(numbers)
        if at not in best or one < best[at]:
            best[at] = one
    return [(_bound(views[at].name, one, pods.forced.get(at, ()), rules), views[at]) for at, one in best.items()]


def _bound(node: str, numbers: Sequence[int], forced: Sequence[Holder], rules: Rules) -> Bound:
    """With those that must go, and those that hold no GPU."""
    beyond, critical, standard, highest, count, youth = numbers
    terms = rules.on(node)
    if forced:
        beyond = max(beyond, violations_of(forced, rules.headroom))
        critical += sum(one.klass == CLASSES[0] for one in forced)
        standard += sum(one.klass == CLASSES[1] for one in forced)
        highest = max(highest, *(one.priority for one in forced))
    known = count > 0 and not forced and youth < 0
    return (
        beyond + terms.beside_violations, critical, standard, max(highest, terms.beside_highest),
        count + len(forced) + terms.beside, (youth,) if known else (), node,
    )  # fmt: skip
