"""Who may choose how pods are placed: what the chart says of it reaches the webhook and kube-scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.contract.chart.rendering import CHART, Helm, Refused, env
from vgpu.api.names import DEFAULT_POLICY, POLICY_NAMES


def test_the_chart_allows_every_policy_there_is_and_has_the_default_of_the_code() -> None:
    placement = yaml.safe_load((CHART / "values.yaml").read_text())["webhook"]["placement"]
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert tuple(placement["policies"]) == tuple(schema["definitions"]["placementPolicy"]["enum"]) == POLICY_NAMES
    assert placement["default"] == DEFAULT_POLICY


def test_policies_and_default_reach_the_webhook(helm: Helm) -> None:
    given = {"policies": ["fragmentation", "topology"], "default": "fragmentation"}
    webhook = env(helm.objects({"webhook": {"placement": given}}).container("webhook"))
    assert json.loads(str(webhook["TANGRAM_WEBHOOK_POLICIES"])) == given["policies"]
    assert webhook["TANGRAM_WEBHOOK_DEFAULT_POLICY"] == given["default"]


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        ({"policies": ["best"]}, "policies"),
        ({"default": "best"}, "default"),
        ({"policies": []}, "policies"),
        ({"policies": ["spread"]}, r"webhook\.placement\.default is binpack.* which are spread"),
    ],
)
def test_a_policy_that_does_not_exist_and_a_default_that_is_not_allowed_are_refused(
    helm: Helm, placement: dict[str, Any], why: str
) -> None:
    with pytest.raises(Refused, match=why):
        helm.objects({"webhook": {"placement": placement}})


def test_kube_scheduler_requests_how_good_nodes_are_and_weighs_it_as_the_chart_says(helm: Helm) -> None:
    objects = helm.objects({"scheduler": {"extender": {"weight": 7}}})
    config = yaml.safe_load(objects.one("ConfigMap", "tangram-scheduler")["data"]["scheduler.yaml"])
    extender, _ = config["extenders"]
    assert (extender["prioritizeVerb"], extender["weight"], extender["nodeCacheCapable"]) == ("prioritize", 7, True)


def extenders(helm: Helm, weight: int) -> list[dict[str, Any]]:
    objects = helm.objects({"scheduler": {"extender": {"spareWeight": weight, "port": 7777}}})
    config = yaml.safe_load(objects.one("ConfigMap", "tangram-scheduler")["data"]["scheduler.yaml"])
    found: list[dict[str, Any]] = config["extenders"]
    return found


def test_for_pods_without_a_gpu_the_extender_prefers_nodes_with_the_fewest_free_gpus_and_nothing_waits_for_it(
    helm: Helm,
) -> None:
    _, spare = extenders(helm, 7)
    assert spare == {
        "urlPrefix": "http://127.0.0.1:7777",
        "prioritizeVerb": "spare",
        "weight": 7,
        "nodeCacheCapable": True,
        "ignorable": True,
        "httpTimeout": "1s",
    }
    assert len(extenders(helm, 0)) == 1


def test_the_extender_serves_before_kube_scheduler_starts_and_until_it_has_ended(helm: Helm) -> None:
    (template,) = (spec for spec, container in helm.objects().containers() if container["name"] == "kube-scheduler")
    assert [one["name"] for one in template["containers"]] == ["kube-scheduler"]
    (extender,) = template["initContainers"]
    assert (extender["name"], extender["restartPolicy"]) == ("extender", "Always")
    assert extender["startupProbe"]["httpGet"]["path"] == "/readyz"
