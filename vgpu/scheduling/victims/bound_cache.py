"""What the cheapest set on each node costs at least, whatever else a search requires there: kept with the node's view.

A bound of `bounds` follows from the view, the request, the preemptor's priority and the budgets that allow no eviction. What else applies on
a node (`EvictionTerms`, GPUs to which the pod is restricted) only leaves out sets, so these bounds stay below the costs, unless pods end by themselves.
Searches for pods of one template therefore find them ready, but for nodes that changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Final

from vgpu.api.request import PodRequest
from vgpu.scheduling.victims.bounds import Bound, EvictionRules, lower_bounds
from vgpu.scheduling.victims.node import NodeView

KEPT: Final = 4
"""Bounds with each view, those that were worked out last: 300 bytes each. Guessed."""

SEARCHES: Final = 64
"""Kinds of searches that are distinguished at a time. Guessed."""


class CachedBounds:
    """For one search. The terms of `rules` are left out of account."""

    def __init__(self, request: PodRequest, rules: EvictionRules) -> None:
        self._request, self._rules = request, replace(rules, terms={})
        self._kind = _kind(request, rules.priority, rules.violate)
        self._allow = frozenset(budget for budget, left in rules.headroom.items() if left > 0)

    def of(self, views: Iterable[NodeView]) -> list[tuple[Bound, NodeView]]:
        """Of those nodes where a set may suffice."""
        known, others = list[tuple[Bound, NodeView]](), list[NodeView]()
        for view in views:
            key = self._kind, view.budgets - self._allow
            if key not in view.bounds:
                others.append(view)
            elif (bound := view.bounds[key]) is not None:
                known.append((bound, view))
        found = lower_bounds(others, self._request, self._rules, {})
        by_name = {view.name: bound for bound, view in found}
        for view in others:
            if len(view.bounds) >= KEPT:
                del view.bounds[next(iter(view.bounds))]
            view.bounds[self._kind, view.budgets - self._allow] = by_name.get(view.name)
        return known + found


@lru_cache(SEARCHES)
def _kind(_request: PodRequest, _priority: int, _violate: bool) -> object:
    """The same object for the same search: compared by identity, a thousand times a search."""
    return object()
