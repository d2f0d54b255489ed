"""Which pods are like one another, by namespace and labels: whom a pod that spreads counts.

Of pods that ask for GPUs and are not leaving. Many pods have the same labels, so they are kept by label set: a selector is tried on few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from extender.claims import Claims
from kube.objects import Pod, Selector

_Labels: TypeAlias = frozenset[tuple[str, str]]

_NOBODY: Final[Mapping[_Labels, set[str]]] = {}


class Peers:
    """By pod UID."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[_Labels, set[str]]] = {}
        self._places: dict[str, tuple[str, _Labels]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def see(self, pod: Pod) -> None:
        """A pod came or changed."""
        if pod.metadata.deletion_timestamp or not (pod.spec.containers or pod.spec.init_containers):
            self.forget(pod.uid)
            return
        place = pod.metadata.namespace, frozenset((pod.metadata.labels or {}).items())
        if self._places.get(pod.uid) != place:
            self.forget(pod.uid)
            self._places[pod.uid] = place
            self._by_namespace.setdefault(place[0], {}).setdefault(place[1], set()).add(pod.uid)

    def forget(self, uid: str) -> None:
        """A pod is gone, or going."""
        place = self._places.pop(uid, None)
        if place is None:
            return
        namespace, labels = place
        alike = self._by_namespace[namespace]
        alike[labels].discard(uid)
        if not alike[labels]:
            del alike[labels]
        if not alike:
            del self._by_namespace[namespace]

    def count(self, namespace: str, selector: Selector, claims: Claims, but: str) -> Counter[str]:
        """Node -> pods there that the selector finds, those that a place is held for included; `but` is the UID of who asks."""
        found: Counter[str] = Counter()
        for uid in self._found(namespace, selector):
            claim = claims.get(uid)
            if claim is not None and uid != but:
                found[claim.node] += 1
        return found

    def _found(self, namespace: str, selector: Selector) -> Iterator[str]:
        for labels, uids in self._by_namespace.get(namespace, _NOBODY).items():
            if selector.matches(dict(labels)):
                yield from uids
