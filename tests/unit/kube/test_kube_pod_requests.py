"""How requests add up, where each rule alone decides. All of them together: tests/contract/test_pod_requests.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kube.objects import Pod
from kube.pod_requests import bound_pod_requests, pending_pod_requests, requests_of, shared, total_of


def container(cpu: str, **more: Any) -> dict[str, Any]:
    return {"name": "main", "resources": {"requests": {"cpu": cpu}}, **more}


def pod(spec: dict[str, Any], **status: Any) -> Pod:
    return msgspec.convert({"spec": spec, "status": status}, Pod)


RESIZED = {"name": "main", "resources": {"requests": {"cpu": "2"}}, "allocatedResources": {"cpu": "3"}}
PENDING = {"type": "PodResizePending", "status": "True"}


@pytest.mark.parametrize(
    ("spec", "status", "held", "pending"),
    [
        ({"containers": [container("1"), container("500m")]}, {}, 1500, 1500),
        ({"containers": [container("1")], "initContainers": [container("2"), container("3")]}, {}, 3000, 3000),
        (
            {"containers": [container("4")], "initContainers": [container("2", restartPolicy="Always"), container("3")]},
            {}, 6000, 6000,
        ),
        ({"containers": [container("1")], "overhead": {"cpu": "250m"}}, {}, 1250, 1250),
        ({"containers": [container("1")], "resources": {"requests": {"cpu": "7"}}}, {}, 7000, 7000),
        ({"containers": [container("1")], "resources": {"limits": {"cpu": "7"}}}, {}, 1000, 1000),
        ({"containers": [container("1")]}, {"containerStatuses": [RESIZED]}, 3000, 1000),
        (
            {"containers": [container("8")]},
            {"containerStatuses": [RESIZED], "conditions": [PENDING | {"reason": "Infeasible"}]}, 3000, 8000,
        ),
        (
            {"containers": [container("8")]},
            {"containerStatuses": [RESIZED], "conditions": [PENDING | {"reason": "Deferred"}]}, 8000, 8000,
        ),
        (
            {"containers": [container("1")], "resources": {"requests": {"cpu": "2"}}},
            {"resources": {"requests": {"cpu": "4"}}, "allocatedResources": {"cpu": "5"}}, 5000, 2000,
        ),
    ],
)  # fmt: skip
def test_a_rule_alone(spec: dict[str, Any], status: dict[str, Any], held: int, pending: int) -> None:
    one = pod(spec, **status)
    assert bound_pod_requests(one) == {"cpu": held}
    assert pending_pod_requests(one.spec) == {"cpu": pending}
    assert requests_of(one) == {"cpu": pending}
    bound = msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, node_name="n1"))
    assert requests_of(bound) == {"cpu": held}


def test_what_is_no_quantity_counts_as_nothing() -> None:
    assert pending_pod_requests(pod({"containers": [container("x"), container("1")]}).spec) == {"cpu": 1000}


def test_fractions_are_rounded_up_once() -> None:
    spec = {"containers": [{"resources": {"requests": {"memory": "0.5", "cpu": "100u"}}}] * 3}
    assert pending_pod_requests(pod(spec).spec) == {"memory": 2, "cpu": 1}


def test_pods_that_request_the_same_share_one_object() -> None:
    assert shared({"cpu": 1, "memory": 2}) is shared({"memory": 2, "cpu": 1})


def test_pods_add_up() -> None:
    assert total_of([{"cpu": 1}, {"cpu": 2, "memory": 3}]) == {"cpu": 3, "memory": 3}
