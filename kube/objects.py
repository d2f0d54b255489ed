"""The parts of Kubernetes objects that Tangram reads. What is not named here is skipped while decoding.

Frozen structs with Kubernetes' own field names in snake case; a field that may be missing has the zero value that the API means by
leaving it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from vgpu.scheduling.nodes.constraints import NodeConstraints, Taint, Toleration


class Slim(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """Base of all: decodes camelCase, encodes only what is set."""


def key_of(namespace: str, name: str) -> str:
    """`namespace/name`, or `name` where there are no namespaces."""
    return f"{namespace}/{name}" if namespace else name


class OwnerReference(Slim, frozen=True):
    """Whose object this is."""

    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False
    api_version: str = ""
    """Group and version of the kind, as `batch/v1`."""


class Metadata(Slim, frozen=True):
    """ObjectMeta."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def key(self) -> str:
        """`namespace/name`, or `name` where there are no namespaces."""
        return key_of(self.namespace, self.name)

    def annotation(self, key: str) -> str | None:
        """The value of an annotation, None when it is not there."""
        return self.annotations.get(key) if self.annotations else None


Amounts: TypeAlias = dict[str, str | int | float]
"""ResourceList. Quantities as they were written: text, or a bare number."""


class Resources(Slim, frozen=True):
    """ResourceRequirements."""

    limits: Amounts | None = None
    requests: Amounts | None = None


class Container(Slim, frozen=True):
    """A container of a pod's spec. Init containers with restartPolicy Always are native sidecars."""

    name: str = ""
    resources: Resources = Resources()
    restart_policy: str | None = None


class Selector(Slim, frozen=True):
    """LabelSelector. An empty one matches everything."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Does it select an object with these labels?"""
        wanted = (self.match_labels or {}).items()
        return all(labels.get(key) == value for key, value in wanted) and all(
            one.matches(labels) for one in self.match_expressions
        )


class NodeTerm(Slim, frozen=True):
    """NodeSelectorTerm. All of it must match; an empty one matches no node."""

    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class PreferredTerm(Slim, frozen=True):
    """PreferredSchedulingTerm."""

    weight: int = 0
    preference: NodeTerm = NodeTerm()


class NodeSelector(Slim, frozen=True):
    """One of its terms must match."""

    node_selector_terms: tuple[NodeTerm, ...] = ()


class NodeAffinity(Slim, frozen=True):
    """Which nodes a pod requires, and which it prefers."""

    required: NodeSelector | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)
    preferred: tuple[PreferredTerm, ...] = msgspec.field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=()
    )


class Affinity(Slim, frozen=True):
    """Affinity, as far as it is about nodes."""

    node_affinity: NodeAffinity | None = None


class SpreadConstraint(Slim, frozen=True):
    """TopologySpreadConstraint."""

    max_skew: int = 1
    topology_key: str = ""
    when_unsatisfiable: str = ""
    label_selector: Selector | None = None
    match_label_keys: tuple[str, ...] = ()
    node_affinity_policy: str = "Honor"


class Requirement(Slim, frozen=True):
    """LabelSelectorRequirement."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Does it match these labels? An operator of a later release matches none."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case _:
                return False


class Needs(Slim, frozen=True):
    """What a pod must find on a node beside resources, where labels and taints decide all of it."""

    labels: tuple[tuple[str, str], ...] = ()
    """All of these."""
    terms: tuple[tuple[Requirement, ...], ...] | None = None
    """All of one of these; None: no such condition."""
    tolerations: tuple[Toleration, ...] = ()


class SchedulingGroup(Slim, frozen=True):
    """PodSchedulingGroup: the PodGroup that a pod is scheduled with."""

    pod_group_name: str = ""


class PodSpec(Slim, frozen=True):
    """What of a pod's spec matters for GPUs."""

    node_name: str = ""
    scheduler_name: str = ""
    priority: int | None = None
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    preemption_policy: str = ""
    """`Never`: it waits ahead of pods of lower priority and evicts none."""
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    topology_spread_constraints: tuple[SpreadConstraint, ...] = ()
    scheduling_group: SchedulingGroup | None = None
    resources: Resources | None = None
    """Of the pod as a whole, in place of its containers'."""
    overhead: Amounts | None = None
    """What its RuntimeClass takes beside its containers."""
    requests: dict[str, int] | None = None
    """Not Kubernetes' own: of a pod that is kept small, what it requests altogether (`kube.pod_requests`)."""
    tolerations: tuple[Toleration, ...] = ()
    constraints: NodeConstraints | None = None
    """Not Kubernetes' own: of a pod that is kept small, what it requires of its node, for policies. None: not known."""
    needs: Needs | None = None
    """Not Kubernetes' own: of a pod that waits, what it must find on a node (`kube.needs`). None: not known."""


