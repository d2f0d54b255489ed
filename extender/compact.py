"""What the caches keep of pods and nodes: there are thousands, and little of each is ever read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from sys import intern
from typing import Final

import msgspec

from extender.node_constraints import constraints_of
from extender.nominate.nominator import unplaced
from extender.reasons import said_of_a_pause
from kube.needs import WholeSpec, needs_of
from kube.objects import (
    Condition,
    Container,
    Metadata,
    Needs,
    Node,
    NodeSpec,
    NodeStatus,
    OwnerReference,
    Pod,
    PodSpec,
    PodStatus,
)  # fmt: skip
from kube.pod_requests import bound_pod_requests, pending_pod_requests, reports_resources, shared
from vgpu.api.names import Names
from vgpu.scheduling.nodes.constraints import NodeConstraints

TEMPLATES: Final = 1024
"""Specs that are cached, 3 KB each. Pods of one template share what is kept of it. Guessed."""

_ENCODER: Final = msgspec.json.Encoder()


class _Template(msgspec.Struct, frozen=True, gc=False):
    """What is kept alike of all pods with one spec."""

    requests_gpus: bool
    """Does it request a GPU or a share?"""
    containers: tuple[Container, ...]
    init_containers: tuple[Container, ...]
    requests: dict[str, int]
    """As long as no container was resized."""
    constraints: NodeConstraints | None
    needs: Needs | None


def _templates(names: Names) -> Callable[[PodSpec], _Template]:
    @lru_cache(TEMPLATES)
    def read(kind: type[PodSpec], text: bytes) -> _Template:
        spec = msgspec.json.decode(text, type=kind)
        requests_gpus = any(_requests_gpus(one, names) for one in (*spec.init_containers, *spec.containers))
        containers = (spec.containers, spec.init_containers) if requests_gpus else ((), ())
        constraints = constraints_of(spec) if requests_gpus else None
        needs = needs_of(spec, names.ours) if requests_gpus and isinstance(spec, WholeSpec) else None
        return _Template(requests_gpus, *containers, shared(pending_pod_requests(spec)), constraints, needs)

    def of(spec: PodSpec) -> _Template:
        bound = spec.node_name
        return read(type(spec), _ENCODER.encode(msgspec.structs.replace(spec, node_name="") if bound else spec))

    return of


def _requests_gpus(one: Container, names: Names) -> bool:
    """As `vgpu.api.request.requests_ours`."""
    return any(names.ours(key) for amounts in (one.resources.limits, one.resources.requests) for key in amounts or ())


def _resource_requests(pod: Pod, template: _Template) -> dict[str, int]:
    if pod.spec.node_name and reports_resources(pod.status):
        return shared(bound_pod_requests(pod))
    return template.requests


def _annotations(pod: Pod, names: Names) -> dict[str, str] | None:
    return {key: value for key, value in (pod.metadata.annotations or {}).items() if names.ours(key)} or None


def small_pod_of(names: Names, *, controllers: bool = False) -> Callable[[Pod], Pod]:
    """What to keep of a pod in the cache. Of pods that have nothing to do with us, hardly anything: what matters for evicting, priority and deletion.

    Of a pod of a PodGroup also whether kube-scheduler found no node for it (`gangs`). With `controllers` also each pod's controller.
    """
    template_of = _templates(names)

    def keep(pod: Pod) -> Pod:
        meta, spec, status = pod.metadata, pod.spec, pod.status
        template = template_of(spec)
        ours = bool(template.containers or template.init_containers)
        followed = ours or spec.scheduling_group is not None
        reported = (
            tuple(_reported(one) for one in status.conditions if one.type == "DisruptionTarget" or unplaced(one))
            if followed and status.conditions
            else ()
        )
        waits = ours and not spec.node_name and isinstance(spec, WholeSpec)
        return Pod(
            Metadata(
                meta.name, intern(meta.namespace), meta.uid, meta.resource_version,
                deletion_timestamp=meta.deletion_timestamp, labels=meta.labels if ours else None,
                annotations=_annotations(pod, names),
                owner_references=meta.owner_references if ours else _controllers(meta) if controllers else (),
            ),
            PodSpec(
                intern(spec.node_name), spec.scheduler_name if waits else "", spec.priority,
                template.containers, template.init_containers, spec.preemption_policy,
                scheduling_group=spec.scheduling_group, requests=_resource_requests(pod, template),
                constraints=template.constraints, needs=template.needs if waits else None,
            ),
            PodStatus(
                intern(status.phase), status.start_time,
                nominated_node_name=status.nominated_node_name if followed else "", conditions=reported,
            ),
        )  # fmt: skip

    return keep


def _reported(one: Condition) -> Condition:
    """Of its message only the part by which the extender refused a pod for its gang."""
    if not one.message:
        return one
    return msgspec.structs.replace(one, message=said_of_a_pause(one.message))


def _controllers(meta: Metadata) -> tuple[OwnerReference, ...]:
    return tuple(one for one in meta.owner_references if one.controller)


def small_node(names: Names) -> Callable[[Node], Node]:
    """What to keep of a node: its name, and where it has an inventory, that, its cordoned GPUs, NUMA facts, labels, taints and resources that are not ours."""

    def shrink(node: Node) -> Node:
        meta, text = node.metadata, node.metadata.annotation(names.inventory)
        kept = Metadata(meta.name, "", meta.uid, meta.resource_version)
        if text is not None:
            # equal on thousands of nodes
            labels = {intern(key): intern(value) for key, value in (meta.labels or {}).items()}
            found = {key: meta.annotation(key) for key in (names.inventory, names.cordoned_gpus, names.numa)}
            annotations = {key: value for key, value in found.items() if value is not None}
            kept = msgspec.structs.replace(kept, annotations=annotations, labels=labels or None)
        if text is None:
            return Node(kept, NodeSpec(), NodeStatus())
        there = (node.status.allocatable or {}).items()
        allocatable = {intern(name): intern(amount) for name, amount in there if not names.ours(name)}
        return Node(kept, node.spec, NodeStatus(allocatable or None))

    return shrink
