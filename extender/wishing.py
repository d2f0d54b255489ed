"""What a pod's spec says of the node that it would like, as `vgpu.wishes` weighs it.

Only what is soft: what a node must have, kube-scheduler has seen to before it asks us.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from extender.claims import Claims
from extender.peers import Peers
from kube.objects import NodeTerm, Pod, PodSpec, Requirement, Selector, SpreadConstraint
from vgpu.wishes import Condition, Spread, Term, Wishes

SOFT = "ScheduleAnyway"
NOTHING = Wishes()


def wishes_of(pod: Pod, peers: Peers, claims: Claims) -> Wishes:
    """A pod's wishes, and the pods that count for them now."""
    spec = pod.spec
    soft = [one for one in spec.topology_spread_constraints if one.when_unsatisfiable == SOFT and one.topology_key]
    affinity = spec.affinity.node_affinity if spec.affinity else None
    preferred = affinity.preferred if affinity else ()
    if not soft and not preferred:
        return NOTHING
    return Wishes(
        tuple(_term(one.preference, one.weight) for one in preferred),
        tuple(_spread(one, pod, peers, claims) for one in soft),
        tuple(_required(spec)) if soft else (),
    )


def _spread(constraint: SpreadConstraint, pod: Pod, peers: Peers, claims: Claims) -> Spread:
    selector = _selector(constraint, pod.metadata.labels or {})
    counted = peers.count(pod.metadata.namespace, selector, claims, pod.uid) if selector else {}
    honors = constraint.node_affinity_policy != "Ignore"
    return Spread(constraint.topology_key, counted, constraint.max_skew, honors)


def _selector(constraint: SpreadConstraint, labels: dict[str, str]) -> Selector | None:
    """Whom the constraint counts; None is nobody. Of `matchLabelKeys` the pod's own values must be there too."""
    selector = constraint.label_selector
    if selector is None:
        return None
    own = tuple(Requirement(key, "In", (labels[key],)) for key in constraint.match_label_keys if key in labels)
    return msgspec.structs.replace(selector, match_expressions=(*selector.match_expressions, *own))


def _required(spec: PodSpec) -> Iterator[tuple[Term, ...]]:
    if spec.node_selector:
        yield (Term(tuple(Condition(key, "In", (value,)) for key, value in spec.node_selector.items())),)
    affinity = spec.affinity.node_affinity if spec.affinity else None
    if affinity and affinity.required:
        yield tuple(_term(one) for one in affinity.required.node_selector_terms)


def _term(term: NodeTerm, weight: int = 0) -> Term:
    return Term((*_conditions(term.match_expressions), *_conditions(term.match_fields, by_name=True)), weight)


def _conditions(requirements: Iterable[Requirement], *, by_name: bool = False) -> Iterator[Condition]:
    for one in requirements:
        yield Condition(one.key, one.operator, one.values, by_name)
