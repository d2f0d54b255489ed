"""The chart's alerts: Prometheus reads each, and that about versions fires beyond the skew that Kubernetes allows, and not within it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
import promql_parser
import pytest

from hack.cluster.programs import kubernetes_version
from tests.apiserver import ApiServer
from tests.contract.chart.rendering import EXAMPLES, Helm, Objects

SKEW: Final = "TangramKubernetesSkew"
ON: Final = {"prometheusRule": {"enabled": True}}


def alerts(objects: Objects) -> dict[str, dict[str, Any]]:
    """By name."""
    rules = (
        rule
        for one in objects.of("PrometheusRule").values()
        for group in one["spec"]["groups"]
        for rule in group["rules"]
    )
    return {rule["alert"]: rule for rule in rules}


def test_prometheus_reads_every_alert(helm: Helm) -> None:
    found = alerts(helm.objects(EXAMPLES["nvidia"]))
    assert len(found) > 40
    for rule in found.values():
        assert promql_parser.parse(rule["expr"])


def selects(expression: str, series: Mapping[str, str]) -> bool:
    """Whether a selector, and nothing more, selects a series, as Prometheus matches labels: patterns are anchored, a label that is absent is empty."""
    selector = promql_parser.parse(expression)
    assert isinstance(selector, promql_parser.VectorSelector)
    assert not selector.matchers.or_matchers
    operators = {
        "MatchOp.Equal": lambda value, given: value == given,
        "MatchOp.NotEqual": lambda value, given: value != given,
        "MatchOp.Re": lambda value, given: re.fullmatch(given, value) is not None,
        "MatchOp.NotRe": lambda value, given: re.fullmatch(given, value) is None,
    }
    return selector.name == series["__name__"] and all(
        operators[str(one.op)](series.get(one.name, ""), one.value) for one in selector.matchers.matchers
    )


def build_info(version: str, job: str = "apiserver") -> dict[str, str]:
    return {"__name__": "kubernetes_build_info", "job": job, "git_version": version, "major": "1"}


@pytest.mark.parametrize("given", ["v1.34.1", "1.34", "v1.34.1-gke.2"])
@pytest.mark.parametrize(
    ("serves", "fires"),
    [
        ("v1.32.9", True),
        ("v1.33.5", True),  # kube-scheduler must not be newer
        ("v1.34.0", False),
        ("v1.34.6-eks-2d5f260", False),
        ("v1.35.0+k3s1", False),
        ("v1.36.0", True),
        ("v1.340.0", True),
        ("v1.3.0", True),
    ],
)
def test_a_scheduler_that_stayed_old_is_reported_beyond_one_minor_version(
    helm: Helm, given: str, serves: str, *, fires: bool
) -> None:
    rule = alerts(helm.objects(ON, kube=given))[SKEW]
    assert selects(rule["expr"], build_info(serves)) is fires
    assert not selects(rule["expr"], build_info(serves, job="kubelet"))


@pytest.mark.parametrize(
    ("image", "minor"),
    [
        ({"tag": "v1.33.2"}, "33"),
        ({"tag": "1.33.2-custom"}, "33"),
        ({"tag": "v1.33.2", "digest": "sha256:" + "0" * 64}, "33"),
        ({"tag": "latest"}, ""),
        ({"digest": "sha256:" + "0" * 64}, ""),
    ],
)
def test_the_skew_is_that_of_the_image_that_is_named_and_none_where_it_does_not_say(
    helm: Helm, image: dict[str, str], minor: str
) -> None:
    found = alerts(helm.objects(ON | {"scheduler": {"kubeScheduler": {"image": image}}}, kube="v1.36.3"))
    assert (SKEW in found) is bool(minor)
    if minor:
        assert not selects(found[SKEW]["expr"], build_info(f"v1.{minor}.1"))
        assert selects(found[SKEW]["expr"], build_info("v1.36.3"))


def test_with_a_scheduler_of_the_operators_own_there_is_nothing_to_compare(helm: Helm) -> None:
    assert SKEW not in alerts(helm.objects(ON | {"scheduler": {"enabled": False}}))


def of_text(metrics: str) -> Iterator[dict[str, str]]:
    for line in re.findall(r"^kubernetes_build_info\{(.*)\} 1$", metrics, re.MULTILINE):
        yield {"__name__": "kubernetes_build_info", "job": "apiserver", **dict(re.findall(r'(\w+)="([^"]*)"', line))}


def test_the_api_server_says_its_version_as_the_alert_reads_it(helm: Helm, api: ApiServer) -> None:
    answer: httpx.Response = api.http.get("/metrics")
    (series,) = of_text(answer.text)
    assert series["git_version"] == kubernetes_version()
    _, minor, _ = kubernetes_version().split(".")
    for older, fires in ((0, False), (1, False), (2, True)):
        rule = alerts(helm.objects(ON, kube=f"v1.{int(minor) - older}.1"))[SKEW]
        assert selects(rule["expr"], series) is fires
