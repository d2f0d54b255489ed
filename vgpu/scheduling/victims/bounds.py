"""What the cheapest set of victims on each of many nodes costs at least, by sums: so that few nodes need a real search.

A bound compares as a cost does (`vgpu.scheduling.victims.eviction_cost`) and is never above that of the cheapest set. Each of its numbers is the least that any set has
whose earlier numbers are the least: a set with a higher one before costs more anyway. So once it is known that for example no latency-critical pod has to be evicted, none
of them counts any more for the numbers that follow.

Groups
    Pods are counted in groups: those on one GPU, for a pod that requests shares or whole GPUs; all that have an instance of the profile,
    for one that requests MIG instances; those of a node, where pods on one GPU free too little of what is not a GPU. A group frees an amount in
    each of some dimensions (MiB and percent of the GPU, instances, thousandths of a processor) and a demand stands against each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from vgpu.api.names import CLASSES
from vgpu.api.request import FULL_CORE_PERCENT, GpuRequest, PodRequest
from vgpu.scheduling.victims.eligibility import LOWEST, AllocatedPod, is_lower
from vgpu.scheduling.victims.eviction_cost import violations_of
from vgpu.scheduling.victims.node import Bools, Ints, NodeView

NEVER: Final = 2**40
"""Stands for more than any number in a bound."""

MOST_TOGETHER: Final = 2**53
"""No set of pods frees as much, as each counts for `MOST` at most."""

Bound: TypeAlias = tuple[int, int, int, int, int, tuple[int, ...], str]
"""As `vgpu.scheduling.victims.eviction_cost.Cost`, without the names of pods."""


@dataclass(frozen=True, slots=True)
class EvictionTerms:
    """What else applies on one node."""

    must_go: frozenset[str] = frozenset()
    """UIDs without which a set does not count."""
    frees: Mapping[str, int] = field(default_factory=dict)
    """Resource that is not Tangram's -> how much of it a set must free."""
    aside: frozenset[str] = frozenset()
    """UIDs of pods that end by themselves: they count as gone."""
    beside_violations: int = 0
    """Of victims that have no GPU and are evicted, too: evictions beyond what budgets allow, their highest priority, how many they are."""
    beside_highest: int = LOWEST
    beside: int = 0


NO_TERMS: Final = EvictionTerms()


@dataclass(frozen=True, slots=True)
class EvictionRules:
    """What may be done for which pod."""

    priority: int
    """Of the pod that is to fit. Only pods of a lower one are evicted."""
    headroom: Mapping[str, int] = field(default_factory=dict)
    """Budget -> evictions that it still allows. A budget that is not named allows none."""
    violate: bool = True
    """May budgets be violated at all, when nothing else helps?"""
    terms: Mapping[str, EvictionTerms] = field(default_factory=dict)
    """Node -> what else applies there."""
    may_be_nobody: bool = True
    """Is a node an answer where no pod has to be evicted?"""

    def on(self, node: str) -> EvictionTerms:
        """What else applies on this node."""
        return self.terms.get(node, NO_TERMS)


_Dimensions: TypeAlias = list[tuple[Ints, Ints]]
"""(entries,) amounts and (groups,) demand of each."""


class _Groups:
    """Entries are pods in groups: (entries,) `group` and `pod`; a pod may be in several groups."""

    def __init__(self, pods: _Pods, group: Ints, pod: Ints, groups: int) -> None:
        self.group, self.pod, self.groups = group, pod, groups
        self.may, self.live, self.beyond = pods.may[pod], pods.live[pod], pods.beyond[pod]
        self.rank, self.priority, self.started = pods.rank[pod], pods.priority[pod], pods.started[pod]
        self._sorted = np.sort(group)
        """`group` in any order by groups."""
        self._first = np.searchsorted(self._sorted, np.arange(groups))[self._sorted]
        """(entries,) in such an order: the first of its group."""

    def sums(self, amounts: Ints, some: Bools) -> Ints:
        """(groups,) of some entries together. Exact: sums stay below 2**53."""
        return np.bincount(self.group, weights=amounts * some, minlength=self.groups).astype(np.int64)

    def suffice(self, dimensions: _Dimensions, some: Bools) -> Bools:
        """(groups,) whether some entries together meet every demand."""
        enough = np.ones(self.groups, np.bool_)
        for amounts, demand in dimensions:
            enough &= self.sums(amounts, some) >= demand
        return enough

    def largest_first(self, dimensions: _Dimensions) -> list[Ints]:
        """Of each dimension the entries, by groups, the largest first."""
        return [np.lexsort((-amounts, self.group)) for amounts, _ in dimensions]

    def fewest(self, dimensions: _Dimensions, orders: Sequence[Ints], some: Bools, beside: Bools) -> Ints:
        """(groups,) how many of some entries meet the demand at least, when those beside go too. `orders`: the largest first."""
        fewest = np.zeros(self.groups, np.int64)
        for (amounts, demand), order in zip(dimensions, orders, strict=True):
            needed = self._needed(order, amounts, some, demand - self.sums(amounts, beside))
            counted = np.bincount(self._sorted, weights=needed, minlength=self.groups)
            fewest = np.maximum(fewest, counted.astype(np.int64))
        return fewest

    def highest(self, dimensions: _Dimensions, some: Bools) -> Ints:
        """(groups,) the priority up to which some entries must go at least."""
        highest = np.full(self.groups, LOWEST, np.int64)
        order = np.lexsort((self.priority, self.group))
        for amounts, demand in dimensions:
            needed = order[self._needed(order, amounts, some, demand)]
            found = np.full(self.groups, LOWEST, np.int64)
            found[self.group[needed]] = self.priority[needed]  # of one group the last, which is the highest, stays
            highest = np.maximum(highest, found)
        return highest

    def _needed(self, order: Ints, amounts: Ints, some: Bools, demand: Ints) -> Bools:
        """(entries,) in this order, by groups: those before which the demand is not met yet by those before them."""
        taken = (amounts * some)[order]
        before = np.cumsum(taken) - taken
        needed: Bools = (before - before[self._first] < demand[self._sorted]) & (taken > 0)
        return needed


