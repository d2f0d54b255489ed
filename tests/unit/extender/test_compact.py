"""What the cache keeps of a pod is what was read of it one field after another, whichever pods of its template came before."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extender.compact import small_pod_of
from extender.node_constraints import constraints_of
from extender.nominate.nominator import unplaced
from kube.needs import WholePod, WholeSpec, needs_of
from kube.objects import Metadata, Pod, PodSpec, PodStatus
from kube.pod_requests import requests_of
from vgpu.api.names import DEFAULT
from vgpu.api.request import requests_ours

Thing = dict[str, Any]


def plainly_small(pod: Pod) -> Pod:
    """As `small_pod_of`, with nothing remembered."""
    meta, spec, status = pod.metadata, pod.spec, pod.status
    parts = (*spec.init_containers, *spec.containers)
    ours = any(requests_ours(msgspec.to_builtins(part), DEFAULT) for part in parts)
    followed = ours or spec.scheduling_group is not None
    waits = ours and not spec.node_name and isinstance(spec, WholeSpec)
    reported = [one for one in status.conditions if one.type == "DisruptionTarget" or unplaced(one)]
    return Pod(
        Metadata(
            meta.name, meta.namespace, meta.uid, meta.resource_version,
            deletion_timestamp=meta.deletion_timestamp, labels=meta.labels if ours else None,
            annotations={key: value for key, value in (meta.annotations or {}).items() if DEFAULT.ours(key)} or None,
            owner_references=meta.owner_references if ours else (),
        ),
        PodSpec(
            spec.node_name, spec.scheduler_name if waits else "", spec.priority,
            spec.containers if ours else (), spec.init_containers if ours else (), spec.preemption_policy,
            scheduling_group=spec.scheduling_group,
            requests=requests_of(pod),
            constraints=constraints_of(spec) if ours else None,
            needs=needs_of(spec, DEFAULT.ours) if waits and isinstance(spec, WholeSpec) else None,
        ),
        PodStatus(
            status.phase, status.start_time, nominated_node_name=status.nominated_node_name if followed else "",
            conditions=tuple(reported) if followed else (),
        ),
    )  # fmt: skip


AMOUNTS = st.dictionaries(
    st.sampled_from([DEFAULT.gpu_mem, DEFAULT.gpu_core, "cpu", "memory", "example.com/nic"]),
    st.sampled_from(["1", "2", "500m", 3]),
    max_size=3,
)
RESOURCES = st.fixed_dictionaries({}, optional={"limits": AMOUNTS, "requests": AMOUNTS})
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from("abc"), "resources": RESOURCES},
        optional={
            "restartPolicy": st.just("Always"), "ports": st.just([{"containerPort": 80, "hostPort": 80}]),
        },
    ),
    max_size=2,
)  # fmt: skip
AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "model", "operator": "In", "values": ["a", "b"]}]}]
        }
    }
}
SPECS = st.fixed_dictionaries(
    {"containers": CONTAINERS},
    optional={
        "nodeName": st.sampled_from(["n1", "n2"]),
        "initContainers": CONTAINERS,
        "nodeSelector": st.just({"pool": "gold"}),
        "affinity": st.sampled_from([AFFINITY, {"podAffinity": {"required": []}}]),
        "tolerations": st.just([{"key": "gpu", "operator": "Exists"}]),
        "schedulerName": st.sampled_from(["tangram-scheduler", "default-scheduler"]),
        "priority": st.integers(0, 2),
        "overhead": st.just({"cpu": "250m"}),
        "resources": RESOURCES,
        "schedulingGroup": st.just({"podGroupName": "g"}),
        "schedulingGates": st.just([{"name": "later"}]),
        "volumes": st.just([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]),
    },
)
STATUS_OF_CONTAINER = st.fixed_dictionaries(
    {"name": st.sampled_from("abc")}, optional={"resources": RESOURCES, "allocatedResources": AMOUNTS}
)
CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["PodScheduled", "DisruptionTarget", "Ready", "PodResizePending"]), "status": st.just("False")},
        optional={"reason": st.sampled_from(["Unschedulable", "SchedulerError", "Infeasible"])},
    ),
    max_size=2,
)  # fmt: skip
STATUSES = st.fixed_dictionaries(
    {"phase": st.sampled_from(["Pending", "Running"])},
    optional={
        "startTime": st.just("2026-01-01T00:00:00Z"),
        "nominatedNodeName": st.just("n1"),
        "conditions": CONDITIONS,
        "containerStatuses": st.lists(STATUS_OF_CONTAINER, max_size=2),
        "initContainerStatuses": st.lists(STATUS_OF_CONTAINER, max_size=1),
        "resources": RESOURCES,
        "allocatedResources": AMOUNTS,
    },
)
METADATA = st.fixed_dictionaries(
    {"name": st.sampled_from("pq"), "namespace": st.just("default"), "uid": st.sampled_from("uv")},
    optional={
        "labels": st.just({"app": "a"}),
        "annotations": st.sampled_from([{}, {"other/one": "1"}, {DEFAULT.assignment: "{}", "other/one": "1"}]),
        "deletionTimestamp": st.just("2026-01-01T00:00:00Z"),
        "ownerReferences": st.just([{"kind": "Job", "name": "j", "uid": "w", "controller": True}]),
    },
)
PODS = st.lists(
    st.fixed_dictionaries({"metadata": METADATA, "spec": SPECS, "status": STATUSES}), min_size=1, max_size=6
)

KEEP = small_pod_of(DEFAULT)
"""One for all examples: what it remembers of one pod must fit every other."""


@given(PODS)
def test_what_is_kept_of_a_pod_is_what_is_read_of_it_alone(plain: list[Thing]) -> None:
    for kind in (Pod, WholePod):
        for one in plain:
            pod = msgspec.convert(one, kind)
            assert KEEP(pod) == plainly_small(pod)


def test_pods_of_one_template_share_what_is_kept_of_it() -> None:
    def made(name: str, node: str) -> Pod:
        container = {"name": "main", "resources": {"limits": {DEFAULT.gpu_mem: "4"}}}
        spec = {"containers": [container], "nodeName": node}
        return KEEP(msgspec.convert({"metadata": {"name": name, "namespace": "default"}, "spec": spec}, WholePod))

    one, other = made("a", "n1"), made("b", "n2")
    assert one.spec.containers is other.spec.containers
    assert one.spec.requests is other.spec.requests
    assert made("c", "").spec.containers is one.spec.containers
