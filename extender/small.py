"""What the caches keep of pods and nodes: thousands of them, of which little is ever read."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from extender.constraints import constraints_of
from extender.nominating import unplaced
from extender.reasons import said_of_a_pause
from kube.needs import WholeSpec, needs_of
from kube.objects import Condition, Metadata, Node, NodeSpec, NodeStatus, OwnerReference, Pod, PodSpec, PodStatus
from kube.pod_requests import requests_of, shared
from vgpu.names import Names
from vgpu.request import asks_for_ours


def small_pod(names: Names) -> Callable[[Pod], Pod]:
    """What to keep of a pod in the cache. Of pods that have nothing to do with us, hardly anything."""

    def shrink(pod: Pod) -> Pod:
        meta, spec = pod.metadata, pod.spec
        annotations = {key: value for key, value in (meta.annotations or {}).items() if names.ours(key)}
        kept = Metadata(meta.name, meta.namespace, meta.uid, meta.resource_version, annotations=annotations or None)
        asks = any(
            asks_for_ours(msgspec.to_builtins(part), names) for part in (*spec.init_containers, *spec.containers)
        )
        containers = (spec.containers, spec.init_containers) if asks else ((), ())
        status = PodStatus(pod.status.phase, pod.status.start_time)
        constraints = constraints_of(spec) if asks else None
        requests = shared(requests_of(pod))
        small = PodSpec(spec.node_name, "", None, *containers, requests=requests, constraints=constraints)
        return Pod(kept, small, status)

    return shrink


def small_pod_of(names: Names, *, controllers: bool = False) -> Callable[[Pod], Pod]:
    """As `small_pod`, with what matters for evicting: of all pods priority and deletion, of those that ask for ours the rest.

    Of a pod of a PodGroup also whether kube-scheduler found no place for it (`gangs`). With `controllers` also whose each pod is.
    """
    shrink = small_pod(names)

    def keep(pod: Pod) -> Pod:
        small, meta, spec, status = shrink(pod), pod.metadata, pod.spec, pod.status
        ours = bool(small.spec.containers or small.spec.init_containers)
        followed = ours or spec.scheduling_group is not None
        told = (
            tuple(_told(one) for one in status.conditions if one.type == "DisruptionTarget" or unplaced(one))
            if followed
            else ()
        )
        waits = ours and not spec.node_name and isinstance(spec, WholeSpec)
        change = msgspec.structs.replace
        return change(
            small,
            metadata=change(
                small.metadata,
                deletion_timestamp=meta.deletion_timestamp,
                labels=meta.labels if ours else None,
                owner_references=meta.owner_references if ours else _controllers(meta) if controllers else (),
            ),
            spec=change(
                small.spec,
                priority=spec.priority,
                preemption_policy=spec.preemption_policy,
                scheduling_group=spec.scheduling_group,
                scheduler_name=spec.scheduler_name if waits else "",
                needs=needs_of(spec, names.ours) if waits and isinstance(spec, WholeSpec) else None,
            ),
            status=change(
                small.status, nominated_node_name=status.nominated_node_name if followed else "", conditions=told
            ),
        )

    return keep


def _told(one: Condition) -> Condition:
    """Of its message no more than that we refused a pod for its gang."""
    if not one.message:
        return one
    return msgspec.structs.replace(one, message=said_of_a_pause(one.message))


def _controllers(meta: Metadata) -> tuple[OwnerReference, ...]:
    return tuple(one for one in meta.owner_references if one.controller)


def small_node(names: Names) -> Callable[[Node], Node]:
    """What to keep of a node: its name, and where it has an inventory, that, labels, taints and resources that are not ours."""

    def shrink(node: Node) -> Node:
        meta, text = node.metadata, node.metadata.annotation(names.inventory)
        kept = Metadata(meta.name, "", meta.uid, meta.resource_version)
        if text is not None:
            # thousands of nodes say the same
            labels = {sys.intern(key): sys.intern(value) for key, value in (meta.labels or {}).items()}
            kept = msgspec.structs.replace(kept, annotations={names.inventory: text}, labels=labels or None)
        if text is None:
            return Node(kept, NodeSpec(), NodeStatus())
        there = (node.status.allocatable or {}).items()
        allocatable = {sys.intern(name): sys.intern(amount) for name, amount in there if not names.ours(name)}
        return Node(kept, node.spec, NodeStatus(allocatable or None))

    return shrink
