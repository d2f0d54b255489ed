"""What a pod requires of its node beside free GPUs: labels, taints that it tolerates, MIG profiles.

It never decides whether a pod fits: kube-scheduler has filtered the nodes by these before. Policies read it to learn which nodes the
pods to come can use (`pools`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

REPELS: Final = frozenset({"NoSchedule", "NoExecute"})
"""Effects of a taint that keep a pod off. Specified by Kubernetes; PreferNoSchedule does not."""


@dataclass(frozen=True, slots=True, order=True)
class LabelRequirement:
    """On a label of the node, or on its name. An operator of a later release matches no node."""

    key: str
    operator: str
    values: tuple[str, ...] = ()
    by_name: bool = False
    """On the field metadata.name, the only one there is."""


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """All its conditions match. One without conditions matches no node."""

    conditions: tuple[LabelRequirement, ...]
    weight: int = 0


class Taint(msgspec.Struct, frozen=True, order=True, gc=False):
    """Of a node. Decoded as it stands in the API's objects (`kube.objects`)."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


class Toleration(msgspec.Struct, frozen=True, order=True, gc=False):
    """Of a pod, decoded as `Taint` is. Empty fields match everything, as in Kubernetes."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Does it match this taint? An operator of a later release matches none."""
        if (self.effect and self.effect != taint.effect) or (self.key and self.key != taint.key):
            return False
        return self.operator == "Exists" or (self.operator in ("", "Equal") and self.value == taint.value)


@dataclass(frozen=True, slots=True, order=True)
class NodeConstraints:
    """A node must meet all of it."""

    required: tuple[tuple[Term, ...], ...] = ()
    """Of each group one term."""
    tolerations: tuple[Toleration, ...] = ()
    """Each taint of the node that repels pods must match one of these."""
    profiles: tuple[str, ...] = ()
    """The node offers MIG instances of each."""
    shared: bool = False
    """The node has a GPU that may be shared out."""

    @property
    def keys(self) -> frozenset[str]:
        """Of labels."""
        return frozenset(one.key for group in self.required for term in group for one in term.conditions)


ANYWHERE: Final = NodeConstraints(tolerations=(Toleration(operator="Exists"),))
"""Every node will do; also what is assumed of a pod where its constraints are not known."""
