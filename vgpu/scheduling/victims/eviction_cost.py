"""What it costs to evict some pods of a node.

Costs are ordered, the first of these that differs decides
    1. fewest evictions beyond what disruption budgets allow
    2. fewest latency-critical pods, then fewest standard ones: best-effort pods go first
    3. lowest highest priority
    4. fewest pods
    5. youngest: the oldest of one set started after the oldest of the other, then the second oldest, and so on
    6. smallest name of the node, then of the pods

Each of the first four never falls when a set grows and one of them rises, so no pod of the least set could stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import TypeAlias

from vgpu.api.names import CLASSES
from vgpu.scheduling.victims.eligibility import LOWEST, AllocatedPod

Cost: TypeAlias = tuple[int, int, int, int, int, tuple[int, ...], str, tuple[str, ...]]
"""The order above, as it compares."""


def cost_of(node: str, evicted: Collection[AllocatedPod], headroom: Mapping[str, int]) -> Cost:
    """What a set costs. `headroom`: budget -> evictions that it still allows; one that is not named allows none."""
    classes = Counter(one.service_class for one in evicted)
    return (
        violations_of(evicted, headroom),
        classes[CLASSES[0]],
        classes[CLASSES[1]],
        max((one.priority for one in evicted), default=LOWEST),
        len(evicted),
        tuple(-started for started in sorted(one.started for one in evicted)),
        node,
        tuple(sorted(one.uid for one in evicted)),
    )


def violations_of(evicted: Iterable[AllocatedPod], headroom: Mapping[str, int]) -> int:
    """Evictions beyond what budgets allow. A pod in several budgets counts in each."""
    return beyond((one.budgets for one in evicted), headroom)


def beyond(budgets: Iterable[Iterable[str]], headroom: Mapping[str, int]) -> int:
    """The same, of the budgets that each pod counts in."""
    counts = Counter(chain.from_iterable(budgets))
    return sum(max(0, count - max(0, headroom.get(budget, 0))) for budget, count in counts.items())


def violates_surely(one: AllocatedPod, headroom: Mapping[str, int]) -> bool:
    """Does its eviction alone go beyond what a budget allows?"""
    return any(headroom.get(budget, 0) <= 0 for budget in one.budgets)
