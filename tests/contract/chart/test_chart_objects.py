"""What the chart renders, for every example of values: whole, connected, and with no more rights than it says."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.apiserver import ApiServer
from tests.contract.chart.rendering import EXAMPLES, NAMESPACE, Helm, Objects, Refused, env
from tests.contract.chart.rights import assert_confined

CLUSTER_WIDE = {
    "ClusterRole", "ClusterRoleBinding", "PriorityClass", "MutatingWebhookConfiguration",
    "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding",
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_lint_finds_nothing(helm: Helm, example: str) -> None:
    chart = EXAMPLES[example].parents[1]
    said = helm(
        "lint", "--strict", str(chart), "-n", NAMESPACE, "--kube-version", "v1.36.3", "-f", str(EXAMPLES[example])
    )
    assert "0 chart(s) failed" in said


def test_every_object_is_named_once_and_labelled(rendered: Objects) -> None:
    seen = [(thing["kind"], thing["metadata"]["name"], thing["metadata"].get("namespace")) for thing in rendered.items]
    assert len(seen) == len(set(seen))
    for thing in rendered.items:
        labels = thing["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "tangram", thing["metadata"]["name"]
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert ("namespace" in thing["metadata"]) == (thing["kind"] not in CLUSTER_WIDE), thing["metadata"]["name"]


def test_selectors_find_the_pods_they_mean_and_no_others(rendered: Objects) -> None:
    pods = {thing["metadata"]["name"]: template["metadata"]["labels"] for thing, template in rendered.pods()}
    selecting = ("DaemonSet", "Deployment", "PodDisruptionBudget", "NetworkPolicy", "Service")
    for thing in (thing for thing in rendered.items if thing["kind"] in selecting):
        spec = thing["spec"]
        selector = spec.get("podSelector", spec.get("selector"))
        wanted = selector.get("matchLabels", selector)
        found = [name for name, labels in pods.items() if wanted.items() <= labels.items()]
        assert found == [thing["metadata"]["name"].removesuffix("-metrics")], thing["kind"]


def test_what_a_pod_refers_to_is_there(rendered: Objects) -> None:
    for thing, template in rendered.pods():
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        inside = [*spec.get("initContainers", []), *spec["containers"]]
        mounted = {mount["name"] for c in inside for mount in c.get("volumeMounts", [])}
        assert mounted == set(volumes), thing["metadata"]["name"]
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in rendered.of("ConfigMap")
            if "secret" in volume:
                assert volume["secret"]["secretName"] in {
                    *rendered.of("Secret"), *(c["spec"]["secretName"] for c in rendered.of("Certificate").values())
                }  # fmt: skip
        if thing["kind"] != "Pod":
            assert spec["serviceAccountName"] in rendered.of("ServiceAccount")
        for container in spec["containers"]:
            ports = {port["name"] for port in container.get("ports", [])}
            probes = [container[key] for key in ("livenessProbe", "readinessProbe") if key in container]
            assert {probe["httpGet"]["port"] for probe in probes} <= ports
            assert container["resources"]["limits"], container["name"]


def test_bindings_bind_roles_to_accounts_that_exist(rendered: Objects) -> None:
    for kind in ("Role", "ClusterRole"):
        for binding in rendered.of(f"{kind}Binding").values():
            for subject in binding["subjects"]:
                assert subject["name"] in rendered.of("ServiceAccount")
                assert subject["namespace"] == NAMESPACE
            role = binding["roleRef"]["name"]
            foreign = {"system:kube-scheduler", "system:volume-scheduler", "extension-apiserver-authentication-reader"}
            assert role in rendered.of(binding["roleRef"]["kind"]) or role in foreign


def test_no_rule_has_a_wildcard(rendered: Objects) -> None:
    for kind in ("Role", "ClusterRole"):
        for role in rendered.of(kind).values():
            for rule in role["rules"]:
                assert not any("*" in word for words in rule.values() for word in words), role["metadata"]["name"]


def test_everything_but_the_node_pod_is_restricted(rendered: Objects) -> None:
    """As the Pod Security level `restricted` says, and a read-only root on top."""
    for thing, template in rendered.pods():
        spec = template["spec"]
        if thing["kind"] != "DaemonSet":
            context = spec["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] == 65532
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not any("hostPath" in volume for volume in spec.get("volumes", []))
            assert not spec.get("hostPID")
            for container in spec["containers"]:
                assert_confined(container)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_version_of_kubernetes_gets_the_same_objects(helm: Helm, example: str) -> None:
    """But for kube-scheduler's version, and policies that change objects, which none before 1.36 serves by default. So what the API server of one
    version takes is what all are given."""
    given = {f"v1.{minor}.4": helm.text(EXAMPLES[example], kube=f"v1.{minor}.4") for minor in (30, 33, 35, 36, 37)}
    plain = {kube: text.replace(kube, "v0") for kube, text in given.items()}
    assert plain["v1.30.4"] == plain["v1.33.4"] == plain["v1.35.4"]
    assert plain["v1.36.4"] == plain["v1.37.4"]
    newer, older = (list(yaml.safe_load_all(plain[kube])) for kube in ("v1.36.4", "v1.35.4"))
    assert [thing for thing in newer if thing and not thing["kind"].startswith("MutatingAdmissionPolicy")] == [
        thing for thing in older if thing
    ]


def test_clusters_without_what_the_chart_needs_are_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"1\.30"):
        helm.objects(kube="v1.29.9")


def test_priority_classes_are_given_only_when_requested(local: Objects, nvidia: Objects) -> None:
    assert "TANGRAM_WEBHOOK_PRIORITY_CLASSES" not in env(local.container("webhook"))
    mapping = yaml.safe_load(env(nvidia.container("webhook"))["TANGRAM_WEBHOOK_PRIORITY_CLASSES"])
    assert set(mapping.values()) == set(nvidia.of("PriorityClass"))
    by_value = sorted(nvidia.of("PriorityClass").values(), key=lambda thing: -thing["value"])
    assert [thing["metadata"]["name"] for thing in by_value] == [
        "tangram-latency-critical", "tangram-standard", "tangram-best-effort"
    ]  # fmt: skip


def test_the_notes_name_the_image_that_nodes_must_be_able_to_pull(helm: Helm, api: ApiServer) -> None:
    notes = helm.notes({"image": {"registry": "registry.example", "repository": "gpu", "tag": "7"}}, api.kubeconfig)
    assert "registry.example/gpu:7" in notes
    assert "ImagePullBackOff" in notes


def test_an_existing_scheduler_is_shown_what_it_needs(helm: Helm, api: ApiServer) -> None:
    example = EXAMPLES["own-scheduler"]
    objects, notes = helm.objects(example), helm.notes(example, api.kubeconfig)
    assert not any("scheduler" in name for name in objects.of("Deployment"))
    snippet = re.search(r"^  extenders:\n(?:    .*\n)+", notes, re.MULTILINE)
    assert snippet
    extender, _ = yaml.safe_load(snippet[0])["extenders"]
    assert extender["bindVerb"] == "bind"
    beside = re.search(r"^  - command:\n(?:    .*\n|  - .*\n)+", notes, re.MULTILINE)
    assert beside
    assert yaml.safe_load(beside[0])[0]["command"] == ["tangram-extender"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_notes_show_a_pod_that_requests(helm: Helm, api: ApiServer, example: str) -> None:
    notes = helm.notes(EXAMPLES[example], api.kubeconfig)
    shown = re.search(r"^  apiVersion: v1\n(?:  .*\n)+", notes, re.MULTILINE)
    assert shown
    limits = yaml.safe_load(shown[0])["spec"]["containers"][0]["resources"]["limits"]
    domain = "gpu.example.com" if example == "own-domain" else "tangram.sh"
    assert limits == {f"{domain}/gpu-mem": "8Gi", f"{domain}/gpu-core": 30}


def test_another_domain_reaches_every_component(helm: Helm) -> None:
    # the label of the operator's own nodes and the CDI kind stay, whatever users' names are
    assert "tangram.sh/" not in helm.text(EXAMPLES["own-domain"])
    for name in ("plugin", "extender", "webhook"):
        values = env(helm.objects(EXAMPLES["own-domain"]).container(name))
        assert [value for key, value in values.items() if key.endswith("_DOMAIN")] == ["gpu.example.com"]


def test_images_are_named_by_digest_tag_or_app_version(helm: Helm) -> None:
    def image(**given: str) -> str:
        return str(helm.objects({"image": given}).container("webhook")["image"])

    assert image() == "ghcr.io/tangram-sh/tangram:0.1.0"
    assert image(tag="dev", registry="") == "tangram-sh/tangram:dev"
    assert image(tag="dev", digest="sha256:" + "0" * 64) == "ghcr.io/tangram-sh/tangram@sha256:" + "0" * 64


def test_the_test_pod_goes_the_way_of_every_pod(local: Objects) -> None:
    pod = local.one("Pod", "tangram-test")
    assert pod["metadata"]["namespace"] == "default"
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"tangram.sh/gpu-mem": 1}
    assert "schedulerName" not in pod["spec"]


def test_a_test_in_a_namespace_that_the_webhook_leaves_out_is_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"test\.namespace is tangram-system"):
        helm.objects({"test": {"image": "x", "namespace": NAMESPACE}})
