"""Values that add to what the chart renders: each arrives where it says, and none takes from the pods on nodes what enforcement needs.

That the API server knows every field is in test_chart_release, which applies ci/every-knob-values.yaml.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.apiserver import ApiServer
from tests.contract.chart.rendering import EXAMPLES, NAMESPACE, Helm, Objects, Refused, env
from tests.contract.chart.test_chart_release import path_of

KNOBS: Final = yaml.safe_load(EXAMPLES["every-knob"].read_text())
COMPONENTS: Final = {
    "node": ("DaemonSet", KNOBS["node"]),
    "pool": ("DaemonSet", KNOBS["burst"]["pool"]),
    "scheduler": ("Deployment", KNOBS["scheduler"]),
    "webhook": ("Deployment", KNOBS["webhook"]),
}
"""Component -> kind, values."""
CONTAINERS: Final = {
    "plugin": KNOBS["node"]["plugin"],
    "arbiter": KNOBS["node"]["arbiter"],
    "pool": KNOBS["burst"]["pool"],
    "kube-scheduler": KNOBS["scheduler"]["kubeScheduler"],
    "extender": KNOBS["scheduler"]["extender"],
    "webhook": KNOBS["webhook"],
}


@pytest.fixture(scope="module")
def knobs(helm: Helm) -> Objects:
    return helm.objects(EXAMPLES["every-knob"])


@pytest.mark.parametrize("component", COMPONENTS)
def test_an_object_and_its_pods_have_what_the_values_add(knobs: Objects, component: str) -> None:
    kind, values = COMPONENTS[component]
    thing = knobs.one(kind, f"tangram-{component}")
    prefix = kind[0].lower() + kind[1:]
    assert values[f"{prefix}Labels"].items() <= thing["metadata"]["labels"].items()
    assert thing["metadata"]["annotations"] == values[f"{prefix}Annotations"]
    assert thing["spec"]["revisionHistoryLimit"] == 3
    template = thing["spec"]["template"]
    labels = values["podLabels"] | KNOBS["podLabels"] | KNOBS["commonLabels"]
    assert labels.items() <= template["metadata"]["labels"].items()
    assert KNOBS["podAnnotations"].items() <= template["metadata"]["annotations"].items()
    spec = template["spec"]
    assert values["initContainers"][0] == spec["initContainers"][0], "before those of the chart"
    assert values["extraVolumes"][0] in spec["volumes"]
    account = values["serviceAccount"]["name"]
    assert spec["serviceAccountName"] == account
    assert knobs.one("ServiceAccount", account)["metadata"]["annotations"] == {"owner": "platform"}
    if "podSecurityContext" in values:
        assert values["podSecurityContext"].items() <= spec["securityContext"].items()


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_has_what_the_values_add(knobs: Objects, name: str) -> None:
    container, values = knobs.container(name), CONTAINERS[name]
    assert container["args"] == values["extraArgs"]
    for mount in values.get("extraVolumeMounts", []):
        assert mount in container["volumeMounts"]
    for variable in values.get("extraEnv", []):
        assert variable in container["env"]
    assert values.get("securityContext", {}).items() <= container["securityContext"].items()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe in values:
            assert values[probe].items() <= container[probe].items()
            assert container[probe]["httpGet"]["path"] in ("/healthz", "/readyz")
            assert container[probe]["periodSeconds"], "what is not set stays"


def test_strategies_and_spreading_are_those_that_are_set(knobs: Objects) -> None:
    for component in ("scheduler", "webhook"):
        spec = knobs.one("Deployment", f"tangram-{component}")["spec"]
        assert spec["strategy"] == KNOBS[component]["strategy"]
        (given,), (spread,) = (
            KNOBS[component]["topologySpreadConstraints"],
            spec["template"]["spec"]["topologySpreadConstraints"],
        )
        assert given.items() <= spread.items()
        # without a selector Kubernetes would count no pod
        own = given.get("labelSelector", {"matchLabels": spec["selector"]["matchLabels"]})
        assert spread["labelSelector"] == own
    assert knobs.one("DaemonSet", "tangram-node")["spec"]["updateStrategy"] == KNOBS["node"]["updateStrategy"]


def test_monitors_are_as_the_values_say(knobs: Objects) -> None:
    values = KNOBS["serviceMonitor"]
    for component in COMPONENTS:
        monitor = knobs.one("ServiceMonitor", f"tangram-{component}-metrics")
        assert monitor["metadata"]["namespace"] == "monitoring"
        assert monitor["metadata"]["annotations"] == values["annotations"]
        assert values["labels"].items() <= monitor["metadata"]["labels"].items()
        assert monitor["spec"]["namespaceSelector"] == {"matchNames": [NAMESPACE]}
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["scrapeTimeout"] == "10s"
            ours = [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}]
            of_nodes = component in ("node", "pool")
            assert endpoint["relabelings"] == [*(ours if of_nodes else []), *values["relabelings"]]
            assert endpoint["metricRelabelings"] == values["metricRelabelings"]
    (rule,) = knobs.of("PrometheusRule").values()
    assert (rule["metadata"]["namespace"], rule["metadata"]["annotations"]) == ("monitoring", {"owner": "platform"})


def test_the_rights_are_those_of_the_accounts_that_are_named(knobs: Objects) -> None:
    subjects = {
        (binding["metadata"]["name"], subject["name"])
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for binding in knobs.of(kind).values()
        for subject in binding["subjects"]
    }
    assert {name for _, name in subjects} == {"gpu-node", "gpu-scheduler", "gpu-webhook", "tangram-cleanup"}
    policies = str(knobs.of("ValidatingAdmissionPolicy"))
    assert f"system:serviceaccount:{NAMESPACE}:gpu-node'" in policies
    assert f"system:serviceaccount:{NAMESPACE}:tangram-node'" not in policies


def test_an_account_that_exists_is_not_made_and_gets_the_rights(helm: Helm) -> None:
    objects = helm.objects({"webhook": {"serviceAccount": {"create": False, "name": "mine"}}})
    assert set(objects.of("ServiceAccount")) == {"tangram-node", "tangram-scheduler", "tangram-cleanup"}
    assert objects.one("Deployment", "tangram-webhook")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert objects.one("RoleBinding", "tangram-webhook")["subjects"][0]["name"] == "mine"


def test_another_namespace_is_that_of_everything(helm: Helm) -> None:
    elsewhere = {"namespaceOverride": "gpus", "serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    values = yaml.safe_load(EXAMPLES["host-pool"].read_text()) | elsewhere
    text = helm.text(values)
    assert NAMESPACE not in text
    objects = Objects([thing for thing in yaml.safe_load_all(text) if thing])
    tests = {thing["metadata"]["name"] for thing in objects.items if thing["metadata"].get("namespace") == "default"}
    assert tests == {"tangram-test"}
    others = {thing["metadata"].get("namespace", "gpus") for thing in objects.items} - {"default"}
    assert others == {"gpus", "kube-system"}
    (webhook,) = objects.one("MutatingWebhookConfiguration", "tangram-webhook")["webhooks"]
    assert webhook["clientConfig"]["service"]["namespace"] == "gpus"
    assert "tangram-webhook.gpus.svc" in str(env(objects.container("webhook"))["TANGRAM_WEBHOOK_DNS_NAMES"])
    assert "system:serviceaccount:gpus:tangram-node" in str(objects.of("ValidatingAdmissionPolicy"))


def test_a_platform_may_choose_the_user_of_pods_that_need_none(helm: Helm) -> None:
    """As OpenShift does: a fixed user is refused there, unless a key is set to null."""
    no_user = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None}}
    objects = helm.objects({"webhook": no_user, "scheduler": no_user, "cleanup": no_user, "test": no_user})
    for thing, template in objects.pods():
        if thing["kind"] != "DaemonSet":
            context = template["spec"]["securityContext"]
            assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----\nTUlJ\n-----END CERTIFICATE-----\n"


def test_a_certificate_of_the_operators_needs_no_rights(helm: Helm) -> None:
    objects = helm.objects({"webhook": {"tls": {"secretName": "served", "caBundle": CERTIFICATE}}})
    (webhook,) = objects.one("MutatingWebhookConfiguration", "tangram-webhook")["webhooks"]
    assert base64.b64decode(webhook["clientConfig"]["caBundle"]).decode() == CERTIFICATE
    template = objects.one("Deployment", "tangram-webhook")["spec"]["template"]["spec"]
    assert {"name": "certificate", "secret": {"secretName": "served"}} in template["volumes"]
    assert template["automountServiceAccountToken"] is False
    given = env(objects.container("webhook"))
    assert (given["TANGRAM_WEBHOOK_CERT_MODE"], given["TANGRAM_WEBHOOK_CERT_FOLDER"]) == ("files", "/certs")
    assert "tangram-webhook" not in {**objects.of("Role"), **objects.of("ClusterRole")}
    assert "tangram-webhook-tls" not in objects.of("Secret")
    assert "tangram-secrets" not in objects.of("ValidatingAdmissionPolicy")
    assert not objects.of("Certificate")


def test_a_ca_that_a_controller_injects_is_left_to_it(helm: Helm) -> None:
    inject = {"service.beta.openshift.io/inject-cabundle": "true"}
    served = {"service.beta.openshift.io/serving-cert-secret-name": "served"}
    values = {"tls": {"secretName": "served"}, "configurationAnnotations": inject, "serviceAnnotations": served}
    objects = helm.objects({"webhook": values})
    configuration = objects.one("MutatingWebhookConfiguration", "tangram-webhook")
    assert configuration["metadata"]["annotations"] == inject
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]
    assert objects.one("Service", "tangram-webhook")["metadata"]["annotations"] == served


def test_the_api_server_takes_the_ca_of_the_values(
    helm: Helm, api: ApiServer, release_namespace: str, tmp_path: Path
) -> None:
    from hack.cluster.pki import make_authority

    make_authority(tmp_path / "pki")
    pem = (tmp_path / "pki/ca.crt").read_text()
    objects = helm.objects({"webhook": {"tls": {"secretName": "served", "caBundle": pem}}})
    configuration = objects.one("MutatingWebhookConfiguration", "tangram-webhook")
    options = "fieldManager=test&force=true&fieldValidation=Strict&dryRun=All"
    path = f"{path_of(api, configuration)}/tangram-webhook?{options}"
    taken = api("PATCH", path, configuration, content_type="application/apply-patch+yaml")
    assert base64.b64decode(taken["webhooks"][0]["clientConfig"]["caBundle"]).decode() == pem


def test_without_leader_election_the_old_scheduler_ends_before_the_new_one_starts(helm: Helm) -> None:
    alone = {"leaderElect": False, "replicas": 1}
    assert helm.objects({"scheduler": alone}).one("Deployment", "tangram-scheduler")["spec"]["strategy"] == {
        "type": "Recreate"
    }
    assert "strategy" not in helm.objects().one("Deployment", "tangram-scheduler")["spec"]
    with pytest.raises(Refused, match="two active schedulers would give one GPU away twice"):
        helm.objects({"scheduler": alone | {"strategy": {"type": "RollingUpdate"}}})


def mount(path: str) -> list[dict[str, Any]]:
    return [{"name": "mine", "mountPath": path}]


def cut(of: str, **context: Any) -> dict[str, Any]:
    """Values with a security context of that container of the node."""
    if of == "pool":
        return {"burst": {"enabled": True, "hostPool": "1Gi", "pool": {"securityContext": context}}}
    return {"node": {of: {"securityContext": context}}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"node": {"podSecurityContext": {"runAsUser": 1000}}}, r"node\.podSecurityContext has runAsUser=1000: .* must run as root"),
        ({"node": {"podSecurityContext": {"runAsNonRoot": True}}}, "has runAsNonRoot=true: .* must run as root"),
        (cut("plugin", runAsUser=1), r"node\.plugin\.securityContext has runAsUser=1: .* must run as root"),
        (cut("arbiter", runAsNonRoot=True), r"node\.arbiter\.securityContext has runAsNonRoot=true"),
        (cut("pool", runAsUser=1), r"burst\.pool\.securityContext has runAsUser=1"),
        (cut("plugin", privileged=False), r"node\.plugin\.securityContext has privileged=false: node\.privileged says"),
        (cut("arbiter", privileged=True), r"node\.arbiter\.securityContext has privileged=true: .* never is"),
        (cut("arbiter", capabilities={"add": ["SYS_PTRACE"]}), "has no KILL in add: the arbiter could not kill"),
        (cut("arbiter", capabilities={"drop": ["ALL", "KILL"]}), "has no KILL in add"),
        (cut("plugin", allowPrivilegeEscalation=False), "has allowPrivilegeEscalation=false, and the container is privileged"),
        ({"node": {"arbiter": {"extraVolumeMounts": mount("/var/lib/tangram/grants/")}}}, r"mounts /var/lib/tangram/grants/: that would hide"),
        ({"node": {"plugin": {"extraVolumeMounts": mount("/var/lib/tangram")}}}, "would hide what Tangram has in /var/lib/tangram"),
        ({"node": {"plugin": {"extraVolumeMounts": mount("/driver-root/../driver-root/lib")}}}, "hide what Tangram has in /driver-root"),
        ({"burst": {"pool": {"extraVolumeMounts": mount("/pool/a")}}}, "hide what Tangram has in /pool"),
        ({"node": {"updateStrategy": {"rollingUpdate": {"maxSurge": "25%"}}}}, "maxSurge is 25%: two device plugins on one node"),
        ({"node": {"serviceAccount": {"create": False}}}, r"node\.serviceAccount\.create is false without a name"),
        ({"webhook": {"serviceAccount": {"name": "default"}}}, "the account that every pod of the namespace has"),
        ({"webhook": {"serviceAccount": {"name": "tangram-node"}}}, r"webhook\.serviceAccount\.name is tangram-node, as that of node"),
        ({"podLabels": {"app.kubernetes.io/component": "x"}}, r"podLabels has app\.kubernetes\.io/component: the chart finds its own pods"),
        ({"node": {"podLabels": {"app.kubernetes.io/name": "x"}}}, r"node\.podLabels has app\.kubernetes\.io/name"),
        ({"scheduler": {"kubeScheduler": {"extraArgs": ["--config=/mine"]}}}, "extraArgs has --config=/mine: .* would not reach the extender"),
        ({"scheduler": {"kubeScheduler": {"extraArgs": ["--feature-gates=A=true"]}}}, "use scheduler.kubeScheduler.featureGates"),
        ({"webhook": {"tls": {"secretName": "served"}}}, "the API server would not trust the webhook"),
        ({"webhook": {"tls": {"caBundle": CERTIFICATE}}}, r"set without webhook\.tls\.secretName"),
        ({"webhook": {"tls": {"secretName": "a", "caBundle": CERTIFICATE}, "certManager": {"enabled": True}}}, "only one of them"),
        ({"serviceMonitor": {"interval": "30s", "scrapeTimeout": "1m"}}, "scrapeTimeout is 1m: .* which is 30s"),
    ],
)  # fmt: skip
def test_what_would_break_a_component_is_refused_in_a_sentence(
    helm: Helm, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Refused, match=sentence):
        helm.objects(values)


@pytest.mark.parametrize(
    "values",
    [
        {"node": {"podSecurityContext": {"runAsUser": 0}}},
        cut("arbiter", capabilities={"add": ["KILL", "SYS_PTRACE"]}),
        {"accessMode": "nvidia"} | cut("plugin", allowPrivilegeEscalation=False),
        {"node": {"plugin": {"extraVolumeMounts": mount("/var/lib/tangram-more")}}},
        {"node": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}}},
    ],
)
def test_what_only_looks_like_it_is_taken(helm: Helm, values: dict[str, Any]) -> None:
    assert helm.objects(values).items


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"namespaceOverride": "Not_A_Name"}, "namespaceOverride"),
        ({"revisionHistoryLimit": -1}, "revisionHistoryLimit"),
        ({"architectures": "amd64"}, "architectures"),
        ({"node": {"podSecurityContext": {"fsGroup": "a"}}}, "fsGroup"),
        ({"webhook": {"securityContext": {"runAsUsr": 1}}}, "runAsUsr"),
        ({"webhook": {"securityContext": {"capabilities": {"add": ["sys_admin"]}}}}, "capabilities"),
        ({"webhook": {"podSecurityContext": {"seccompProfile": {"type": "None"}}}}, "seccompProfile"),
        ({"webhook": {"livenessProbe": {"httpGet": {"path": "/"}}}}, "httpGet"),
        ({"webhook": {"readinessProbe": {"periodSeconds": 0}}}, "periodSeconds"),
        ({"scheduler": {"strategy": {"type": "OnDelete"}}}, "strategy"),
        ({"node": {"updateStrategy": {"type": "Recreate"}}}, "updateStrategy"),
        ({"webhook": {"strategy": {"rollingUpdate": {"maxSurge": "many"}}}}, "maxSurge"),
        ({"scheduler": {"topologySpreadConstraints": [{"maxSkew": 1}]}}, "topologySpreadConstraints"),
        ({"scheduler": {"initContainers": [{"name": "a"}]}}, "initContainers"),
        ({"webhook": {"extraVolumes": [{"emptyDir": {}}]}}, "extraVolumes"),
        ({"webhook": {"extraVolumeMounts": [{"name": "a", "mountPath": "b"}]}}, "mountPath"),
        ({"scheduler": {"extender": {"extraArgs": [1]}}}, "extraArgs"),
        ({"webhook": {"serviceAccount": {"annotations": {"a": 1}}}}, "annotations"),
        ({"webhook": {"serviceAccount": {"name": "A"}}}, "serviceAccount"),
        ({"webhook": {"tls": {"caBundle": "TUlJ"}}}, "caBundle"),
        ({"serviceMonitor": {"scrapeTimeout": "10"}}, "scrapeTimeout"),
        ({"serviceMonitor": {"relabelings": [{"targetlabel": "a"}]}}, "relabelings"),
        ({"prometheusRule": {"namespace": "a.b"}}, "namespace"),
        ({"cleanup": {"securityContext": {"privileged": "yes"}}}, "privileged"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(helm: Helm, values: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        helm.objects(values)
