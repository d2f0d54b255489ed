"""What keeps a pod off a node by labels and taints, and which pods are left to the scheduler."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kube.needs import WholePod, needs_of, suits
from kube.objects import Needs
from vgpu.api.names import DEFAULT
from vgpu.scheduling.nodes.constraints import Taint


def needs(**spec: Any) -> Needs | None:
    spec.setdefault("containers", [{"name": "main", "resources": {"requests": {"cpu": "1", DEFAULT.gpu_mem: "4"}}}])
    pod = msgspec.json.decode(msgspec.json.encode({"spec": spec}), type=WholePod)
    return needs_of(pod.spec, DEFAULT.ours)


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def key(name: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": name, "operator": operator, "values": list(values)}


def goes(labels: dict[str, str] | None = None, *taints: Taint, unschedulable: bool = False, **spec: Any) -> bool:
    found = needs(**spec)
    assert found is not None
    return suits(found, labels or {}, taints, unschedulable=unschedulable)


def test_labels_of_the_selector_and_of_one_term_must_be_there() -> None:
    assert goes()
    assert goes({"zone": "a", "x": "y"}, nodeSelector={"zone": "a"})
    assert not goes({"zone": "b"}, nodeSelector={"zone": "a"})
    either = required(
        {"matchExpressions": [key("zone", "In", "a", "b"), key("old", "DoesNotExist")]},
        {"matchExpressions": [key("gpu", "Exists"), key("zone", "NotIn", "c")]},
    )
    assert goes({"zone": "b"}, affinity=either)
    assert not goes({"zone": "b", "old": "1"}, affinity=either)
    assert goes({"gpu": "h"}, affinity=either)
    assert not goes({"gpu": "h", "zone": "c"}, affinity=either)
    assert not goes({"a": "b"}, affinity=required({})), "an empty term matches no node"


def test_a_taint_keeps_off_a_pod_that_does_not_tolerate_it() -> None:
    taint = Taint("nvidia.com/gpu", "present", "NoSchedule")
    assert not goes({}, taint)
    assert goes({}, Taint("x", "", "PreferNoSchedule")), "that is only a preference"
    for toleration, tolerates in (
        ({"operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "nvidia.com/gpu", "value": "present"}, True),
        ({"key": "nvidia.com/gpu", "value": "absent"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "nvidia.com/gpu", "operator": "Gt", "value": "present"}, False),
    ):
        assert goes({}, taint, tolerations=[toleration]) is tolerates
    assert not goes({}, unschedulable=True)
    assert goes({}, unschedulable=True, tolerations=[{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}])


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "z"}]}}},
        {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}},
        {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}},
        {"affinity": required({"matchExpressions": [key("size", "Gt", "3")]})},
        {"affinity": required({"matchFields": [key("metadata.name", "In", "n1")]})},
        {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}]},
        {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
        {"volumes": [{"name": "v", "ephemeral": {}}, {"name": "w", "ephemeral": {"volumeClaimTemplate": {}}}]},
        {"containers": [{"name": "main", "ports": [{"containerPort": 80, "hostPort": 80}]}]},
        {"containers": [{"name": "main", "resources": {"requests": {"example.com/fpga": "1"}}}]},
        {"schedulingGates": [{"name": "quota"}]},
        {"resourceClaims": [{"name": "x"}]},
        {"schedulingGroup": {"podGroupName": "g"}},
        {"workloadRef": {"name": "w"}},
    ],
)
def test_a_pod_with_anything_else_is_left_to_the_scheduler(spec: dict[str, Any]) -> None:
    assert needs(**spec) is None


def test_what_does_not_matter_does_not_keep_a_pod_from_being_judged() -> None:
    assert (
        needs(
            volumes=[{"name": "v", "emptyDir": {}}],
            containers=[{"name": "main", "ports": [{"containerPort": 80}]}],
            affinity={"nodeAffinity": {}},
        )
        == Needs()
    )


WORDS = st.sampled_from(["a", "b", "c"])
CONDITIONS = st.builds(
    lambda name, operator, values: key(name, operator, *values),
    WORDS, st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"]), st.lists(WORDS, min_size=1, max_size=2),
)  # fmt: skip


@given(
    st.dictionaries(WORDS, WORDS), st.dictionaries(WORDS, WORDS, max_size=2), st.lists(st.lists(CONDITIONS, max_size=2))
)
def test_it_is_as_written_out(
    labels: dict[str, str], selector: dict[str, str], terms: list[list[dict[str, Any]]]
) -> None:
    def matches(one: dict[str, Any]) -> bool:
        there = one["key"] in labels
        hit = there and labels[one["key"]] in one["values"]
        return {"In": hit, "NotIn": not hit, "Exists": there, "DoesNotExist": not there}[one["operator"]]

    some = any(term and all(map(matches, term)) for term in terms)
    expected = selector.items() <= labels.items() and some
    spec = {"nodeSelector": selector, "affinity": required(*({"matchExpressions": term} for term in terms))}
    assert goes(labels, **spec) is expected
