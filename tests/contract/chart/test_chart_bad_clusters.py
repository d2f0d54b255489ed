"""What the operator reads where the cluster lacks something, or has it already. Against a real API server: the chart looks it up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.apiserver import ApiServer
from tests.contract.chart.rendering import NAMESPACE, Helm, Refused

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
Other = Callable[[str, str], None]


@pytest.fixture
def other(api: ApiServer, release_namespace: str) -> Iterator[Other]:
    """Makes the webhook's configuration of a release, by name and namespace."""

    def make(release: str, namespace: str) -> None:
        owner = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace}
        labels = {"app.kubernetes.io/part-of": "tangram", "app.kubernetes.io/managed-by": "Helm"}
        thing = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": f"{release}-webhook", "labels": labels, "annotations": owner},
        }
        api("POST", CONFIGURATIONS, thing)
        made.append(f"{CONFIGURATIONS}/{release}-webhook")

    made: list[str] = []
    yield make
    for path in made:
        api("DELETE", path)


@pytest.mark.parametrize(("release", "namespace"), [("second", NAMESPACE), ("tangram", "elsewhere")])
def test_a_second_release_in_a_cluster_is_refused_and_the_first_is_named(
    helm: Helm, api: ApiServer, other: Other, release: str, namespace: str
) -> None:
    other(release, namespace)
    with pytest.raises(Refused, match=f"release {release} in namespace {namespace} has installed this chart already"):
        helm.notes({}, api.kubeconfig)


def test_the_release_itself_and_what_no_helm_installed_are_no_second_one(
    helm: Helm, api: ApiServer, other: Other
) -> None:
    other("tangram", NAMESPACE)
    api("POST", CONFIGURATIONS, {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "by-hand", "labels": {"app.kubernetes.io/part-of": "tangram"}},
    })  # fmt: skip
    try:
        assert helm.notes({}, api.kubeconfig)
    finally:
        api("DELETE", f"{CONFIGURATIONS}/by-hand")


@pytest.mark.parametrize("values", [{"accessMode": "nvidia"}, {"runtimeClassName": "gpus"}])
def test_a_runtime_class_that_is_not_there_is_named(
    helm: Helm, api: ApiServer, release_namespace: str, values: dict[str, Any]
) -> None:
    name = values.get("runtimeClassName", "nvidia")
    warning = f"this cluster has no RuntimeClass {name} "
    assert warning in helm.notes(values, api.kubeconfig)
    thing = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "nvidia"}
    api("POST", CLASSES, thing)
    try:
        assert warning not in helm.notes(values, api.kubeconfig)
    finally:
        api("DELETE", f"{CLASSES}/{name}")


def test_without_a_runtime_class_nothing_is_said_of_one(helm: Helm, api: ApiServer, release_namespace: str) -> None:
    assert "RuntimeClass" not in helm.notes({"accessMode": "cdi"}, api.kubeconfig)


@pytest.mark.parametrize(("version", "refused"), [("v1.29.9", True), ("v1.30.0-gke.1", False)])
def test_an_older_kubernetes_is_refused_with_both_versions(helm: Helm, version: str, *, refused: bool) -> None:
    if not refused:
        assert helm.objects(kube=version).items
        return
    with pytest.raises(
        Refused, match=rf"requires kubeVersion: >=1\.30\.0-0 which is incompatible with Kubernetes {version}"
    ):
        helm.objects(kube=version)


def test_the_notes_say_that_kube_scheduler_stays_old(helm: Helm, api: ApiServer, release_namespace: str) -> None:
    notes = " ".join(helm.notes({}, api.kubeconfig).split())
    assert "An upgrade of the control plane does not change that." in notes
    assert "after each upgrade of the control plane, run `helm upgrade`" in notes
    assert "control plane" not in helm.notes({"scheduler": {"enabled": False}}, api.kubeconfig)
