"""The webhook as the chart renders it: what it is called for, its certificates, and its rights."""

from __future__ import annotations

import yaml

from tests.contract.chart.rendering import NAMESPACE, Helm, Objects, env


def test_the_webhook_is_requested_only_about_pods_that_request(rendered: Objects) -> None:
    ((name, configuration),) = rendered.of("MutatingWebhookConfiguration").items()
    (webhook,) = configuration["webhooks"]
    (condition,) = webhook["matchConditions"]
    domain = webhook["name"].removeprefix("pods.")
    assert f"k.startsWith('{domain}/')" in condition["expression"]
    assert "initContainers" in condition["expression"]
    (left_out,) = (
        e for e in webhook["namespaceSelector"]["matchExpressions"] if e["key"] == "kubernetes.io/metadata.name"
    )
    assert (left_out["operator"], left_out["values"]) == ("NotIn", ["kube-system", NAMESPACE])
    assert webhook["rules"][0]["operations"] == ["CREATE"]
    assert webhook["sideEffects"] == "None"
    assert webhook["timeoutSeconds"] == 5
    assert webhook["clientConfig"]["service"]["name"] in rendered.of("Service")
    assert "caBundle" not in webhook["clientConfig"]
    assert env(rendered.container("webhook")).get("TANGRAM_WEBHOOK_CONFIGURATION_NAME", name) == name


def test_the_webhooks_certificate_names_its_service(rendered: Objects) -> None:
    given = env(rendered.container("webhook"))
    (service,) = [name for name in rendered.of("Service") if name.endswith("-webhook")]
    names = [f"{service}.{NAMESPACE}.svc", f"{service}.{NAMESPACE}.svc.cluster.local"]
    assert yaml.safe_load(given["TANGRAM_WEBHOOK_DNS_NAMES"]) == names
    for certificate in rendered.of("Certificate").values():
        assert certificate["spec"].get("isCA") or certificate["spec"]["dnsNames"] == names


def test_the_webhook_may_touch_its_own_secret_and_configuration_only(local: Objects) -> None:
    rules = [
        *local.one("Role", "tangram-webhook")["rules"],
        *local.one("ClusterRole", "tangram-webhook")["rules"],
    ]
    named = [rule for rule in rules if "create" not in rule["verbs"]]
    assert {(*rule["resources"], *rule["resourceNames"]) for rule in named} == {
        ("secrets", "tangram-webhook-tls"),
        ("mutatingwebhookconfigurations", "tangram-webhook"),
    }
    (create,) = [rule for rule in rules if "create" in rule["verbs"]]  # a name cannot narrow this verb
    assert create == {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}
    assert create in local.one("Role", "tangram-webhook")["rules"]
    assert local.one("Role", "tangram-webhook")["metadata"]["namespace"] == NAMESPACE
    assert "tangram-webhook-tls" in local.of("Secret")


def test_with_cert_manager_the_webhook_has_no_rights_at_all(nvidia: Objects) -> None:
    assert "tangram-webhook" not in {**nvidia.of("Role"), **nvidia.of("ClusterRole")}
    assert "tangram-webhook-tls" not in nvidia.of("Secret")
    template = nvidia.one("Deployment", "tangram-webhook")["spec"]["template"]
    assert template["spec"]["automountServiceAccountToken"] is False
    annotations = nvidia.one("MutatingWebhookConfiguration", "tangram-webhook")["metadata"]["annotations"]
    assert annotations["cert-manager.io/inject-ca-from"] == f"{NAMESPACE}/tangram-webhook"


def test_cert_manager_renews_what_is_served_without_a_new_ca(helm: Helm) -> None:
    """Else the API server would trust the new certificate alone, before the webhook's volume has it."""
    objects = helm.objects({"webhook": {"certManager": {"enabled": True}}})
    served, ca = objects.one("Certificate", "tangram-webhook")["spec"], objects.one("Certificate", "tangram-webhook-ca")
    issuers = objects.of("Issuer")
    assert issuers[served["issuerRef"]["name"]]["spec"] == {"ca": {"secretName": ca["spec"]["secretName"]}}
    assert ca["spec"]["isCA"] is True
    assert issuers[ca["spec"]["issuerRef"]["name"]]["spec"] == {"selfSigned": {}}
    assert served["secretName"] != ca["spec"]["secretName"]


def test_with_an_issuer_of_the_operators_there_is_no_ca_of_ours(helm: Helm) -> None:
    internal = {"kind": "ClusterIssuer", "name": "internal"}
    objects = helm.objects({"webhook": {"certManager": {"enabled": True, "issuerRef": internal}}})
    assert objects.of("Issuer") == {}
    ((_, only),) = objects.of("Certificate").items()
    assert only["spec"]["issuerRef"] == internal
