"""Who reads metrics, from which port and with which right."""

from __future__ import annotations

from tests.contract.chart.rendering import Helm, Objects


def test_everything_is_scraped_when_prometheus_operator_is_there(nvidia: Objects) -> None:
    """Each metrics port has a Service and a ServiceMonitor, and the network policy lets it in."""
    ports = {
        (port["containerPort"])
        for _, container in nvidia.containers()
        for port in container.get("ports", [])
        if "metrics" in port["name"]
    }
    served = {port["port"] for service in nvidia.of("Service").values() for port in service["spec"]["ports"]} - {443}
    allowed = {
        port["port"] for policy in nvidia.of("NetworkPolicy").values() for rule in policy["spec"]["ingress"] for port in rule["ports"]
    }  # fmt: skip
    assert ports == served
    assert ports <= allowed
    assert set(nvidia.of("ServiceMonitor")) == {name for name in nvidia.of("Service") if name.endswith("-metrics")}


def test_metrics_are_read_from_the_ports_that_the_pods_containers_serve_them_on(helm: Helm) -> None:
    values = {
        "serviceMonitor": {"enabled": True},
        "node": {"plugin": {"metricsPort": 7001}, "arbiter": {"metricsPort": 7002}},
        "scheduler": {"extender": {"metricsPort": 7003}},
        "webhook": {"metricsPort": 7004},
    }
    objects = helm.objects(values)
    served = {
        (thing["metadata"]["name"], port["name"], port["containerPort"])
        for thing, template in objects.pods()
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
        for port in container.get("ports", [])
    }
    requested = {
        (name.removesuffix("-metrics"), port["name"], port.get("targetPort", port["port"]))
        for name, service in objects.of("Service").items()
        if name.endswith("-metrics")
        for port in service["spec"]["ports"]
    }
    assert {port for _, _, port in requested} == {7001, 7002, 7003, 7004}
    assert requested <= served


def test_metrics_of_nodes_are_read_with_a_token_that_is_reviewed(helm: Helm) -> None:
    objects = helm.objects({"serviceMonitor": {"enabled": True}})
    rules = objects.one("ClusterRole", "tangram-node")["rules"]
    created = {resource for rule in rules if rule["verbs"] == ["create"] for resource in rule["resources"]}
    assert {"tokenreviews", "subjectaccessreviews"} <= created
    (read,) = objects.one("ClusterRole", "tangram-node-metrics-reader")["rules"]
    assert read == {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
    for endpoint in objects.one("ServiceMonitor", "tangram-node-metrics")["spec"]["endpoints"]:
        assert endpoint["bearerTokenFile"] == "/var/run/secrets/kubernetes.io/serviceaccount/token"
    for name in ("tangram-webhook-metrics", "tangram-scheduler-metrics"):
        (endpoint,) = objects.one("ServiceMonitor", name)["spec"]["endpoints"]
        assert "bearerTokenFile" not in endpoint
    assert "tangram-node-metrics-reader" not in objects.of("ClusterRoleBinding")


def test_who_may_read_metrics_of_nodes_is_bound_to_the_role_and_a_secret_may_hold_the_token(helm: Helm) -> None:
    prometheus = {"kind": "ServiceAccount", "name": "prometheus-k8s", "namespace": "monitoring"}
    secret = {"name": "prometheus-token", "key": "token"}
    objects = helm.objects(
        {"node": {"metricsReaders": [prometheus]}, "serviceMonitor": {"enabled": True, "tokenSecret": secret}}
    )
    binding = objects.one("ClusterRoleBinding", "tangram-node-metrics-reader")
    assert binding["subjects"] == [prometheus]
    assert binding["roleRef"]["name"] == "tangram-node-metrics-reader"
    for endpoint in objects.one("ServiceMonitor", "tangram-node-metrics")["spec"]["endpoints"]:
        assert endpoint["authorization"] == {"credentials": secret}
        assert "bearerTokenFile" not in endpoint


def test_open_metrics_need_no_right_and_no_token(helm: Helm) -> None:
    objects = helm.objects({"node": {"metricsAccess": "open"}, "serviceMonitor": {"enabled": True}})
    rules = objects.one("ClusterRole", "tangram-node")["rules"]
    assert not {"tokenreviews", "subjectaccessreviews"} & {resource for rule in rules for resource in rule["resources"]}
    assert "tangram-node-metrics-reader" not in objects.of("ClusterRole")
    for endpoint in objects.one("ServiceMonitor", "tangram-node-metrics")["spec"]["endpoints"]:
        assert not {"bearerTokenFile", "authorization"} & endpoint.keys()