class _Slots:
    """Where a pod may go: a group each, or so many groups (GPUs) of a node each."""

    def __init__(self, node: Ints, gpus: int, views: Sequence[NodeView], *, each: bool) -> None:
        self._gpus, self._each, self._views = gpus, each, len(views)
        self._group_node = node
        self.node = node if each else np.arange(len(views))
        self.of_group = np.arange(len(node)) if each else node
        if not each:
            self._at = np.arange(len(node)) - np.searchsorted(node, np.arange(len(views)))[node]
            self._width = max(gpus, *(len(view.total_mib) for view in views))
            self._apart = ~np.array([view.spans for view in views])
            """Has no pod shares of several GPUs? Then what is freed on each adds up."""

    def most(self, values: Ints, feasible: Bools) -> Ints:
        """(slots,) the highest value of the groups of a slot, which are those with the lowest. NEVER where there are too few."""
        known = np.where(feasible, values, NEVER)
        return known if self._each else self._sorted(known)[:, self._gpus - 1]

    def total(self, values: Ints, feasible: Bools) -> Ints:
        """(slots,) at least this, of something that adds up over GPUs unless pods have shares of several."""
        known = np.where(feasible, values, NEVER)
        if self._each:
            return known
        lowest = self._sorted(known)
        return np.where(self._apart, np.minimum(NEVER, lowest[:, : self._gpus].sum(axis=1)), lowest[:, self._gpus - 1])

    def _sorted(self, values: Ints) -> Ints:
        table = np.full((self._views, self._width), NEVER, np.int64)
        table[self._group_node, self._at] = values
        table.sort(axis=1)
        return table

    def kth_youngest(self, groups: _Groups, may: Bools, counts: Ints) -> Ints:
        """(slots,) when the `counts`-th youngest of those in it that may go started; -1 where there is none."""
        slot = self.of_group[groups.group]
        order = np.lexsort((-groups.started, slot))
        order = order[may[order]]
        edges = np.searchsorted(slot[order], np.arange(len(self.node) + 1))
        at = edges[:-1] + counts - 1
        there = (counts > 0) & (at < edges[1:])
        found = np.full(len(self.node), -1, np.int64)
        found[there] = groups.started[order[at[there]]]
        return found


def _numbers(groups: _Groups, slots: _Slots, dimensions: _Dimensions, allowed: Bools) -> tuple[Ints, ...]:
    """(slots,) each number of a bound, the first of them NEVER where no set suffices."""
    slot, may, orders = slots.of_group[groups.group], groups.may, groups.largest_first(dimensions)
    feasible = allowed & groups.suffice(dimensions, may)
    beyond = slots.most((~groups.suffice(dimensions, may & ~groups.beyond)).astype(np.int64), feasible)
    may = may & ~(groups.beyond & (beyond == 0)[slot])
    numbers = [beyond]
    plain = beyond >= 0
    for rank in (0, 1):
        of_rank = groups.rank == rank
        feasible = feasible & groups.suffice(dimensions, may)
        fewest = slots.total(groups.fewest(dimensions, orders, may & of_rank, may & ~of_rank), feasible)
        fewest = np.where(plain, fewest, 0)
        may = may & ~(of_rank & (plain & (fewest == 0))[slot])
        plain = plain & (fewest == 0)
        numbers.append(fewest)
    feasible = feasible & groups.suffice(dimensions, may)
    highest = slots.most(groups.highest(dimensions, may), feasible)
    may = may & (groups.priority <= highest[slot])
    feasible = feasible & groups.suffice(dimensions, may)
    count = slots.total(groups.fewest(dimensions, orders, may, np.zeros_like(may)), feasible)
    return (*numbers, highest, count, -slots.kth_youngest(groups, may, count))


