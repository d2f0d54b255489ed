"""The least set of victims on one node.

Whether a set suffices is a matter of sums where one container requests shares of GPUs or whole ones. Of several containers, and of MIG instances,
`placement` itself is called, on a copy of the node without them. `placement` decides in any case where the pod then goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from vgpu.api.grant import Assignment
from vgpu.api.request import FULL_CORE_PERCENT, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, explain, place
from vgpu.scheduling.victims.bounds import Bound, EvictionRules
from vgpu.scheduling.victims.eligibility import AllocatedPod
from vgpu.scheduling.victims.eviction_cost import Cost, cost_of, violates_surely, violations_of
from vgpu.scheduling.victims.node import Bools, Ints, NodeView
from vgpu.scheduling.victims.sets import EXACT, Sets, Suffices, covers, give_back, least_set

EXACT_OTHERS: Final = 8
"""As `EXACT`, of requests with several containers, or for MIG instances: each of the 256 sets may have to be tried."""

AT_ONCE: Final = 16
"""Sets that are tried together: `placement` takes hardly longer for 16 nodes than for one."""

CAPS: Final = 8
"""Priorities up to which victims for several GPUs are looked for, one after the other. Guessed."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """The pods to evict, and what that gives."""

    node: str
    victims: tuple[str, ...]
    """UIDs by name; none when the request fits as it is."""
    violations: int
    """How many of these evictions the disruption budgets do not allow."""
    assignment: Assignment
    """Where the pod would go."""
    cost: Cost = field(compare=False, repr=False)
    """With the victims that have no GPU (`bounds.EvictionTerms`)."""


Steps = Generator[None, None, "tuple[AllocatedPod, ...] | None"]
"""Yields after some milliseconds of work, and answers a set."""


class NodeSearch:
    """`only`: no other GPUs than these. `bound`: what any set there costs at least."""

    def __init__(
        self, view: NodeView, request: PodRequest, rules: EvictionRules, only: Set[str] | None, bound: Bound
    ) -> None:
        self._view, self._request, self._rules, self._only, self._bound = view, request, rules, only, bound
        self._terms = rules.on(view.name)
        self._may_go, self._forced, self._stay = list[AllocatedPod](), list[AllocatedPod](), list[AllocatedPod]()
        for one in view.pods:
            if one.uid in self._terms.aside:
                continue
            may_go = one.may_be_evicted_for(rules.priority)
            where = (
                self._forced if may_go and one.uid in self._terms.must_go else self._may_go if may_go else self._stay
            )
            where.append(one)
        freed = {name: sum(one.frees(name) for one in self._forced) for name in self._terms.frees}
        self._frees = {name: amount - freed[name] for name, amount in self._terms.frees.items() if amount > freed[name]}
        self._headroom_left = _less(rules.headroom, self._forced)
        self._one_container = len(request.containers) == 1 and request.containers[0].kind != "mig"

    def least(self) -> Generator[None, None, Eviction | None]:
        """The least set here, or None."""
        if len(self._forced) < len(self._terms.must_go):
            return None
        if not self._one_container:
            sets: Steps = self._by_trying()
        elif self._request.containers[0].gpus > 1:
            sets = self._of_several_gpus()
        else:
            sets = self._of_one_gpu()
        found = yield from sets
        return None if found is None else self._eviction(found)

    def _eviction(self, found: Sequence[AllocatedPod]) -> Eviction | None:
        """None also where the budgets do not allow it, or no pod has to be evicted and that is no answer."""
        victims, terms = (*self._forced, *found), self._terms
        if not (victims or terms.beside or self._rules.may_be_nobody):
            return None
        fleet, names = self._without([found])
        placement = place(fleet, self._request, names, self._narrowed(names))
        if not isinstance(placement, Placement):
            return None
        beyond = violations_of(victims, self._rules.headroom)
        if beyond and not self._rules.violate:
            return None
        uids = tuple(sorted(one.uid for one in victims))
        return Eviction(self._view.name, uids, beyond, placement.assignment, self._whole_cost(found))

    def _cost(self, some: Sequence[AllocatedPod]) -> Cost:
        return cost_of(self._view.name, some, self._rules.headroom)

    def _whole_cost(self, some: Sequence[AllocatedPod]) -> Cost:
        """With those that must be evicted, and the victims that have no GPU."""
        terms = self._terms
        beyond, critical, standard, highest, count, *rest = self._cost((*self._forced, *some))
        cost: Cost = (
            beyond + terms.beside_violations, critical, standard, max(highest, terms.beside_highest),
            count + terms.beside, *rest,
        )  # type: ignore[assignment]  # fmt: skip
        return cost

    def _best(self, sets: Iterable[Sequence[AllocatedPod] | None]) -> tuple[AllocatedPod, ...] | None:
        """The cheapest, counted with those that must go."""
        known = [tuple(one) for one in sets if one is not None]
        return min(known, key=lambda one: self._cost((*self._forced, *one)), default=None)

    # --- one container: sums decide what fits ---

    def _of_one_gpu(self) -> Steps:
        """GPU by GPU."""
        found = []
        lacking = self._lacking()
        held = self._held(self._may_go)
        for row in np.flatnonzero(self._allowed).tolist():
            on_gpu = [at for at in range(len(self._may_go)) if held[2][at, row]]
            pods = [self._may_go[at] for at in on_gpu]
            if any(sum(one.frees(name) for one in pods) < wanted for name, wanted in self._frees.items()):
                helpers = [at for at in range(len(self._may_go)) if any(self._may_go[at].frees(n) for n in self._frees)]
                on_gpu = sorted({*on_gpu, *helpers})
                pods = [self._may_go[at] for at in on_gpu]
            amounts = np.column_stack(
                [
                    *(held[by][on_gpu, row] for by in self._dimensions),
                    *(self._amounts(pods, name) for name in self._frees),
                ]
            ).astype(np.int64)
            demand = np.array([*(lacking[by][row] for by in self._dimensions), *self._frees.values()], np.int64)
            found.append((yield from self._least_set(pods, covers(amounts, demand), amounts / np.maximum(demand, 1))))
            yield
        return self._best(found)

    @property
    def _allowed(self) -> Bools:
        """(GPUs,) which the pod's one container may have."""
        return self._view.allowed(self._request, self._only, self._request.containers[0].kind)

    @property
    def _dimensions(self) -> tuple[int, ...]:
        """Of `_held` and `_lacking`, those that count: memory and compute time of a share, all pods of a whole GPU."""
        return (2,) if self._request.containers[0].kind == "whole" else (0, 1)

    def _held(self, pods: Sequence[AllocatedPod]) -> tuple[Ints, Ints, Ints]:
        """(pods, GPUs) MiB, percent and shares that each has of each GPU."""
        index = {one.uid: at for at, one in enumerate(pods)}
        view, gpus = self._view, len(self._view.total_mib)
        mib, percent, shares = (np.zeros((len(pods), gpus), np.int64) for _ in range(3))
        owners = [index.get(view.pods[at].uid, -1) for at in view.owner.tolist()]
        for owner, row, *amounts in zip(
            owners, view.row.tolist(), view.mib.tolist(), view.percent.tolist(), strict=True
        ):
            if owner >= 0:
                mib[owner, row] += amounts[0]
                percent[owner, row] += amounts[1]
                shares[owner, row] += 1
        return mib, percent, shares

    def _lacking(self) -> tuple[Ints, Ints, Ints]:
        """(GPUs,) MiB, percent and shares that must be freed on each GPU, if it is to be one that the pod gets."""
        part = self._request.containers[0]
        mib, percent, shares = (one.sum(axis=0) for one in self._held([*self._stay, *self._may_go]))
        return (
            part.mib - (self._view.total_mib - mib), part.core_percent - (FULL_CORE_PERCENT - percent), shares,
        )  # fmt: skip

    def _amounts(self, pods: Sequence[AllocatedPod], resource: str) -> Ints:
        return np.array([one.frees(resource) for one in pods], np.int64)

    def _of_several_gpus(self) -> Steps:
        """All pods together, where they are few. Of many, the GPUs that cost least, each by itself, and which of them could then stay."""
        pods, suffices = self._may_go, self._several_suffice(self._may_go)
        shares = np.ones((len(pods), 1))
        if len(pods) <= EXACT:
            return (yield from self._least_set(pods, suffices, shares))
        found = list[Sequence[AllocatedPod]]()
        for cap in self._caps():
            some = yield from self._gpu_by_gpu([one for one in pods if one.priority <= cap])
            kept = None if some is None else give_back(some, self._several_suffice(some), self._rules.headroom)
            if some is not None and kept is not None:
                found.append([some[at] for at in kept])
                if self._whole_cost(found[-1])[:4] <= self._bound[:4]:
                    break  # with more important pods there are only sets of more important pods
            yield
        if not self._rules.violate:
            found = [one for one in found if not violations_of(one, self._headroom_left)]
        if not found:
            going = give_back(pods, suffices, self._rules.headroom)
            found = [] if going is None else [[pods[at] for at in going]]
        return self._best(found)

    def _caps(self) -> list[int]:
        """Priorities up to which pods may go: the first that may be enough, then some of those above, the highest among them."""
        priorities = sorted({one.priority for one in self._may_go if one.priority >= self._bound[3]})
        return priorities[:: max(1, -(-len(priorities) // CAPS))] + priorities[-1:]

    def _several_suffice(self, pods: Sequence[AllocatedPod]) -> Suffices:
        """Do as many GPUs have enough free as the pod needs?"""
        lacking, held = self._lacking(), self._held(pods)
        allowed, gpus = self._allowed, self._request.containers[0].gpus
        others = [(self._amounts(pods, name), wanted) for name, wanted in self._frees.items()]

        def suffices(sets: Sets) -> Bools:
            can = np.broadcast_to(allowed, (len(sets), len(allowed)))
            for by in self._dimensions:
                can = can & (sets @ held[by] >= lacking[by])
            enough: Bools = np.count_nonzero(can, axis=1) >= gpus
            for amounts, wanted in others:
                enough = enough & (sets @ amounts >= wanted)
            return enough

        return suffices

    def _gpu_by_gpu(self, pods: Sequence[AllocatedPod]) -> Steps:
        """One GPU after the other, that which costs least beside those chosen already; then more pods, if what is not a GPU needs them."""
        lacking, held = self._lacking(), self._held(pods)
        going = np.zeros(len(pods), np.int64)
        rows = np.flatnonzero(self._allowed).tolist()
        sets: dict[int, list[int] | None] = {}
        for _ in range(self._request.containers[0].gpus):
            for row in rows if self._view.spans or not sets else ():
                sets[row] = yield from self._least_on(row, pods, lacking, held, going)
                yield
            costs = {row: self._cost([pods[at] for at in some]) for row, some in sets.items() if some is not None}
            if not costs:
                return None
            row = min(costs, key=costs.__getitem__)
            going[sets.pop(row)] = 1
            rows.remove(row)
        for name, wanted in self._frees.items():
            amounts = self._amounts(pods, name)
            for at in sorted(range(len(pods)), key=lambda at: (self._cost([pods[at]])[:4], -amounts[at])):
                if going @ amounts >= wanted:
                    break
                going[at] = 1
        return tuple(one for one, goes in zip(pods, going.tolist(), strict=True) if goes)

    def _least_on(
        self, row: int, pods: Sequence[AllocatedPod], lacking: Sequence[Ints], held: Sequence[Ints], going: Ints
    ) -> Generator[None, None, list[int] | None]:
        """Victims that free enough on one GPU, beside some that are evicted anyway."""
        on_gpu = [at for at in np.flatnonzero(held[2][:, row]).tolist() if not going[at]]
        amounts = np.column_stack([held[by][on_gpu, row] for by in self._dimensions])
        demand = np.array([lacking[by][row] - going @ held[by][:, row] for by in self._dimensions], np.int64)
        shares = amounts / np.maximum(demand, 1)
        some = yield from self._least_set([pods[at] for at in on_gpu], covers(amounts, demand), shares)
        uids = None if some is None else {one.uid for one in some}
        return None if uids is None else [at for at in on_gpu if pods[at].uid in uids]

    def _least_set(self, pods: Sequence[AllocatedPod], suffices: Suffices, shares: npt.NDArray[np.float64]) -> Steps:
        return (yield from least_set(pods, suffices, shares, self._headroom_left, violate=self._rules.violate))

    # --- several containers, or MIG instances: placement decides what fits ---

    def _by_trying(self) -> Steps:
        """Set by set, the cheapest first. Of many pods all leave, and each may stay, the most important first."""
        pods = self._may_go
        if len(pods) > EXACT_OTHERS:
            return (yield from self._protected_one_by_one(pods))
        sets = [some for size in range(len(pods) + 1) for some in combinations(pods, size) if self._frees_enough(some)]
        priced = [(self._cost((*self._forced, *some)), some) for some in sets]
        yield
        in_order = iter(sorted(priced, key=lambda one: one[0]))
        while some := list(islice(in_order, AT_ONCE)):
            first = self._first_that_fits([one for cost, one in some if self._rules.violate or not cost[0]])
            if first is not None:
                return first
            yield
        return None

    def _protected_one_by_one(self, pods: Sequence[AllocatedPod]) -> Steps:
        if not self._rules.violate:
            pods = [one for one in pods if not violates_surely(one, self._headroom_left)]
        going = list(pods)
        if self._fitting(going) is None:
            return None
        for one in sorted(pods, key=lambda one: self._cost([one]), reverse=True):
            fewer = [other for other in going if other is not one]
            if self._fitting(fewer) is not None:
                going = fewer
            yield
        return tuple(going)

    def _fitting(self, some: Sequence[AllocatedPod]) -> tuple[AllocatedPod, ...] | None:
        return self._first_that_fits([tuple(some)]) if self._frees_enough(some) else None

    def _frees_enough(self, some: Iterable[AllocatedPod]) -> bool:
        some = tuple(some)
        return all(sum(one.frees(name) for one in some) >= wanted for name, wanted in self._frees.items())

    def _first_that_fits(self, sets: Sequence[tuple[AllocatedPod, ...]]) -> tuple[AllocatedPod, ...] | None:
        if not sets:
            return None
        fleet, names = self._without(sets)
        reasons = explain(fleet, self._request, names, self._narrowed(names))
        return next((some for name, some in zip(names, sets, strict=True) if name not in reasons), None)

    def _without(self, sets: Sequence[Sequence[AllocatedPod]]) -> tuple[Fleet, list[str]]:
        """This node as often as there are sets, each time without one of them, and without those that must go."""
        fleet, names = Fleet(self._view.overcommit), [f"{at:06}" for at in range(len(sets))]
        for name, leaving in zip(names, sets, strict=True):
            gone = {one.uid for one in leaving}
            stay = [assigned for one in (*self._stay, *self._may_go) if one.uid not in gone for assigned in one.held]
            fleet.set_node(name, self._view.inventory, stay)
        return fleet, names

    def _narrowed(self, names: Sequence[str]) -> dict[str, Set[str]] | None:
        return None if self._only is None else dict.fromkeys(names, self._only)


def _less(headroom: Mapping[str, int], gone: Sequence[AllocatedPod]) -> Mapping[str, int]:
    """What is left of it when these are gone."""
    counts = Counter(budget for one in gone for budget in one.budgets)
    return (
        {**headroom, **{name: headroom.get(name, 0) - count for name, count in counts.items()}} if counts else headroom
    )
