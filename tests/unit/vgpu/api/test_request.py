"""What a pod may request, and the sentence for what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from vgpu.api.errors import BadRequest
from vgpu.api.names import OVER_LIMIT_ACTIONS, stricter
from vgpu.api.request import GpuRequest, pod_request

MEM, CORE, GPU = "tangram.sh/gpu-mem", "tangram.sh/gpu-core", "tangram.sh/gpu"


def pod(limits: dict[str, Any], requests: dict[str, Any] | None = None, **annotations: str) -> dict[str, Any]:
    resources = {"limits": limits} | ({"requests": requests} if requests else {})
    named = {f"tangram.sh/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return {"metadata": {"annotations": named}, "spec": {"containers": [{"name": "main", "resources": resources}]}}


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [
        (pod({MEM: "0"}), f"container main: {MEM} is 0: it must be a whole number, 1 to 16383 units of 1024 MiB, or bytes"),
        (pod({MEM: "-1Gi"}), f"container main: {MEM} is -1Gi: it must be a whole number, 1 to 16383 units of 1024 MiB, or bytes"),
        (pod({MEM: "8 GB"}), f"container main: {MEM}: '8 GB' is not a Kubernetes quantity"),
        (pod({MEM: 20000}), "which is 20000 units of 1024 MiB: it must be 1 to 16383 units"),
        (pod({MEM: 8, CORE: 101}), f"container main: {CORE} is 101: it must be a whole number, 1 to 100"),
        (pod({MEM: 8, CORE: 201}, gpu_count="2"), f"container main: {CORE} is 201: it must be a whole number, 1 to 200"),
        (pod({CORE: 30}), f"container main requests {CORE} without {MEM}"),
        (pod({MEM: 9}, gpu_count="2"), "it does not divide over 2 GPUs (tangram.sh/gpu-count)"),
        (pod({MEM: 8, CORE: 31}, gpu_count="2"), f"{CORE} is 31: it does not divide over 2 GPUs"),
        (pod({MEM: 8, GPU: 1}), "container main requests tangram.sh/gpu and tangram.sh/gpu-mem: a container takes either"),
        (pod({GPU: 17}), f"container main: {GPU} is 17: it must be a whole number, 1 to 16"),
        (pod({"tangram.sh/gpus": 1}), "container main: tangram.sh/gpus is no resource of Tangram: it must be one of"),
        (pod({MEM: 8}, {MEM: 4}), f"container main: {MEM} is requested as 4 and limited to 8"),
        (pod({}, {MEM: 4}), f"container main: {MEM} is requested as 4 and limited to nothing"),
        (pod({MEM: 8}, {MEM: "x"}), f"container main: {MEM}: 'x' is not a Kubernetes quantity"),
        (pod({MEM: 8}, gpu_count="17"), "annotation tangram.sh/gpu-count is 17: it must be a whole number, 1 to 16"),
        (pod({MEM: 8}, **{"class": "royal"}), "is 'royal': it must be one of latency-critical, standard, best-effort"),
        (pod({MEM: 8}, level="5"), "annotation tangram.sh/level is '5': it must be one of 0, 1, 2, 3, 4"),
        (pod({MEM: 8}, over_limit="shoot"), "annotation tangram.sh/over-limit is 'shoot': it must be one of report, evict, kill"),
        (pod({MEM: 8}, placement="best"), "annotation tangram.sh/placement is 'best': it must be one of binpack"),
        (pod({MEM: 8}, gpu_model="a,,b"), "annotation tangram.sh/gpu-model is 'a,,b': it must be a list"),
    ],
)  # fmt: skip
def test_a_bad_request_is_denied_with_a_sentence(requested: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        pod_request(requested)
    assert sentence in str(caught.value)


def test_what_happens_over_the_limit_is_read_and_the_stricter_preference_counts() -> None:
    assert pod_request(pod({MEM: 8})).over_limit_action == "report"
    assert pod_request(pod({MEM: 8}, over_limit="evict")).over_limit_action == "evict"
    strictest = {(one, other): stricter(one, other) for one in OVER_LIMIT_ACTIONS for other in OVER_LIMIT_ACTIONS}
    assert strictest["report", "kill"] == strictest["kill", "evict"] == "kill"
    assert strictest["evict", "report"] == strictest["evict", "evict"] == "evict"
    assert strictest["report", "report"] == "report"


def test_bytes_and_units_request_the_same_over_several_gpus() -> None:
    expected = (GpuRequest("main", "share", 2, units=8, mib=4096, core_percent=30),)
    for written in ("8Gi", 8, "8192Mi", "8589934592"):
        assert pod_request(pod({MEM: written, CORE: "60"}, gpu_count="2")).containers == expected


def test_an_equal_request_in_another_spelling_is_no_contradiction() -> None:
    assert pod_request(pod({MEM: "8Gi"}, {MEM: "8192Mi"}))


def test_a_pod_that_requests_nothing_of_ours_is_left_alone_whatever_its_annotations() -> None:
    assert not pod_request(pod({"cpu": "1"}, gpu_count="many", level="99"))


def test_an_init_container_is_reported_from_a_sidecar() -> None:
    requested = pod({MEM: 8})
    resources = {"limits": {MEM: 4}}
    requested["spec"]["initContainers"] = [
        {"name": "sidecar", "restartPolicy": "Always", "resources": resources},
        {"name": "init", "resources": resources},
    ]
    found = [(request.container, request.init) for request in pod_request(requested).containers]
    assert found == [("sidecar", False), ("init", True), ("main", False)]
