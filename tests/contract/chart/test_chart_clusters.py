"""Clusters whose network, version or processors differ from those that the chart is made on: what it renders for them works there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hack.cluster.programs import kubernetes_version
from tests.contract.chart.rendering import CHART, EXAMPLES, NAMESPACE, ROOT, Helm, Objects, Refused

DEFAULTS: Final = yaml.safe_load((CHART / "values.yaml").read_text())
ANYWHERE: Final = ["0.0.0.0/0", "::/0"]


@pytest.mark.parametrize("cidrs", [None, [], ANYWHERE, ANYWHERE[:1]])
def test_egress_to_the_api_server_matches_nodes_where_no_address_is_named(helm: Helm, cidrs: list[str] | None) -> None:
    """Cilium matches no node by an ipBlock, not even by one of all addresses. So a rule with such a peer would start nothing there."""
    values = {} if cidrs is None else {"networkPolicy": {"apiServerCIDRs": cidrs}}
    policies = helm.objects(values).of("NetworkPolicy")
    assert set(policies) == {"tangram-node", "tangram-scheduler", "tangram-webhook"}
    for policy in policies.values():
        (rule,) = policy["spec"]["egress"]
        assert rule.keys() == {"ports"}
        assert [port["port"] for port in rule["ports"]] == DEFAULTS["networkPolicy"]["apiServerPorts"]


@pytest.mark.parametrize("cidrs", [["10.0.0.1/32"], ["0.0.0.0/0", "fd00::/8"]])
def test_egress_is_limited_to_the_addresses_that_are_named(helm: Helm, cidrs: list[str]) -> None:
    """Addresses of all of IPv4 beside some of IPv6 limit IPv6, so none of the two is left out."""
    for policy in helm.objects({"networkPolicy": {"apiServerCIDRs": cidrs}}).of("NetworkPolicy").values():
        (rule,) = policy["spec"]["egress"]
        assert [peer["ipBlock"]["cidr"] for peer in rule["to"]] == cidrs


def test_an_address_that_is_none_is_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match="apiServerCIDRs"):
        helm.objects({"networkPolicy": {"apiServerCIDRs": ["api.example.com"]}})


@pytest.mark.parametrize(
    ("given", "tag"),
    [
        ("1.34", "v1.34.4"),  # `helm template --kube-version 1.34`
        ("v1.34.0", "v1.34.4"),  # what an older helm makes of it, as in some versions of Argo CD
        ("v1.34.0+k3s1", "v1.34.4"),
        ("1.34.2", "v1.34.2"),
        ("1.199", "v1.199.0"),
    ],
)
def test_kube_scheduler_has_a_tag_where_the_patch_is_not_known(helm: Helm, given: str, tag: str) -> None:
    values = {"scheduler": {"kubeScheduler": {"patches": ["v1.33.9", "v1.34.4"]}}}
    assert (
        helm.objects(values, kube=given).container("kube-scheduler")["image"] == f"registry.k8s.io/kube-scheduler:{tag}"
    )


def test_the_patches_that_the_chart_knows_are_of_every_version_that_it_supports() -> None:
    patches = dict(one.rsplit(".", 1) for one in DEFAULTS["scheduler"]["kubeScheduler"]["patches"])
    assert list(patches) == [f"v1.{minor}" for minor in range(30, 30 + len(patches))]
    pinned, _, patch = kubernetes_version().rpartition(".")
    assert int(patches[pinned]) >= int(patch), "run hack/update-kubernetes-patches"


def arch_terms(affinity: dict[str, Any]) -> list[list[list[str]]]:
    """Of each term of the required node affinity: the architectures that each of its expressions admits."""
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return [
        [one["values"] for one in term.get("matchExpressions", []) if one["key"] == "kubernetes.io/arch"]
        for term in terms
    ]


def test_no_pod_runs_on_a_node_that_the_image_is_not_made_for(rendered: Objects) -> None:
    seen = set()
    for thing, template in rendered.pods():
        if thing["kind"] != "Pod":  # the pod of `helm test` requests a GPU, which only nodes of the DaemonSet have
            seen.add(thing["kind"])
            for (architectures,) in arch_terms(template["spec"]["affinity"]):
                assert "amd64" in architectures, thing["metadata"]["name"]
    assert {"DaemonSet", "Deployment"} <= seen


def test_one_value_lists_the_architectures_and_an_empty_list_admits_all(helm: Helm) -> None:
    both = helm.objects({"architectures": ["amd64", "arm64"]})
    for thing, template in both.pods():
        if thing["kind"] == "Pod":  # as above
            continue
        assert set(map(str, arch_terms(template["spec"]["affinity"]))) == {"[['amd64', 'arm64']]"}, thing["metadata"]
    for _, template in helm.objects({"architectures": []}).pods():
        assert "kubernetes.io/arch" not in str(template["spec"].get("affinity"))


def test_an_affinity_of_the_operators_keeps_what_it_says_beside_the_architecture(helm: Helm) -> None:
    wanted = {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["gpu"]}]}
    named = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    preferred = [{"weight": 1, "preference": wanted}]
    own = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [wanted, named]},
            "preferredDuringSchedulingIgnoredDuringExecution": preferred,
        },
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]},
    }
    arch = {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}
    objects = helm.objects({name: {"affinity": own} for name in ("node", "scheduler", "webhook")})
    for kind, name in (("DaemonSet", "node"), ("Deployment", "scheduler"), ("Deployment", "webhook")):
        affinity = objects.one(kind, f"tangram-{name}")["spec"]["template"]["spec"]["affinity"]
        required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert required == [
            {"matchExpressions": [*wanted["matchExpressions"], arch]},
            named | {"matchExpressions": [arch]},
        ]
        assert affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == preferred
        assert affinity["podAffinity"] == own["podAffinity"]
        assert affinity.keys() == own.keys()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_account_of_the_device_plugin_is_limited_to_its_node_whatever_is_switched_off(
    helm: Helm, example: str
) -> None:
    """It may patch nodes, and RBAC cannot say which. So the policy that says it is not an option."""
    off = yaml.safe_load(EXAMPLES[example].read_text()) | {"policy": {"enabled": False}, "burst": {"enabled": False}}
    objects = helm.objects(off)
    (rules,) = [role["rules"] for name, role in objects.of("ClusterRole").items() if name.endswith("-node")]
    assert "patch" in {verb for rule in rules if rule.get("resources") == ["nodes"] for verb in rule["verbs"]}
    (policy,) = [one for name, one in objects.of("ValidatingAdmissionPolicy").items() if name.endswith("-nodes")]
    (binding,) = [
        one for name, one in objects.of("ValidatingAdmissionPolicyBinding").items() if name.endswith("-nodes")
    ]
    account = f"system:serviceaccount:{NAMESPACE}:{node_account(objects)}"
    assert policy["spec"]["variables"][0] == {
        "name": "plugin",
        "expression": f"request.userInfo.username == '{account}'",
    }
    assert (binding["spec"]["policyName"], binding["spec"]["validationActions"]) == (
        policy["metadata"]["name"],
        ["Deny"],
    )
    left = {name.rpartition("-")[2] for name in objects.of("ValidatingAdmissionPolicy")}
    assert left == ({"nodes"} if example == "nvidia" else {"nodes", "secrets"}), "those about pods are switched off"


def node_account(objects: Objects) -> str:
    (found,) = [name for name in objects.of("ServiceAccount") if name.endswith("-node")]
    return found


def test_one_value_sets_the_registry_of_every_image(helm: Helm) -> None:
    values = yaml.safe_load(EXAMPLES["host-pool"].read_text())
    images = {
        container["image"]
        for _, container in helm.objects(values | {"global": {"imageRegistry": "r.example"}}).containers()
    }
    version = f"r.example/kube-scheduler:{kubernetes_version()}"
    assert images == {"r.example/tangram-sh/tangram:0.1.0", "r.example/python:3.13-slim", version}


@pytest.mark.parametrize("image", ["quay.io/python:3", "localhost/python:3", "registry:5000/python:3"])
def test_an_image_that_names_its_registry_keeps_it(helm: Helm, image: str) -> None:
    objects = helm.objects({"global": {"imageRegistry": "r.example"}, "test": {"image": image}})
    assert image in {container["image"] for _, container in objects.containers()}


def test_secrets_of_all_charts_are_used_beside_those_of_this_one(helm: Helm) -> None:
    objects = helm.objects(
        {"imagePullSecrets": [{"name": "a"}], "global": {"imagePullSecrets": [{"name": "b"}, {"name": "a"}]}}
    )
    for _, template in objects.pods():
        assert template["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    for account in objects.of("ServiceAccount").values():
        assert account["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_values_of_other_charts_are_no_mistake_where_all_charts_share_them(helm: Helm) -> None:
    assert helm.objects({"global": {"storageClass": "fast"}}).items
    with pytest.raises(Refused, match="imageRegistry"):
        helm.objects({"global": {"imageRegistry": ["a"]}})


@pytest.mark.parametrize(
    ("version", "refused"), [("v3.13.3", True), ("v3.14.0", False), ("v3.22", False), ("v4.3.1", False)]
)
def test_an_older_helm_is_refused(helm: Helm, tmp_path: Path, version: str, *, refused: bool) -> None:
    """As it would be by that helm: the check is given its version."""
    chart = tmp_path / "tangram"
    shutil.copytree(CHART, chart)
    (chart / "templates/check.yaml").write_text('{{ include "tangram.checkHelm" "' + version + '" }}')
    arguments = ("template", "tangram", str(chart), "-n", NAMESPACE, "--kube-version", kubernetes_version())
    if not refused:
        helm(*arguments)
        return
    with pytest.raises(Refused, match=rf"helm is {version}: this chart needs 3\.14 or newer"):
        helm(*arguments)


def test_no_page_upgrades_with_values_of_the_old_chart() -> None:
    """With --reuse-values the new templates lack every value that was added since, and fail."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    upgrading = [page for page in pages if "helm upgrade" in page.read_text()]
    assert upgrading
    assert [page for page in upgrading if " --reuse-values" in page.read_text()] == []
