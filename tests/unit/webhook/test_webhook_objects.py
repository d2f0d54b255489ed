"""A pod as admission reads it: null is left out, and a value of the wrong kind is denied with its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