class _Pods:
    """The pods of some nodes, one node after the other."""

    def __init__(self, views: Sequence[NodeView], rules: EvictionRules) -> None:
        self.first = np.cumsum([0, *(len(view.pods) for view in views)])
        self.node = np.repeat(np.arange(len(views)), np.diff(self.first))
        self.priority, self.rank, self.started = (
            np.concatenate([getattr(view, name) for view in views]) for name in ("priority", "rank", "started")
        )
        self.may: Bools = np.concatenate([view.evictable for view in views])
        self.may &= is_lower(self.priority, rules.priority)
        self.live = np.ones(len(self.may), np.bool_)
        self.beyond = np.zeros(len(self.may), np.bool_)
        for first, view in zip(self.first.tolist(), views, strict=False):
            for at, budgets in view.budgeted:
                if any(rules.headroom.get(budget, 0) <= 0 for budget in budgets):
                    self.beyond[first + at] = True
        if not rules.violate:
            self.may &= ~self.beyond
        self.forced: dict[int, list[AllocatedPod]] = {}
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
    views: Sequence[NodeView], request: PodRequest, rules: EvictionRules, only: Mapping[str, Set[str]]
) -> list[tuple[Bound, NodeView]]:
    """Of those nodes where a set may suffice. `only` as for `vgpu.scheduling.placement.place`."""
    if not views:
        return []
    pods, part = _Pods(views, rules), most_of(request)
    by_gpu, alone = part.kind != "mig", is_sum_of_one_gpu(request)
    if by_gpu:
        groups, dimensions, allowed = _gpus(views, pods, request, part, only)
    else:
        groups, dimensions, allowed = _instances(views, pods, part)
    node = np.repeat(np.arange(len(views)), [len(view.total_mib) if by_gpu else 1 for view in views])
    wanted = _elsewhere(views, pods, rules)
    if wanted:
        groups, dimensions, allowed, node = _with_nodes(pods, groups, dimensions, allowed, node, wanted, alone=alone)
    slots = _Slots(node, part.gpus if by_gpu else 1, views, each=alone or not by_gpu)
    return _by_node(views, pods, rules, slots.node, _numbers(groups, slots, dimensions, allowed))


def most_of(request: PodRequest) -> GpuRequest:
    """The container that is hardest to place. Where it does not fit the pod does not; of a pod with one container the reverse is true too."""
    kinds = ("share", "whole", "mig")
    return min(request.containers, key=lambda part: (kinds.index(part.kind), -part.mib, -part.gpus))


def is_sum_of_one_gpu(request: PodRequest) -> bool:
    """Does it need only one GPU, so that sums decide whether it fits?"""
    (first, *others) = request.containers
    return not others and first.kind != "mig" and first.gpus == 1


def _gpus(
    views: Sequence[NodeView], pods: _Pods, request: PodRequest, part: GpuRequest, only: Mapping[str, Set[str]]
) -> tuple[_Groups, _Dimensions, Bools]:
    first = np.cumsum([0, *(len(view.total_mib) for view in views)])
    group = np.concatenate([view.row + base for view, base in zip(views, first.tolist(), strict=False)])
    pod = np.concatenate([view.owner + base for view, base in zip(views, pods.first.tolist(), strict=False)])
    groups = _Groups(pods, group, pod, int(first[-1]))
    allowed = np.concatenate([view.allowed(request, only.get(view.name), part.kind) for view in views])
    if part.kind == "whole":
        ones = np.ones(len(group), np.int64)
        return groups, [(ones, groups.sums(ones, groups.live))], allowed
    mib, percent = (np.concatenate([getattr(view, name) for view in views]) for name in ("mib", "percent"))
    free_mib = np.concatenate([view.total_mib for view in views]) - groups.sums(mib, groups.live)
    free_percent = FULL_CORE_PERCENT - groups.sums(percent, groups.live)
    return groups, [(mib, part.mib - free_mib), (percent, part.core_percent - free_percent)], allowed


def _instances(views: Sequence[NodeView], pods: _Pods, part: GpuRequest) -> tuple[_Groups, _Dimensions, Bools]:
    """All that have an instance of the profile, a group for each node. Which GPUs may be taken is left out of account.

    With GPUs on demand an instance of any profile may be in the way, and one eviction may make room for several: so one counts as enough.
    """
    on_demand = [view.on_demand for view in views]
    held = [
        (node, base + at)
        for node, (view, base) in enumerate(zip(views, pods.first.tolist(), strict=False))
        for at in _having(view, part.profile, anything=on_demand[node])
    ]
    group, pod = np.array(held, np.int64).reshape(-1, 2).T
    groups, ones = _Groups(pods, group, pod, len(views)), np.ones(len(group), np.int64)
    there = np.array([view.instances(part.profile) for view in views], np.int64)
    lacking = part.gpus - (there - groups.sums(ones, groups.live))
    for node, view in enumerate(views):
        if on_demand[node]:
            settled = pods.live[pods.first[node] : pods.first[node + 1]].all()
            lacking[node] = int(settled and view.free_instances(part.profile) < part.gpus)
    return groups, [(ones, lacking)], there >= part.gpus