class Condition(Slim, frozen=True):
    """One condition of a pod or node."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class ContainerStatus(Slim, frozen=True):
    """How far one container of a pod is."""

    name: str = ""
    container_id: str = msgspec.field(name="containerID", default="")
    """`<runtime>://<ID>` of the last one that was made; empty before that."""
    allocated_resources: Amounts | None = None
    """What the node has allocated to it, also where a resize has not reached it yet."""
    resources: Resources | None = None
    """What it really has."""


class PodStatus(Slim, frozen=True):
    """How far a pod is."""

    phase: str = ""
    start_time: str | None = None
    nominated_node_name: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    allocated_resources: Amounts | None = None
    """Of the pod as a whole, as `ContainerStatus` has them."""
    resources: Resources | None = None


class Pod(Slim, frozen=True):
    """A pod."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return self.metadata.key

    @property
    def uid(self) -> str:
        """Never used twice, unlike the name."""
        return self.metadata.uid

    @property
    def finished(self) -> bool:
        """All its containers have ended for good: it uses nothing."""
        return self.status.phase in ("Succeeded", "Failed")

    def plain(self) -> dict[str, Any]:
        """Annotations and containers as `vgpu.api.request.pod_request` reads them."""
        requested: dict[str, Any] = msgspec.to_builtins(
            _Requested(_RequestedMetadata(self.metadata.annotations), self.spec)
        )
        return requested

    def requesting(self, annotations: dict[str, str]) -> bytes:
        """A pod that requests the same, with these annotations only, as JSON: one text for all pods of a template."""
        had = self.spec
        spec = PodSpec(
            containers=had.containers, init_containers=had.init_containers, resources=had.resources,
            overhead=had.overhead, requests=had.requests,
        )  # fmt: skip
        return _ENCODER.encode(Pod(Metadata(annotations=annotations), spec))


_ENCODER: Final = msgspec.json.Encoder()


class _RequestedMetadata(Slim, frozen=True):
    annotations: dict[str, str] | None = None


class _Requested(Slim, frozen=True):
    metadata: _RequestedMetadata
    spec: PodSpec


class NodeInfo(Slim, frozen=True):
    """NodeSystemInfo: the programs of a node."""

    container_runtime_version: str = ""
    """`<runtime>://<version>`."""


class NodeStatus(Slim, frozen=True):
    """What a node can take, and what runs it."""

    allocatable: dict[str, str] | None = None
    capacity: dict[str, str] | None = None
    conditions: tuple[Condition, ...] = ()
    node_info: NodeInfo = NodeInfo()


class NodeSpec(Slim, frozen=True):
    """What of a node's spec matters."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class Node(Slim, frozen=True):
    """A node."""

    metadata: Metadata = Metadata()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def key(self) -> str:
        """Its name."""
        return self.metadata.name


class PodDisruptionBudgetSpec(Slim, frozen=True):
    """Which pods a PodDisruptionBudget counts. Without a selector, none."""

    selector: Selector | None = None


class PodDisruptionBudgetStatus(Slim, frozen=True):
    """How many may be evicted now."""

    disruptions_allowed: int = 0
    disrupted_pods: dict[str, str] | None = None
    """Pods whose eviction is under way and counted already."""


class PodDisruptionBudget(Slim, frozen=True):
    """A PodDisruptionBudget."""

    metadata: Metadata = Metadata()
    spec: PodDisruptionBudgetSpec = PodDisruptionBudgetSpec()
    status: PodDisruptionBudgetStatus = PodDisruptionBudgetStatus()

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return self.metadata.key

    def counts(self, pod: Pod) -> bool:
        """Is an eviction of this pod one of those that it limits?"""
        if self.spec.selector is None or self.metadata.namespace != pod.metadata.namespace:
            return False
        under_way = self.status.disrupted_pods or {}
        return pod.metadata.name not in under_way and self.spec.selector.matches(pod.metadata.labels or {})


class MetadataOnly(Slim, frozen=True):
    """PartialObjectMetadata: what is requested of an object of which only its metadata matter."""

    metadata: Metadata = Metadata()


class ConfigMap(Slim, frozen=True):
    """A ConfigMap."""

    metadata: Metadata = Metadata()
    data: dict[str, str] | None = None


class Secret(Slim, frozen=True):
    """A secret; values in base64, as the API sends them."""

    metadata: Metadata = Metadata()
    type: str = ""
    data: dict[str, str] | None = None
