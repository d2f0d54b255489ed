"""What the policies keep from pods that are there already, since the webhook sees new ones only."""

from __future__ import annotations

from typing import Any

import pytest

from tests.apiserver import ApiServer
from tests.contract.chart.policy_kit import PODS, SHARE, container, pod, refused
from vgpu.api.confinement import CAPABILITIES
from vgpu.api.names import DEFAULT

CAPABLE = [{"securityContext": {"capabilities": {"add": [name]}}} for name in sorted(CAPABILITIES)]


@pytest.mark.parametrize(
    ("more", "limits", "namespace", "comes_in"),
    [
        *((capable, SHARE, "default", False) for capable in CAPABLE),
        ({"securityContext": {"capabilities": {"add": ["CAP_SYS_ADMIN"]}}}, SHARE, "default", False),
        ({"securityContext": {"privileged": True}}, SHARE, "default", False),
        ({"securityContext": {"privileged": True}}, SHARE, "kube-public", True),
        ({"securityContext": {"privileged": True}}, {"tangram.sh/gpu": "1"}, "default", True),
        ({"securityContext": {"privileged": True}}, {}, "default", True),
        ({"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}, SHARE, "default", True),
    ],
)
def test_an_ephemeral_container_leaves_no_share(
    policies: ApiServer, more: dict[str, Any], limits: dict[str, str], namespace: str, *, comes_in: bool
) -> None:
    name = pod(policies, container(limits=limits), namespace=namespace)
    debug = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "none", **more}]}}

    def act() -> None:
        path = f"{PODS.replace('default', namespace)}/{name}/ephemeralcontainers"
        policies.patch(path, debug, user="jane")

    if comes_in:
        act()
        return
    message = refused(act)
    assert "ephemeral container debug " in message
    assert "namespace default in the chart value webhook.privilegedNamespaces" in message


@pytest.mark.parametrize(
    ("before", "after", "limits", "namespace", "comes_in"),
    [
        (None, "latency-critical", SHARE, "default", False),
        ("standard", "latency-critical", SHARE, "default", False),
        ("standard", "latency-critical", SHARE, "kube-public", True),
        ("standard", "best-effort", SHARE, "default", True),
        ("latency-critical", "latency-critical", SHARE, "default", True),
        (None, "latency-critical", {}, "default", True),
    ],
)
def test_a_pod_that_waits_is_not_made_latency_critical_where_none_may_be(
    policies: ApiServer, before: str | None, after: str, limits: dict[str, str], namespace: str, *, comes_in: bool
) -> None:
    annotations = {DEFAULT.service_class: before} if before else {}
    name = pod(policies, container(limits=limits), namespace=namespace, annotations=annotations)

    def act() -> None:
        change = {"metadata": {"annotations": {DEFAULT.service_class: after}, "labels": {"a": "b"}}}
        policies.patch(f"{PODS.replace('default', namespace)}/{name}", change, user="jane")

    if comes_in:
        act()
    else:
        assert "namespace to the chart value webhook.latencyCriticalNamespaces" in refused(act)