def _having(view: NodeView, profile: str, *, anything: bool) -> Iterable[int]:
    """Pods, each as often as it has an instance of the profile; `anything`: once each that has one of any."""
    if anything:
        return dict.fromkeys(at for at, _ in view.mig)
    return (at for at, assigned in view.mig if assigned.profile == profile)


def _elsewhere(views: Sequence[NodeView], pods: _Pods, rules: EvictionRules) -> list[tuple[Ints, Ints]]:
    """(pods,) amounts and (nodes,) demand of each resource that is not Tangram's, beyond what the pods free that must be evicted."""
    wanted = sorted({resource for view in views for resource in rules.on(view.name).frees})
    found = []
    for resource in wanted:
        demand = [rules.on(view.name).frees.get(resource, 0) for view in views]
        for node, forced in pods.forced.items():
            demand[node] -= sum(one.frees(resource) for one in forced)
        amounts = np.concatenate([view.requests(resource) for view in views])
        found.append((amounts, np.array([min(one, MOST_TOGETHER) for one in demand], np.int64)))
    return found


def _with_nodes(
    pods: _Pods, groups: _Groups, dimensions: _Dimensions, allowed: Bools, node: Ints, wanted: list[tuple[Ints, Ints]],
    *, alone: bool,
) -> tuple[_Groups, _Dimensions, Bools, Ints]:  # fmt: skip
    """What else must be freed. By the pods on one GPU, where they can; else by all pods of its node, a further group, for which the
    GPU's own demand counts as far as it can be met by any of them."""
    if not alone:
        return groups, dimensions, allowed, node  # what else must be freed only makes a set larger
    here = [(amounts[groups.pod], demand[node]) for amounts, demand in wanted]
    enough = groups.suffice(here, groups.may)
    if enough.all():
        return groups, dimensions + here, allowed, node
    nodes, gpus = len(pods.impossible), groups.groups
    possible = allowed & groups.suffice(dimensions, groups.may)
    short = np.bincount(node, weights=possible & ~enough, minlength=nodes) > 0
    kept = short[pods.node]
    both = _Groups(
        pods,
        np.concatenate([groups.group, gpus + pods.node[kept]]),
        np.concatenate([groups.pod, np.flatnonzero(kept)]),
        gpus + nodes,
    )
    nothing, more = np.zeros(nodes, np.int64), np.zeros(np.count_nonzero(kept), np.int64)
    joined = [
        (np.concatenate([amounts, more]), np.concatenate([demand, nothing])) for amounts, demand in dimensions
    ] + [(amounts[both.pod], np.concatenate([np.where(enough, demand[node], 0), demand])) for amounts, demand in wanted]
    return both, joined, np.concatenate([allowed & enough, short]), np.concatenate([node, np.arange(nodes)])


def _by_node(
    views: Sequence[NodeView], pods: _Pods, rules: EvictionRules, node: Ints, numbers: tuple[Ints, ...]
) -> list[tuple[Bound, NodeView]]:
    best: dict[int, tuple[int, ...]] = {}
    feasible = np.logical_and.reduce([one < NEVER for one in numbers]) & ~pods.impossible[node]
    kept = np.flatnonzero(feasible)
    for *reported, at in zip(*(column[kept].tolist() for column in (*numbers, node)), strict=True):
        one = tuple(reported)
        if at not in best or one < best[at]:
            best[at] = one
    return [(_bound(views[at].name, one, pods.forced.get(at, ()), rules), views[at]) for at, one in best.items()]


def _bound(node: str, numbers: Sequence[int], forced: Sequence[AllocatedPod], rules: EvictionRules) -> Bound:
    """With those that must be evicted, and those that have no GPU."""
    beyond, critical, standard, highest, count, youth = numbers
    terms = rules.on(node)
    if forced:
        beyond = max(beyond, violations_of(forced, rules.headroom))
        critical += sum(one.service_class == CLASSES[0] for one in forced)
        standard += sum(one.service_class == CLASSES[1] for one in forced)
        highest = max(highest, *(one.priority for one in forced))
    known = count > 0 and not forced and youth < 0
    return (
        beyond + terms.beside_violations, critical, standard, max(highest, terms.beside_highest),
        count + len(forced) + terms.beside, (youth,) if known else (), node,
    )  # fmt: skip
