"""The policy on edits of bursts decides as the webhook does on new pods; and what the values of bursts may be."""

from __future__ import annotations

from typing import Any

import pytest

from deviceplugin.settings import DevicePluginSettings
from extender.settings import Settings
from tests.apiserver import ApiServer
from tests.contract.chart.conftest import BURST_MAX
from tests.contract.chart.policy_kit import PODS, container, pod, refused
from tests.contract.chart.rendering import Helm, Refused, env
from vgpu.api.burst import BurstBound, bursts_of
from vgpu.api.errors import BadRequest
from vgpu.api.names import DEFAULT
from vgpu.api.request import pod_request

MEM, CORE, WAIT = DEFAULT.burst_annotations
SHARE = {DEFAULT.gpu_mem: "8"}
CAPPED = SHARE | {DEFAULT.gpu_core: "30"}
ONE = [container(limits=SHARE)]
TWO = [container("a", limits=CAPPED), container("b", limits={DEFAULT.gpu_mem: "20"})]
WHOLE = [container(limits={DEFAULT.gpu: "1"})]
ON_TWO = {DEFAULT.gpu_count: "2"}

CASES: list[tuple[list[dict[str, Any]], str, dict[str, str]]] = [
    *((ONE, "default", {MEM: text}) for text in ("8", "40Gi", "8192Mi", "8191Mi", "7Gi", "7", "max", "Max", "", "8gb", "-9Gi", "9.5", "8.5Gi")),
    *((ONE, "kube-public", {MEM: text}) for text in ("16Gi", "16", "16385Mi", "17Gi", "max", "7Gi")),
    *((ONE, "kube-system", {key: text}) for key, text in ((MEM, "9Gi"), (MEM, "max"), (f"{MEM}.main", "9Gi"))),
    *((TWO, "default", {MEM: text}) for text in ("19Gi", "20Gi", "max")),
    *((TWO, "default", {f"{MEM}.{name}": "9Gi"}) for name in ("a", "b", "c")),
    (TWO, "default", {MEM: "9Gi", f"{MEM}.b": "21Gi"}),
    (TWO, "default", {MEM: "9Gi", f"{MEM}.a": "21Gi"}),
    *((TWO, "default", {CORE: text}) for text in ("30", "100", "29", "101", "0", "x", "max")),
    *((TWO, "default", {f"{CORE}.{name}": "50"}) for name in ("a", "b", "c")),
    (TWO, "kube-system", {CORE: "50"}),
    (ONE, "default", {CORE: "50"}),
    *(([container(limits=CAPPED)], "default", ON_TWO | {CORE: text}) for text in ("200", "201", "99", "30", "28")),
    *((ONE, "default", ON_TWO | {MEM: text}) for text in ("8Gi", "9Gi", "7Gi")),
    *((WHOLE, "default", {key: "max"}) for key in (MEM, f"{MEM}.main")),
    *((ONE, "default", {MEM: "9Gi", WAIT: text}) for text in ("0", "30", "3600", "3601", "-1", "1.5", "")),
]  # fmt: skip


def admitted(containers: list[dict[str, Any]], namespace: str, annotations: dict[str, str]) -> bool:
    document = {"metadata": {"annotations": annotations}, "spec": {"containers": containers}}
    try:
        bursts_of(annotations, pod_request(document), bound=BurstBound.of(namespace, BURST_MAX))
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize(("containers", "namespace", "annotations"), CASES)
def test_an_edit_is_admitted_where_the_webhook_would_admit_a_new_pod(
    policies: ApiServer, containers: list[dict[str, Any]], namespace: str, annotations: dict[str, str]
) -> None:
    there = {key: text for key, text in annotations.items() if key == DEFAULT.gpu_count}
    name = pod(policies, *containers, namespace=namespace, annotations=there)

    def edit() -> None:
        path = f"{PODS.replace('default', namespace)}/{name}"
        policies.patch(path, {"metadata": {"annotations": annotations}}, user="jane")

    if admitted(containers, namespace, annotations):
        edit()
        return
    message = refused(edit)
    named = [key for key in annotations if DEFAULT.burst_annotation(key) and f"annotation {key} is" in message]
    assert named, message


def test_cases_are_of_both_kinds() -> None:
    assert {admitted(*case) for case in CASES} == {True, False}


def test_what_is_there_already_and_what_is_taken_away_is_not_judged(policies: ApiServer) -> None:
    name = pod(policies, *ONE, annotations={MEM: "1Gi"})
    path = f"{PODS}/{name}"
    policies.patch(path, {"metadata": {"labels": {"a": "b"}}}, user="jane")
    policies.patch(path, {"metadata": {"annotations": {MEM: None}}}, user="jane")


def test_bursts_reach_the_components_and_no_policy_mentions_them_while_they_are_off(helm: Helm) -> None:
    limits = {"default": {"team-a": "8Gi"}, "max": {"team-a": "16Gi", "*": "max"}}
    on = helm.objects({"burst": {"enabled": True} | limits})
    assert env(on.container("webhook"))["TANGRAM_WEBHOOK_BURST_DEFAULT"] == '{"team-a":"8Gi"}'
    for name in ("webhook", "plugin"):
        given = {key.partition("_BURST_")[2]: value for key, value in env(on.container(name)).items()}
        assert given["ENABLED"] == "true"
        assert given["MAX"] == '{"*":"max","team-a":"16Gi"}'
    assert env(on.container("extender"))["TANGRAM_EXTENDER_BURST_ENABLED"] == "true"
    assert "-burst" in helm.text({"burst": {"enabled": True}})
    assert "-burst" not in helm.text({})


@pytest.mark.parametrize(
    "limits", [{"team-a": "8gb"}, {"team-a": "0"}, {"Team A": "8Gi"}, {"a'b": "max"}, {"team-a": 8}]
)
def test_limits_that_are_none_are_refused(helm: Helm, limits: dict[str, Any]) -> None:
    for value in ("default", "max"):
        with pytest.raises(Refused, match=rf"(?s)burst.*{value}"):
            helm.objects({"burst": {value: limits}})


@pytest.mark.parametrize(("overcommit", "given"), [("", None), (1, 1.0), (1.5, 1.5), (100, 100.0)])
def test_extender_and_device_plugin_have_the_same_bound_of_limits(
    helm: Helm, overcommit: float | str, given: float | None
) -> None:
    rendered = helm.objects({"burst": {"enabled": True, "overcommit": overcommit}})
    for name, prefix, kind in (
        ("extender", "TANGRAM_EXTENDER", Settings),
        ("plugin", "TANGRAM_DEVICEPLUGIN", DevicePluginSettings),
    ):
        text = env(rendered.container(name)).get(f"{prefix}_BURST_OVERCOMMIT")
        assert (text is None) == (given is None)
        if text is not None:
            needed = {"node_name": "n"} if name == "plugin" else {}
            assert kind(burst_overcommit=text, _cli_parse_args=False, **needed).burst_overcommit == given


@pytest.mark.parametrize("overcommit", [0, 0.99, 101, "1.5", "max", True])
def test_a_bound_of_limits_below_the_guarantees_is_refused(helm: Helm, overcommit: object) -> None:
    with pytest.raises(Refused, match=r"(?s)burst.*overcommit"):
        helm.objects({"burst": {"overcommit": overcommit}})
