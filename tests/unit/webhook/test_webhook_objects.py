"""A pod as admission reads it: null is left out, and a value of the wrong kind is denied with its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from webhook.objects import pod_of

NULLABLE = ["containers", "initContainers", "volumes", "schedulerName", "hostPID", "priority", "resources", "overhead"]
OF_CONTAINER = ["env", "resources", "volumeMounts", "securityContext", "terminationMessagePath", "restartPolicy"]


@given(st.lists(st.sampled_from(NULLABLE)), st.lists(st.sampled_from(OF_CONTAINER)), st.booleans())
def test_null_is_as_left_out(nulls: list[str], of_container: list[str], annotations: bool) -> None:
    container = {"name": "main", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}
    spec: dict[str, Any] = {"containers": [container], "hostPID": True, "volumes": [{"name": "v"}]}
    without = {key: value for key, value in spec.items() if key not in nulls}
    if "containers" in without:
        without["containers"] = [{key: value for key, value in container.items() if key not in of_container}]
    written = spec | {"containers": [container | dict.fromkeys(of_container)]} | dict.fromkeys(nulls)
    metadata = {"annotations": None} if annotations else {}
    assert pod_of({"metadata": metadata, "spec": written}) == pod_of({"metadata": {}, "spec": without})


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"spec": {}}, "metadata"),
        ({"metadata": {}, "spec": None}, "spec"),
        ({"metadata": {}, "spec": {"containers": [{"env": [{"name": 1}]}]}}, r"containers\[0\].env\[0\].name"),
        ({"metadata": {}, "spec": {"containers": [None]}}, r"containers\[0\]"),
        ([], "object"),
    ],
)
def test_what_is_no_pod_is_denied_by_its_field(document: Any, field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        pod_of(document)


def test_what_admission_does_not_read_is_not_walked() -> None:
    deep: Any = None
    for _ in range(100_000):
        deep = {"a": [deep]}
    read = pod_of({"metadata": {"managedFields": deep}, "spec": {"volumes": [{"csi": deep}]}})
    assert len(read.spec.volumes) == 1
    while deep is not None:  # to free it level by level
        (deep,) = deep.pop("a")


def slowly_without_nulls(value: Any) -> Any:
    """Everywhere, the obvious way."""
    if isinstance(value, dict):
        return {key: slowly_without_nulls(member) for key, member in value.items() if member is not None}
    return [slowly_without_nulls(element) for element in value] if isinstance(value, list) else value


LEAVES = st.sampled_from([None, None, "a", "1Gi", True, 1])
NAMES = st.sampled_from(
    [
        "metadata",
        "spec",
        "name",
        "annotations",
        "labels",
        "containers",
        "initContainers",
        "resources",
        "limits",
        "env",
        "value",
        "valueFrom",
        "fieldRef",
        "fieldPath",
        "volumes",
        "hostPath",
        "path",
        "securityContext",
        "capabilities",
        "add",
        "privileged",
        "volumeMounts",
        "mountPath",
        "nodeSelector",
        "tolerations",
        "key",
        "operator",
        "affinity",
        "hostPID",
        "unread",
    ]
)
ANYTHING = st.recursive(
    LEAVES, lambda of: st.dictionaries(NAMES, of, max_size=5) | st.lists(of, max_size=3), max_leaves=20
)
CONTAINERS = st.lists(st.fixed_dictionaries({"name": st.just("a")}, optional={
    "resources": st.fixed_dictionaries({}, optional={"limits": st.dictionaries(NAMES, st.sampled_from([None, "1"]), max_size=3)}) | st.none(),
    "env": st.lists(st.fixed_dictionaries({"name": st.just("A")}, optional={"value": st.sampled_from([None, "b"]), "valueFrom": ANYTHING})) | st.none(),
    "securityContext": ANYTHING, "volumeMounts": ANYTHING, "unread": ANYTHING,
}), max_size=3)  # fmt: skip
SPECS = st.fixed_dictionaries({}, optional={
    "containers": CONTAINERS | st.none(), "initContainers": CONTAINERS | st.none(), "volumes": ANYTHING, "tolerations": ANYTHING,
    "affinity": ANYTHING, "nodeSelector": ANYTHING, "hostPID": LEAVES, "unread": ANYTHING,
})  # fmt: skip
PODS = st.fixed_dictionaries({}, optional={"metadata": ANYTHING | st.just({}), "spec": SPECS | ANYTHING})


@given(PODS | ANYTHING)
@settings(max_examples=examples(1000))
def test_a_pod_reads_as_without_all_nulls(document: Any) -> None:
    def outcome(of: Any) -> Any:
        try:
            return pod_of(of)
        except msgspec.ValidationError as error:
            return str(error)

    assert outcome(document) == outcome(slowly_without_nulls(document))
