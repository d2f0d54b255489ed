"""Required constraints of pods, and the taints of nodes, as `vgpu.scheduling.nodes.constraints` represents them."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from extender.preferences import required_of
from kube.objects import PodSpec
from vgpu.scheduling.demand.pools import PASSING
from vgpu.scheduling.nodes.constraints import ANYWHERE, REPELS, NodeConstraints

MOST_CONDITIONS: Final = 32
"""Of one pod. A pod with more counts as one that can use every node. Guessed: each takes 20 us for 10,000 nodes."""
MOST_VALUES: Final = 256
"""In the conditions of one pod together, likewise."""
MOST_TOLERATIONS: Final = 64
"""Of one pod, likewise."""
PLAIN: Final = NodeConstraints()
TEMPLATES: Final = 1024
"""Whose constraints are kept once for all pods. Guessed."""


def constraints_of(spec: PodSpec) -> NodeConstraints:
    """The same object for pods that require the same. Tolerations of a node's condition, which every pod has, are left out."""
    tolerations = {
        one for one in spec.tolerations if not one.key.startswith(PASSING) and (not one.effect or one.effect in REPELS)
    }
    if not (tolerations or spec.node_selector or spec.affinity):
        return PLAIN  # most pods
    required = tuple(required_of(spec))
    conditions = [one for group in required for term in group for one in term.conditions]
    values = sum(len(one.values) for one in conditions)
    if len(conditions) > MOST_CONDITIONS or values > MOST_VALUES or len(tolerations) > MOST_TOLERATIONS:
        return ANYWHERE
    return _one_for_all(NodeConstraints(required, tuple(sorted(tolerations))))


@lru_cache(TEMPLATES)
def _one_for_all(constraints: NodeConstraints) -> NodeConstraints:
    return constraints
