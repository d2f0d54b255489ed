"""PodDisruptionBudgets for evictions: which ones a pod counts in, and how many evictions each still allows.

A pod is compared only with the budgets of its namespace that name one of its labels, or none: with 2,000 in a cluster, with a few.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from kube.objects import Pod, PodDisruptionBudget
from vgpu.scheduling.victims.eviction_cost import beyond

_Label: TypeAlias = tuple[str, str]
"""Key and value; both empty for a budget that requires no value of any label."""

NO_LABEL: Final = ("", "")
NONE: Final = frozenset[str]()


class DisruptionBudgets:
    """The watch reports each to `changed`."""

    def __init__(self) -> None:
        self._by_label: dict[str, dict[_Label, dict[str, PodDisruptionBudget]]] = {}
        """By namespace."""
        self._headroom: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self.changes = 0
        """How often the pods that any budget counts may have changed."""

    def __len__(self) -> int:
        return len(self._headroom)

    def changed(self, old: PodDisruptionBudget | None, new: PodDisruptionBudget | None) -> None:
        """A budget was added, changed or removed."""
        for one in (old, new):
            if one is not None and (old is None or new is None or _counted(old) != _counted(new)):
                namespace = one.metadata.namespace
                self._versions[namespace] = self.version(namespace) + 1
                self.changes += 1
        if old is not None:
            self._leave(old)
            self._headroom.pop(old.key, None)
        if new is not None:
            by_label = self._by_label.setdefault(new.metadata.namespace, {})
            by_label.setdefault(_label(new), {})[new.key] = new
            self._headroom[new.key] = new.status.disruptions_allowed

    def _leave(self, old: PodDisruptionBudget) -> None:
        namespace, label = old.metadata.namespace, _label(old)
        by_label = self._by_label.get(namespace, {})
        by_label.get(label, {}).pop(old.key, None)
        if not by_label.get(label):
            by_label.pop(label, None)
        if not by_label:
            self._by_label.pop(namespace, None)

    def version(self, namespace: str) -> int:
        """Another number whenever pods there may count in other budgets than before."""
        return self._versions.get(namespace, 0)

    def of(self, pod: Pod) -> frozenset[str]:
        """Those that an eviction of this pod counts in, by key."""
        by_label = self._by_label.get(pod.metadata.namespace)
        if by_label is None:
            return NONE
        return frozenset(
            key
            for label in (NO_LABEL, *(pod.metadata.labels or {}).items())
            for key, budget in by_label.get(label, {}).items()
            if budget.counts(pod)
        )

    def violations(self, pods: Iterable[Pod]) -> int:
        """How far evictions of all these go beyond what budgets allow now."""
        return beyond(map(self.of, pods), self._headroom)

    def headroom(self) -> dict[str, int]:
        """Budget -> evictions that it allows now."""
        return dict(self._headroom)


def small_budget(budget: PodDisruptionBudget) -> PodDisruptionBudget:
    """What to keep of it in the cache."""
    meta = budget.metadata
    kept = type(meta)(meta.name, meta.namespace, meta.uid, meta.resource_version)
    return msgspec.structs.replace(budget, metadata=kept)


def _counted(budget: PodDisruptionBudget) -> object:
    """The parts of a budget that determine which pods it counts."""
    return budget.spec.selector, budget.status.disrupted_pods


def _label(budget: PodDisruptionBudget) -> _Label:
    """One that every pod has which it counts."""
    selector = budget.spec.selector
    wanted = (selector.match_labels or {}) if selector is not None else {}
    return next(iter(wanted.items()), NO_LABEL)
