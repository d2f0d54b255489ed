"""The chart as a release on a real API server: taken whole, upgraded without losing what components wrote, gone without trace."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.pki import make_authority
from hack.cluster.programs import KUBERNETES
from tests.apiserver import ApiServer
from tests.contract.chart.rendering import CHART, EXAMPLES, NAMESPACE, Helm, Refused

CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/tangram-webhook"
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/tangram-webhook-tls"
KINDS = (
    "/api/v1/{ns}/serviceaccounts", "/api/v1/{ns}/secrets", "/api/v1/{ns}/configmaps", "/api/v1/{ns}/services",
    "/apis/apps/v1/{ns}/daemonsets", "/apis/apps/v1/{ns}/deployments", "/apis/batch/v1/{ns}/jobs",
    "/apis/rbac.authorization.k8s.io/v1/{ns}/roles", "/apis/rbac.authorization.k8s.io/v1/{ns}/rolebindings",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/coordination.k8s.io/v1/{ns}/leases",
    "/apis/policy/v1/{ns}/poddisruptionbudgets", "/apis/networking.k8s.io/v1/{ns}/networkpolicies",
    "/apis/scheduling.k8s.io/v1/priorityclasses", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
)  # fmt: skip


def names(api: ApiServer) -> set[tuple[str, str]]:
    """Everything of the kinds that the chart makes."""
    paths = [kind.format(ns=f"namespaces/{NAMESPACE}") for kind in KINDS]
    return {(path, thing["metadata"]["name"]) for path in paths for thing in api("GET", path)["items"]}


@pytest.fixture
def before(api: ApiServer, release_namespace: str) -> set[tuple[str, str]]:
    return names(api)


@pytest.fixture
def installed(helm: Helm, api: ApiServer, before: set[tuple[str, str]]) -> Iterator[ApiServer]:
    run(helm, api, "install")
    yield api
    uninstall(helm, api)


def run(helm: Helm, api: ApiServer, verb: str, *more: str) -> None:
    values = str(EXAMPLES["local"])
    helm(verb, "tangram", str(CHART), "-n", NAMESPACE, "-f", values, *more, kubeconfig=api.kubeconfig)


def uninstall(helm: Helm, api: ApiServer) -> None:
    # no hook: nothing runs pods here
    helm("uninstall", "tangram", "-n", NAMESPACE, "--ignore-not-found", "--no-hooks", kubeconfig=api.kubeconfig)


@pytest.fixture
def ca_pem(tmp_path: Path) -> bytes:
    """A certificate: the API server looks at what is in a caBundle."""
    make_authority(tmp_path / "pki")
    return (tmp_path / "pki/ca.crt").read_bytes()


def test_an_upgrade_keeps_what_the_webhook_wrote(helm: Helm, installed: ApiServer, ca_pem: bytes) -> None:
    data = {"tls.crt": base64.b64encode(b"certificate").decode()}
    installed("PUT", SECRET, installed("GET", SECRET) | {"data": data})
    bundle = base64.b64encode(ca_pem).decode()
    patch: Any = [{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
    installed("PATCH", CONFIGURATION, patch, content_type="application/json-patch+json")
    for more in (["--set", "podAnnotations.upgraded=yes"], ["--set", "webhook.timeoutSeconds=7"]):
        run(helm, installed, "upgrade", *more)
        assert installed("GET", SECRET)["data"] == data
        (webhook,) = installed("GET", CONFIGURATION)["webhooks"]
        assert webhook["clientConfig"]["caBundle"] == bundle
    assert webhook["timeoutSeconds"] == 7


def test_an_upgrade_with_the_values_of_an_older_chart_alone_is_refused_and_one_with_both_is_not(
    helm: Helm, api: ApiServer, before: set[tuple[str, str]], tmp_path: Path
) -> None:
    """The older chart lacks the values that came since, whole sections too: a template of the new one would stumble over them."""
    older = tmp_path / "tangram"
    shutil.copytree(CHART, older)
    values = yaml.safe_load((older / "values.yaml").read_text())
    del values["architectures"], values["global"], values["webhook"]["tls"], values["scheduler"]["serviceAccount"]
    (older / "values.yaml").write_text(yaml.safe_dump(values))
    shutil.rmtree(older / "templates")
    (older / "templates").mkdir()
    helm("install", "tangram", str(older), "-n", NAMESPACE, "--set", "logLevel=debug", kubeconfig=api.kubeconfig)
    try:
        upgrade = ("upgrade", "tangram", str(CHART), "-n", NAMESPACE, "--dry-run=server")
        with pytest.raises(Refused, match="upgrade with --reset-then-reuse-values instead of --reuse-values"):
            helm(*upgrade, "--reuse-values", kubeconfig=api.kubeconfig)
        rendered = helm(*upgrade, "--reset-then-reuse-values", kubeconfig=api.kubeconfig)
        assert re.search(r"name: TANGRAM_WEBHOOK_LOG_LEVEL\n\s+value: debug", rendered)
    finally:
        uninstall(helm, api)


def test_uninstalling_leaves_nothing(helm: Helm, api: ApiServer, before: set[tuple[str, str]]) -> None:
    run(helm, api, "install")
    assert names(api) > before
    uninstall(helm, api)
    assert names(api) == before


def test_the_api_server_knows_every_field(helm: Helm, api: ApiServer, before: set[tuple[str, str]]) -> None:
    """Strictly: a misspelt field is an error, even where helm lets it pass. Objects of operators are not looked at."""
    kinds = {"Certificate", "Issuer", "ServiceMonitor", "PrometheusRule"}
    for example in EXAMPLES.values():
        for thing in helm.objects(example).items:
            if thing["kind"] not in kinds:
                path = path_of(api, thing)
                name = thing["metadata"]["name"]
                options = "fieldManager=test&force=true&fieldValidation=Strict&dryRun=All"
                api("PATCH", f"{path}/{name}?{options}", thing, content_type="application/apply-patch+yaml")


def path_of(api: ApiServer, thing: dict[str, Any]) -> str:
    version = thing["apiVersion"]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    (plural,) = (
        found["name"] for found in api("GET", base)["resources"] if found["kind"] == thing["kind"] and "/" not in found["name"]
    )  # fmt: skip
    namespace = thing["metadata"].get("namespace")
    return f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name != "own-scheduler"])
def test_kube_scheduler_takes_its_configuration(helm: Helm, api: ApiServer, example: str, tmp_path: Path) -> None:
    """kube-scheduler reads it strictly, fills in its defaults and writes down what it understood."""
    configs = helm.objects(EXAMPLES[example]).of("ConfigMap").values()
    (config,) = (thing for thing in configs if "scheduler.yaml" in thing["data"])
    given, understood = tmp_path / "given.yaml", tmp_path / "understood.yaml"
    # in a pod it finds the API server by itself
    given.write_text(f"{config['data']['scheduler.yaml']}\nclientConnection: {{kubeconfig: {api.kubeconfig}}}\n")
    program = build(cache_folder(), [KUBERNETES], Steps())["kube-scheduler"]
    done = subprocess.run(
        ["kube-scheduler", f"--config={given}", f"--write-config-to={understood}", "--secure-port=0"],
        executable=program, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    extender, spare = yaml.safe_load(understood.read_text())["extenders"]
    assert (extender["httpTimeout"], spare["httpTimeout"]) == ("5s", "1s")
