"""Choose Workloads to evict as a whole, so that one pod fits: all their pods on all nodes, or none.

Pure. A Workload costs what all its pods cost together (`eviction_cost`), wherever they are; beside it single pods of the node may
have to be evicted. The caller determines which single pods those are when some Workloads are gone.

What is guaranteed
    With up to `EXACT` Workloads on a node the answer there is the least; with more, one of which no Workload could stay.
    No pod is evicted against a disruption budget: a queue that ends a Workload does not heed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from vgpu.scheduling.victims.eligibility import AllocatedPod
from vgpu.scheduling.victims.eviction_cost import Cost, cost_of, violations_of
from vgpu.scheduling.victims.node_search import Eviction

Bound = tuple[int, int, int, int, int]
"""The first parts of a cost: they do not get less when a set grows."""

EXACT: Final = 4
"""Each of their 15 sets may have to be tried, of a millisecond each."""


@dataclass(frozen=True, slots=True)
class BoundWorkload:
    """A Workload with pods that are bound."""

    key: str
    """`namespace/name`."""
    pods: tuple[AllocatedPod, ...]
    """On all nodes, also those without a GPU."""
    uid: str = ""
    """Another Workload may come to have its name."""

    @property
    def uids(self) -> frozenset[str]:
        """Of its pods."""
        return frozenset(one.uid for one in self.pods)

    def may_go(self, priority: int, headroom: Mapping[str, int]) -> bool:
        """May it be evicted for a pod of this priority? `headroom`: budget -> evictions that it still allows."""
        lower = all(one.may_be_evicted_for(priority) for one in self.pods)
        return lower and not violations_of(self.pods, headroom)


@dataclass(frozen=True, slots=True)
class WorkloadEviction:
    """Which Workloads to evict, and which single pods of the node."""

    workloads: tuple[BoundWorkload, ...]
    singles: Eviction
    """Single pods of the node, and where the pod would go."""
    cost: Cost
    """Of all of them."""


Suffices = Callable[[frozenset[str]], "tuple[Eviction, Sequence[AllocatedPod]] | None"]
"""UIDs that are gone -> the least set of single pods that has to be evicted, too; None: none makes the pod fit."""


def least_workload_eviction(
    node: str,
    workloads: Iterable[BoundWorkload],
    suffices: Suffices,
    priority: int,
    headroom: Mapping[str, int],
    below: Cost | None = None,
) -> Iterator[WorkloadEviction | None]:
    """Search one node, and yield the best so far after each step, which calls `suffices` twice at most; it costs less than `below`.

    `workloads`: those with a pod that has something on the node. `priority`: of the pod that is to fit.
    """
    may_go = sorted((one for one in workloads if one.may_go(priority, headroom)), key=lambda one: one.key)
    best: WorkloadEviction | None = None
    limit = below
    for some in _sets(may_go, suffices):
        found = _tried(node, some, suffices, headroom, limit) if some is not None else None
        if found is not None:
            best, limit = found, found.cost
        yield best


def least_cost(
    node: str, workloads: Iterable[BoundWorkload], priority: int, headroom: Mapping[str, int]
) -> Bound | None:
    """No set of these Workloads that may go for a pod of this priority costs less. None: none of them may."""
    costs = [cost_of(node, one.pods, headroom)[:5] for one in workloads if one.may_go(priority, headroom)]
    return min(costs, default=None)


def _sets(workloads: Sequence[BoundWorkload], suffices: Suffices) -> Iterator[Sequence[BoundWorkload] | None]:
    """Those worth a try; None after a step that found none yet."""
    if len(workloads) <= EXACT:
        for count in range(1, len(workloads) + 1):
            yield from combinations(workloads, count)
        return
    left = sorted(workloads, key=lambda one: cost_of("", one.pods, {}), reverse=True)
    if suffices(_gone(left)) is None:
        return
    for one in list(left):  # the dearest first
        rest = [other for other in left if other is not one]
        if rest and suffices(_gone(rest)) is not None:
            left = rest
        yield None
    yield left


def _tried(
    node: str, some: Sequence[BoundWorkload], suffices: Suffices, headroom: Mapping[str, int], limit: Cost | None
) -> WorkloadEviction | None:
    """This set with what must go beside it, if it suffices and costs less than the limit."""
    pods = [pod for one in some for pod in one.pods]
    if limit is not None and cost_of(node, pods, headroom)[:5] > limit[:5]:
        return None
    found = suffices(_gone(some))
    if found is None:
        return None
    singles, allocated_pods = found
    cost = cost_of(node, [*pods, *allocated_pods], headroom)
    if cost[0] or (limit is not None and cost >= limit):
        return None
    return WorkloadEviction(tuple(some), singles, cost)


def _gone(some: Iterable[BoundWorkload]) -> frozenset[str]:
    return frozenset[str]().union(*(one.uids for one in some))
