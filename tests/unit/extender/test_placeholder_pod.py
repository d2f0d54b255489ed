"""The placeholder as it is created. The Go tests of hack/autoscalers read the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from extender.placeholder_pod import READ, placeholder
from tests.builders import gpu
from vgpu.api.inventory import Inventory
from vgpu.api.names import DEFAULT
from vgpu.scheduling.placeholders import NodeType

FILE = Path(__file__).parents[3] / "hack/autoscalers/testdata/placeholder.json"
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "tolerationSeconds": None}
IN_ZONE = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}]}]}


def made(**spec: Any) -> dict[str, Any]:
    whole = {
        "metadata": {"name": "large", "namespace": "default", "uid": "3f1f6c50-0000-4000-8000-000000000001"},
        "spec": spec,
    }
    return placeholder(
        READ.decode(json.dumps(whole)), NodeType("two-gpus", Inventory((gpu(0), gpu(1)))), DEFAULT,
        {"cpu": 500, "memory": 2**30, "ephemeral-storage": 0}, scheduler="tangram-scheduler", image="registry.k8s.io/pause:3.10",
        priority_class="tangram-placeholder", owner={"apiVersion": "v1", "kind": "ConfigMap", "name": "records", "uid": "r"},
    )  # fmt: skip


def test_it_is_the_one_of_the_tests_against_autoscalers() -> None:
    assert json.loads(FILE.read_text()) == made()


def test_it_goes_where_its_pod_may_go() -> None:
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": IN_ZONE},
        "podAntiAffinity": {"x": 1},
    }
    spec = made(nodeSelector={"disk": "ssd"}, tolerations=[TOLERATION], affinity=affinity)["spec"]
    assert spec["nodeSelector"] == {"disk": "ssd", "node.kubernetes.io/instance-type": "two-gpus"}
    assert spec["tolerations"] == [TOLERATION]
    assert spec["affinity"] == {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": IN_ZONE}}
