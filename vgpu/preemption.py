"""Choose whom to evict so that one pod fits.

Pure, as `placement` is: it reads who holds what (`NodeView`), and answers the least set of pods on one node whose leaving makes the
ask fit, or None. It evicts nobody and knows no Kubernetes. What least means stands in `holder`.

How it is kept short
    What the least set of each node costs at least is known by sums, of many nodes at once (`victim_bounds`). Nodes are searched in that order, until the
    best set found costs no more than any that is left could. A search goes in steps of a few milliseconds: whoever makes them may stop
    between two, and has the best answer so far.

What is promised
    Of a pod that asks for a share of one card, or for one whole card, the sets are tried card by card, of others node by node. Up to `EXACT` pods
    that may go (`EXACT_OTHERS` for several containers or MIG instances), the answer is the least set; with more on one card (or node) it is one of which no pod can be spared,
    and near the least (`victim_sets`). Where pods on one card free too little of what is not a GPU, pods on others join them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import chain, islice
from typing import Final

from vgpu.names import DEFAULT_POLICY
from vgpu.node_search import Eviction, NodeSearch
from vgpu.node_view import NodeView
from vgpu.request import PodAsk
from vgpu.victim_bounds import Bound, Rules, lower_bounds

TOGETHER: Final = 16
"""Nodes whose bounds are worked out at once: 1 ms (measured)."""


class Search:
    """For the least set on one of the candidates. `view` answers what there is on a node, None for a node that is not known."""

    def __init__(
        self,
        ask: PodAsk,
        candidates: Iterable[str],
        view: Callable[[str], NodeView | None],
        rules: Rules,
        only: Mapping[str, Set[str]] | None = None,
    ) -> None:
        self._ask = replace(ask, policy=DEFAULT_POLICY)
        self._candidates, self._view, self.rules, self._only = candidates, view, rules, only or {}
        self._left: list[tuple[Bound, NodeView]] = []
        self.best: Eviction | None = None
        """So far: whole, whenever the search stops."""
        self.seen: NodeView | None = None
        """The node of the best, as it was then."""
        self.searched = 0
        """Nodes that bounds did not rule out."""

    def steps(self) -> Iterator[None]:
        """Search, and yield every few milliseconds."""
        for some in _chunks(self._candidates, TOGETHER):
            views = list[NodeView]()
            for name in some:
                if (known := self._view(name)) is not None:
                    views.append(known)
                yield
            for bound, known in lower_bounds(views, self._ask, self.rules, self._only):
                heapq.heappush(self._left, (bound, known))
            yield
            if self.best is None:
                yield from self._next()
        while self._left:
            yield from self._next()

    def whole(self) -> Eviction | None:
        """All steps in one go, for few nodes. Answers the best."""
        for _ in self.steps():
            pass
        return self.best

    def _next(self) -> Iterator[None]:
        """Search the node that promises most, if it promises more than the best has; if not, none does."""
        if not self._left:
            return
        bound, view = self._left[0]
        if self.best is not None and bound >= self.best.cost[:-1]:
            self._left.clear()
            return
        heapq.heappop(self._left)
        self.searched += 1
        found = yield from NodeSearch(view, self._ask, self.rules, self._only.get(view.name), bound).least()
        if found is not None and (self.best is None or found.cost < self.best.cost):
            self.best, self.seen = found, view


def least_eviction(
    ask: PodAsk,
    candidates: Iterable[str],
    view: Callable[[str], NodeView | None],
    rules: Rules,
    only: Mapping[str, Set[str]] | None = None,
) -> Eviction | None:
    """The same in one go, for few nodes."""
    return Search(ask, candidates, view, rules, only).whole()


def _chunks(items: Iterable[str], size: int) -> Iterator[Iterator[str]]:
    """So many at a time, and none before it is asked for."""
    rest = _each_once(items)
    for first in rest:
        yield chain([first], islice(rest, size - 1))


def _each_once(items: Iterable[str]) -> Iterator[str]:
    seen = set[str]()
    for one in items:
        if one not in seen:
            seen.add(one)
            yield one
