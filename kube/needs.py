"""What a pod must find on a node beside resources: node selector, required node affinity and taints, as kube-scheduler judges them.

Judges exactly or not at all. A pod that has anything else which may keep it off a node (other pods near or far, spreading, PersistentVolumeClaims,
host ports, devices, gates, another resource) has no `Needs`: only the scheduler can decide where it may go.
Sources: pkg/scheduler/framework/plugins/{nodeaffinity,tainttoleration,nodeunschedulable} of Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kube.objects import Affinity, Container, Needs, NodeAffinity, Pod, PodSpec
from kube.pod_parts import ContainerPort, Volume
from kube.pod_requests import pending_pod_requests
from vgpu.scheduling.nodes.constraints import REPELS, Taint

OPERATORS: Final = frozenset({"In", "NotIn", "Exists", "DoesNotExist"})
"""Those that `Requirement` judges. Gt and Lt, which are rarely used, are left to the scheduler."""

CORDONED: Final = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
"""An unschedulable node takes pods that tolerate this."""

PLAIN: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources of others that every node has. The scheduler checks whether there is enough of them."""


class _Affinity(Affinity, frozen=True):
    pod_affinity: dict[str, Any] | None = None
    pod_anti_affinity: dict[str, Any] | None = None


class WholeContainer(Container, frozen=True):
    """A container, with its ports."""

    ports: tuple[ContainerPort, ...] = ()


class WholeSpec(PodSpec, frozen=True):
    """A pod's spec, with every field that restricts its nodes."""

    containers: tuple[WholeContainer, ...] = ()
    init_containers: tuple[WholeContainer, ...] = ()
    affinity: _Affinity | None = None
    volumes: tuple[Volume, ...] = ()
    scheduling_gates: tuple[Any, ...] = ()
    resource_claims: tuple[Any, ...] = ()
    workload_ref: Any = None


class WholePod(Pod, frozen=True):
    """A pod, read for `needs_of`."""

    spec: WholeSpec = WholeSpec()


def needs_of(spec: WholeSpec, ours: Callable[[str], bool]) -> Needs | None:
    """None when more than labels, taints and plain resources may keep the pod off a node. `ours` knows Tangram's resources."""
    affinity = spec.affinity or _Affinity()
    nodes = affinity.node_affinity or NodeAffinity()
    containers = (*spec.containers, *spec.init_containers)
    beyond = (
        affinity.pod_affinity, affinity.pod_anti_affinity, nodes.preferred, spec.topology_spread_constraints,
        spec.scheduling_gates, spec.resource_claims, spec.scheduling_group, spec.workload_ref,
        [one for one in spec.volumes if one.persistent_volume_claim or one.ephemeral],
        [port for one in containers for port in one.ports if port.host_port],
        [name for name in pending_pod_requests(spec) if name not in PLAIN and not ours(name)],
    )  # fmt: skip
    if any(beyond):
        return None
    terms = None
    if nodes.required is not None:
        found = nodes.required.node_selector_terms
        conditions = [one for term in found for one in term.match_expressions]
        if any(term.match_fields for term in found) or any(one.operator not in OPERATORS for one in conditions):
            return None
        terms = tuple(term.match_expressions for term in found)
    return Needs(tuple(sorted((spec.node_selector or {}).items())), terms, spec.tolerations)


def suits(needs: Needs, labels: Mapping[str, str], taints: Sequence[Taint], *, unschedulable: bool) -> bool:
    """May the pod go to a node with these labels and taints?"""
    if any(labels.get(key) != value for key, value in needs.labels):
        return False
    if needs.terms is not None and not any(term and all(one.matches(labels) for one in term) for term in needs.terms):
        return False
    against = [one for one in taints if one.effect in REPELS]
    if unschedulable:
        against.append(CORDONED)
    return all(any(one.tolerates(taint) for one in needs.tolerations) for taint in against)
