"""A pod with GPUs on a node, and what it costs to evict some of them.

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
from typing import Final, TypeAlias

import msgspec

from vgpu.api.grant import Slice
from vgpu.api.names import CLASSES

UNSTARTED: Final = 10**14
"""Later than any time of four digits a year: who has not started is the youngest."""

LOWEST: Final = -(2**31)
"""No pod has a lower priority."""

MOST: Final = 2**46
"""Amounts of a resource that are distinguished: 64 TiB of memory. What is more counts as so much, so that sums of pods stay exact."""

PODS: Final = "pods"
"""The resource of which each pod has one: a node runs so many (core/v1, ResourcePods)."""

Cost: TypeAlias = tuple[int, int, int, int, int, tuple[int, ...], str, tuple[str, ...]]
"""The order above, as it compares."""


class AllocatedPod(msgspec.Struct, frozen=True, gc=False):
    """A pod with GPUs on a node. Thousands are made at once: a dataclass takes seven times as long."""

    uid: str
    held: tuple[Slice, ...]
    priority: int = 0
    service_class: str = "standard"
    started: int = UNSTARTED
    """When (`started_at`)."""
    budgets: frozenset[str] = frozenset()
    """Disruption budgets that it counts in."""
    protected: bool = False
    """Never to be evicted: it leaves already, is only promised its place, was evicted too often lately, or is part of a whole (a queue's)."""
    requests: dict[str, int] = {}
    """What its end frees of each resource (`kube.pod_requests`)."""

    def may_be_evicted_for(self, priority: int) -> bool:
        """May a pod of this priority evict it? A service class gives no right to evict: only the priority counts."""
        return not self.protected and self.priority < priority

    def frees(self, resource: str) -> int:
        """What its end frees of a resource, as far as amounts are distinguished."""
        return 1 if resource == PODS else min(MOST, self.requests.get(resource, 0))


def started_at(text: str) -> int:
    """RFC 3339 in UTC, to the second, as a number that compares: YYYYMMDDhhmmss. `UNSTARTED` for an empty text."""
    digits = text[:4] + text[5:7] + text[8:10] + text[11:13] + text[14:16] + text[17:19]
    if text[4:17:3] != "--T::" or not (digits.isascii() and digits.isdigit()):  # not as Kubernetes writes it
        digits = "".join(letter for letter in text[:19] if letter.isascii() and letter.isdigit())
    return int(digits) if digits else UNSTARTED


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
