"""Choose the pods to evict so that one pod fits.

Pure, as `placement` is: it reads which pod has what (`NodeView`), and answers the least set of pods on one node whose leaving makes the
request fit, or None. It evicts no pod and knows no Kubernetes. `eviction_cost` defines which set is least.

How it is kept short
    What the least set of each node costs at least is known by sums, of many nodes at once (`bounds`). Nodes are searched in that order, until the
    best set found costs no more than any that is left could. A search goes in steps of a few milliseconds: the caller may stop
    between two, and has the best answer so far.

What is guaranteed
    Of a pod that requests a share of one GPU, or for one whole GPU, the sets are tried GPU by GPU, of others node by node. Up to `EXACT` pods
    that may go (`EXACT_OTHERS` for several containers or MIG instances), the answer is the least set; with more on one GPU (or node) it is one of which no pod could stay,
    and near the least (`sets`). Where pods on one GPU free too little of what is not a GPU, pods on others join them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import chain, islice
from typing import Final

from vgpu.api.names import DEFAULT_POLICY
from vgpu.api.request import PodRequest
from vgpu.scheduling.victims.bound_cache import CachedBounds
from vgpu.scheduling.victims.bounds import Bound, EvictionRules, EvictionTerms, lower_bounds
from vgpu.scheduling.victims.node import NodeView
from vgpu.scheduling.victims.node_search import Eviction, NodeSearch

TOGETHER: Final = 16
"""Nodes whose bounds are worked out at once: 1 ms (measured)."""


class VictimSearch:
    """For the least set on one of the candidates. `view` answers what there is on a node, None for a node that is not known.

    `terms` answers what else applies on a node, None where no pod may be evicted; it is called only for nodes with reservations, and its answers
    are added to those of the rules. `apart`: nodes where terms may name pods that end by themselves.
    """

    def __init__(
        self,
        request: PodRequest,
        candidates: Iterable[str],
        view: Callable[[str], NodeView | None],
        rules: EvictionRules,
        only: Mapping[str, Set[str]] | None = None,
        *,
        terms: Callable[[str], EvictionTerms | None] | None = None,
        apart: Set[str] = frozenset(),
    ) -> None:
        self._request = replace(request, policy=DEFAULT_POLICY)
        self._candidates, self._view, self._only = candidates, view, only or {}
        self._known_terms = dict(rules.terms)
        self.rules = replace(rules, terms=self._known_terms)
        self._terms, self._apart = terms, apart
        self._rough = CachedBounds(self._request, rules)
        self._left: list[tuple[Bound, NodeView, bool]] = []
        """Nodes by what a set there costs at least; whether terms are counted, too."""
        self.best: Eviction | None = None
        """So far: whole, whenever the search stops."""
        self.seen: NodeView | None = None
        """The node of the best, as it was then."""
        self.searched = 0
        """Nodes that bounds did not rule out."""

    def steps(self) -> Iterator[None]:
        """Search, and yield every few milliseconds."""
        for some in _chunks(self._candidates, TOGETHER):
            views, apart = list[NodeView](), list[str]()
            for name in some:
                if self._terms is None or name in self._apart:
                    apart.append(name)
                elif (known := self._view(name)) is not None:
                    views.append(known)
                yield
            for bound, known in self._rough.of(views):
                heapq.heappush(self._left, (bound, known, False))
            yield from self._count_terms(apart)
            if self.best is None:
                yield from self._next()
        while self._left:
            yield from self._next()

    def whole(self) -> Eviction | None:
        """All steps in one go, for few nodes. Returns the best."""
        for _ in self.steps():
            pass
        return self.best

    def _count_terms(self, nodes: Iterable[str]) -> Iterator[None]:
        """The bounds of these nodes, with all that applies there."""
        views = list[NodeView]()
        for name in nodes:
            if self._terms is not None:
                terms = self._terms(name)
                if terms is None:
                    continue
                self._known_terms[name] = terms
            if (known := self._view(name)) is not None:
                views.append(known)
            yield
        for bound, known in lower_bounds(views, self._request, self.rules, self._only):
            heapq.heappush(self._left, (bound, known, True))
        yield

    def _next(self) -> Iterator[None]:
        """Search the node with the least bound, if it is below the cost of the best set; if not, no node is."""
        while rough := list(self._roughly_first()):
            yield from self._count_terms(rough)
        if not self._promises():
            self._left.clear()
            return
        bound, view, _ = heapq.heappop(self._left)
        self.searched += 1
        found = yield from NodeSearch(view, self._request, self.rules, self._only.get(view.name), bound).least()
        if found is not None and (self.best is None or found.cost < self.best.cost):
            self.best, self.seen = found, view

    def _promises(self) -> bool:
        """May any node that is left have a cheaper set than the best?"""
        return bool(self._left) and (self.best is None or self._left[0][0] < self.best.cost[:-1])

    def _roughly_first(self) -> Iterator[str]:
        """Take out the nodes with the lowest bounds, as long as their terms are not counted; so many as bounds are worked out of at once."""
        for _ in range(TOGETHER):
            if not self._promises() or self._left[0][2]:
                return
            yield heapq.heappop(self._left)[1].name


def least_eviction(
    request: PodRequest,
    candidates: Iterable[str],
    view: Callable[[str], NodeView | None],
    rules: EvictionRules,
    only: Mapping[str, Set[str]] | None = None,
) -> Eviction | None:
    """The same in one go, for few nodes."""
    return VictimSearch(request, candidates, view, rules, only).whole()


def _chunks(items: Iterable[str], size: int) -> Iterator[Iterator[str]]:
    """So many at a time, and none before it is requested."""
    rest = _each_once(items)
    for first in rest:
        yield chain([first], islice(rest, size - 1))


def _each_once(items: Iterable[str]) -> Iterator[str]:
    seen = set[str]()
    for one in items:
        if one not in seen:
            seen.add(one)
            yield one
