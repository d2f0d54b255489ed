"""GitOps: what renders and applies the chart again and again changes nothing, and takes nothing from what components write themselves."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.pki import make_authority
from tests.apiserver import MERGE, ApiServer
from tests.contract.chart.rendering import EXAMPLES, NAMESPACE, Helm, Objects

MANAGER = "?fieldManager=gitops&force=true"
SERVED = {
    "v1": "/api/v1", "apps/v1": "/apis/apps/v1", "batch/v1": "/apis/batch/v1", "policy/v1": "/apis/policy/v1",
    "rbac.authorization.k8s.io/v1": "/apis/rbac.authorization.k8s.io/v1", "networking.k8s.io/v1": "/apis/networking.k8s.io/v1",
    "scheduling.k8s.io/v1": "/apis/scheduling.k8s.io/v1", "admissionregistration.k8s.io/v1": "/apis/admissionregistration.k8s.io/v1",
}  # fmt: skip
OPERATORS = ("monitoring.coreos.com/v1", "cert-manager.io/v1")
"""Kinds of operators, which this API server does not know."""


def path_of(thing: Mapping[str, Any]) -> str:
    meta, kind = thing["metadata"], thing["kind"].lower()
    inside = f"/namespaces/{meta['namespace']}" if "namespace" in meta else ""
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}es" if kind.endswith("s") else f"{kind}s"
    return f"{SERVED[thing['apiVersion']]}{inside}/{plural}/{meta['name']}"


class Applied:
    """Objects that are applied, and deleted in the end."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self.paths: set[str] = set()

    def __call__(self, things: Objects) -> dict[str, Any]:
        """Every object as the API server has it after a server-side apply, by path."""
        after = {}
        for thing in things.items:
            if thing["apiVersion"] not in OPERATORS and "helm.sh/hook" not in thing["metadata"].get("annotations", {}):
                path = path_of(thing)
                after[path] = self._api("PATCH", path + MANAGER, thing, content_type="application/apply-patch+yaml")
                self.paths.add(path)
        return after


@pytest.fixture
def applied(api: ApiServer, release_namespace: str) -> Iterator[Applied]:
    made = Applied(api)
    yield made
    for path in made.paths:
        api("DELETE", path)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_chart_renders_the_same_text_each_time(helm: Helm, example: str) -> None:
    assert helm.text(EXAMPLES[example]) == helm.text(EXAMPLES[example])


def test_an_apply_that_is_repeated_changes_nothing_and_keeps_what_components_wrote(
    helm: Helm, api: ApiServer, applied: Applied, tmp_path: Path
) -> None:
    """The webhook fills its Secret and the certificates in its configuration; the API server adds defaults to what the chart leaves out."""
    things = helm.objects({"webhook": {"certManager": {"enabled": False}}})
    applied(things)
    filled = {"data": {"tls.key": base64.b64encode(b"key").decode()}}
    secret = f"/api/v1/namespaces/{NAMESPACE}/secrets/tangram-webhook-tls"
    api("PATCH", secret, filled, content_type=MERGE)
    configuration = path_of(things.one("MutatingWebhookConfiguration", "tangram-webhook"))
    make_authority(tmp_path)
    bundle = base64.b64encode((tmp_path / "ca.crt").read_bytes()).decode()
    change = [{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
    api("PATCH", configuration, change, content_type="application/json-patch+json")  # type: ignore[arg-type]
    before = {path: api("GET", path) for path in applied.paths}
    after = applied(things)
    assert {path: one["metadata"]["resourceVersion"] for path, one in after.items()} == {
        path: one["metadata"]["resourceVersion"] for path, one in before.items()
    }
    assert after[secret]["data"] == filled["data"]
    assert after[configuration]["webhooks"][0]["clientConfig"]["caBundle"] == bundle


def test_a_change_is_applied(helm: Helm, api: ApiServer, applied: Applied) -> None:
    """Or the test before shows nothing."""
    applied(helm.objects())
    node = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/tangram-node"
    before = api("GET", node)
    after = applied(helm.objects({"logLevel": "debug"}))[node]
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    assert "debug" in json.dumps(after["spec"])


def test_hooks_are_those_that_gitops_tools_map(helm: Helm) -> None:
    """Argo CD runs `post-delete` (from 2.10 on) and ignores `test`; Flux uses helm itself. No other kind of hook may do work of the release."""
    hooks = {
        hook.strip()
        for thing in helm.objects({"test": {"image": "any"}}).items
        for hook in thing["metadata"].get("annotations", {}).get("helm.sh/hook", "").split(",")
    }
    assert hooks - {""} == {"post-delete", "test"}
