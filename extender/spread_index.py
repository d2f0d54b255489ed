"""Pods by namespace and labels: the pods that a spread constraint counts.

Of pods that request GPUs, are placed and do not terminate. Many pods have the same labels, so they are counted by label set: a selector is
tried on few. If each pod has labels of its own (a StatefulSet names its pods), only those with the selector's rarest pair are tried. The
counts of the last selectors are kept up to date, because replicas are filtered one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from extender.accounting import Accounting
from kube.objects import Pod, Selector

_Pair: TypeAlias = tuple[str, str]
_Labels: TypeAlias = frozenset[_Pair]

MOST_KEPT: Final = 16
"""Selectors per namespace whose count is kept in step: each takes 1 us when a pod there gets or loses its place. Guessed."""

_NOBODY: Final[frozenset[_Labels]] = frozenset()


@dataclass(slots=True)
class _Namespace:
    """Pods with a place there."""

    nodes: dict[_Labels, dict[str, int]] = field(default_factory=dict)
    """Label set -> node -> pods."""
    having: dict[_Pair, set[_Labels]] = field(default_factory=dict)
    """Label and value -> the label sets that have both."""
    kept: dict[object, tuple[Selector, dict[str, int]]] = field(default_factory=dict)
    """The selectors counted last, and node -> pods of each."""

    def add(self, labels: _Labels, node: str) -> None:
        """One more."""
        if labels not in self.nodes:
            self.nodes[labels] = {}
            for pair in labels:
                self.having.setdefault(pair, set()).add(labels)
        _more(self.nodes[labels], node)
        for pods in self._kept_for(labels):
            _more(pods, node)

    def take(self, labels: _Labels, node: str) -> None:
        """One less."""
        for pods in self._kept_for(labels):
            _less(pods, node)
        _less(self.nodes[labels], node)
        if not self.nodes[labels]:
            del self.nodes[labels]
            for pair in labels:
                self.having[pair].discard(labels)
                if not self.having[pair]:
                    del self.having[pair]

    def count(self, selector: Selector) -> Mapping[str, int]:
        """Node -> pods that the selector finds."""
        requested = tuple((selector.match_labels or {}).items()), selector.match_expressions
        _, pods = self.kept.pop(requested, (selector, None))
        if pods is None:
            pods = {}
            for labels in self._found(selector):
                for node, number in self.nodes[labels].items():
                    pods[node] = pods.get(node, 0) + number
        while len(self.kept) >= MOST_KEPT:
            del self.kept[next(iter(self.kept))]
        self.kept[requested] = selector, pods
        return pods

    def _kept_for(self, labels: _Labels) -> Iterator[dict[str, int]]:
        plain = dict(labels) if self.kept else {}
        return (pods for selector, pods in self.kept.values() if selector.matches(plain))

    def _found(self, selector: Selector) -> Iterable[_Labels]:
        pairs = _pairs(selector)
        among: Iterable[_Labels] = self.nodes
        if pairs:
            rarest: Set[_Labels] = min((self.having.get(pair, _NOBODY) for pair in pairs), key=len)
            among = [labels for labels in rarest if pairs <= labels] if len(pairs) > 1 else rarest
        if len(pairs) < len(selector.match_labels or ()) + len(selector.match_expressions):
            return [labels for labels in among if selector.matches(dict(labels))]
        return among


class SpreadIndex:
    """By pod UID. `allocations` give each pod's node."""

    def __init__(self, allocations: Accounting) -> None:
        self._allocations = allocations
        self._by_namespace: dict[str, _Namespace] = {}
        self._seen: dict[str, tuple[str, _Labels]] = {}
        self._at: dict[str, str] = {}
        """UID of those seen that have a place -> node."""
        allocations.on_move = self.moved

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, pod: Pod) -> None:
        """A pod came or changed."""
        if pod.metadata.deletion_timestamp or not (pod.spec.containers or pod.spec.init_containers):
            self.forget(pod.uid)
            return
        seen = pod.metadata.namespace, frozenset((pod.metadata.labels or {}).items())
        if self._seen.get(pod.uid) != seen:
            self.forget(pod.uid)
            self._seen[pod.uid] = seen
            allocation = self._allocations.place_of(pod.uid)
            self.moved(pod.uid, allocation.node if allocation is not None else "")

    def moved(self, uid: str, node: str) -> None:
        """It has a place on this node, or none."""
        seen = self._seen.get(uid)
        if seen is None:
            return
        namespace, labels = seen
        before = self._at.pop(uid, "")
        if before:
            here = self._by_namespace[namespace]
            here.take(labels, before)
            if not here.nodes:
                del self._by_namespace[namespace]
        if node:
            self._at[uid] = node
            self._by_namespace.setdefault(namespace, _Namespace()).add(labels, node)

    def forget(self, uid: str) -> None:
        """A pod is gone, or going."""
        self.moved(uid, "")
        self._seen.pop(uid, None)

    def count(self, namespace: str, selector: Selector, but: str) -> dict[str, int]:
        """Node -> pods there that the selector finds, those with a reservation included; `but` is the UID of a pod that does not count."""
        here = self._by_namespace.get(namespace)
        if here is None:
            return {}
        found = dict(here.count(selector))
        own, at = self._seen.get(but), self._at.get(but)
        if own is not None and at and own[0] == namespace and selector.matches(dict(own[1])):
            _less(found, at)
        return found


def _more(pods: dict[str, int], node: str) -> None:
    pods[node] = pods.get(node, 0) + 1


def _less(pods: dict[str, int], node: str) -> None:
    pods[node] -= 1
    if not pods[node]:
        del pods[node]


def _pairs(selector: Selector) -> _Labels:
    """What it requests to the letter: a label with one value."""
    alone = (
        (one.key, one.values[0]) for one in selector.match_expressions if one.operator == "In" and len(one.values) == 1
    )
    return frozenset((*(selector.match_labels or {}).items(), *alone))
