"""A pod's preferred constraints, as `vgpu.scheduling.preferences` weighs them.

Only preferred ones: kube-scheduler has enforced the required ones before it calls. Pods for spreading are counted when the count is first
read: most pods find no two nodes that are equally good for the GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Final

import msgspec

from extender.spread_index import SpreadIndex
from kube.objects import NodeTerm, Pod, PodSpec, Requirement, Selector, SpreadConstraint
from vgpu.scheduling.nodes.constraints import LabelRequirement, Term
from vgpu.scheduling.preferences import Preferences, Spread

SOFT = "ScheduleAnyway"
NOTHING = Preferences()

MOST_KEYS: Final = 32
"""Labels of nodes that one pod may name; terms that name more are ignored. Guessed: a label that no pod has named yet takes 0.4 ms."""


class PodsByNode(Mapping[str, int]):
    """Node -> pods, counted when they are first read."""

    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self._count = count

    @cached_property
    def _pods(self) -> Mapping[str, int]:
        return self._count()

    def __getitem__(self, node: str) -> int:
        return self._pods[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pods)

    def __len__(self) -> int:
        return len(self._pods)


def preferences_of(pod: Pod, spread_index: SpreadIndex) -> Preferences:
    """A pod's preferences, and the pods that count for them by the time that they are weighed."""
    spec = pod.spec
    soft = [one for one in spec.topology_spread_constraints if one.when_unsatisfiable == SOFT and one.topology_key]
    affinity = spec.affinity.node_affinity if spec.affinity else None
    preferred = affinity.preferred if affinity else ()
    if not soft and not preferred:
        return NOTHING
    keys = {one.topology_key for one in soft[:MOST_KEYS]}
    return Preferences(
        tuple(_few((_term(one.preference, one.weight) for one in preferred), keys)),
        tuple(_spread(one, pod, spread_index) for one in soft if one.topology_key in keys),
        tuple(group for group in required_of(spec) if len([*_few(group, keys)]) == len(group)) if soft else (),
    )


def _few(terms: Iterable[Term], keys: set[str]) -> Iterator[Term]:
    """The terms that name no more labels than a pod may. `keys`: the labels named so far."""
    for term in terms:
        more = keys.union(one.key for one in term.conditions if not one.by_name)
        if len(more) <= MOST_KEYS:
            keys |= more
            yield term


def _spread(constraint: SpreadConstraint, pod: Pod, spread_index: SpreadIndex) -> Spread:
    selector = _selector(constraint, pod.metadata.labels or {})
    counted = PodsByNode(partial(spread_index.count, pod.metadata.namespace, selector, pod.uid)) if selector else {}
    honors = constraint.node_affinity_policy != "Ignore"
    return Spread(constraint.topology_key, counted, constraint.max_skew, honors)


def _selector(constraint: SpreadConstraint, labels: dict[str, str]) -> Selector | None:
    """The pods that the constraint counts; None for none. `matchLabelKeys` also requires the pod's own values."""
    selector = constraint.label_selector
    if selector is None:
        return None
    own = tuple(Requirement(key, "In", (labels[key],)) for key in constraint.match_label_keys if key in labels)
    return msgspec.structs.replace(selector, match_expressions=(*selector.match_expressions, *own))


def required_of(spec: PodSpec) -> Iterator[tuple[Term, ...]]:
    """What a pod's node must have: of each group one term."""
    if spec.node_selector:
        yield (Term(tuple(LabelRequirement(key, "In", (value,)) for key, value in spec.node_selector.items())),)
    affinity = spec.affinity.node_affinity if spec.affinity else None
    if affinity and affinity.required:
        yield tuple(_term(one) for one in affinity.required.node_selector_terms)


def _term(term: NodeTerm, weight: int = 0) -> Term:
    return Term((*_conditions(term.match_expressions), *_conditions(term.match_fields, by_name=True)), weight)


def _conditions(requirements: Iterable[Requirement], *, by_name: bool = False) -> Iterator[LabelRequirement]:
    for one in requirements:
        yield LabelRequirement(one.key, one.operator, one.values, by_name)
