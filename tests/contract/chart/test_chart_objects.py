"""What the chart renders, for every example of values: whole, connected, and with no more rights than it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.directories import Grants
from deviceplugin.settings import DevicePluginSettings
from tests.apiserver import ApiServer
from tests.contract.chart.rendering import EXAMPLES, NAMESPACE, Helm, Objects, Refused, env
from vgpu.gputime.trial import FILE

CLUSTER_WIDE = {
    "ClusterRole", "ClusterRoleBinding", "PriorityClass", "MutatingWebhookConfiguration",
    "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_lint_has_nothing_to_say(helm: Helm, example: str) -> None:
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
        mounted = {mount["name"] for c in spec["containers"] for mount in c.get("volumeMounts", [])}
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


def assert_confined(container: dict[str, Any], *capabilities: str) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"].get("add", []) == list(capabilities)
    assert context["capabilities"]["drop"] == ["ALL"]
    assert not context.get("privileged")


def test_the_node_pod_is_root_without_a_capability_but_the_guards_to_kill(local: Objects, nvidia: Objects) -> None:
    for objects in (local, nvidia):
        spec = objects.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
        assert spec["securityContext"] == {
            "runAsUser": 0,
            "runAsGroup": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert spec["hostPID"] is True
        assert "hostNetwork" not in spec
        for container in spec["containers"]:
            assert_confined(container, *(["KILL"] if container["name"] == "arbiter" else []))


@pytest.mark.parametrize(
    ("values", "privileged", "mode"),
    [
        ({}, True, "cdi"),
        ({"runtimeClassName": "nvidia"}, False, "nvidia"),
        ({"accessMode": "nvidia"}, False, "nvidia"),
        ({"accessMode": "cdi"}, True, "cdi"),
        ({"accessMode": "cdi", "runtimeClassName": "nvidia"}, False, "cdi"),
        ({"node": {"privileged": "false"}}, False, "cdi"),
        ({"node": {"privileged": False}}, False, "cdi"),
        ({"accessMode": "nvidia", "node": {"privileged": "true"}}, True, "nvidia"),
    ],
)
def test_the_plugin_is_privileged_only_where_nothing_else_opens_device_nodes(
    helm: Helm, values: dict[str, Any], *, privileged: bool, mode: str
) -> None:
    objects = helm.objects(values)
    plugin = objects.container("plugin")
    assert bool(plugin["securityContext"].get("privileged")) == privileged
    assert env(plugin)["TANGRAM_DEVICEPLUGIN_ACCESS"] == mode
    assert_confined(objects.container("arbiter"), "KILL")
    given = env(objects.container("webhook"))["TANGRAM_WEBHOOK_RUNTIME_CLASS"]
    assert given == ("nvidia" if mode == "nvidia" else "")


def test_in_mode_cdi_the_plugin_sees_the_driver_root_and_writes_specs(local: Objects) -> None:
    spec = local.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    mounts = {mount["mountPath"]: mount for mount in local.container("plugin")["volumeMounts"]}
    assert {path: (host.get(mount["name"]), bool(mount.get("readOnly"))) for path, mount in mounts.items()} == {
        "/var/lib/tangram": ("/var/lib/tangram", False),
        "/var/lib/kubelet/device-plugins": ("/var/lib/kubelet/device-plugins", False),
        "/var/lib/kubelet/pod-resources": ("/var/lib/kubelet/pod-resources", True),
        "/var/run/cdi": ("/var/run/cdi", False),
        "/driver-root": ("/var/lib/tangram-fake-driver", True),
        "/var/run/secrets/kubernetes.io/serviceaccount": (None, True),
    }
    assert env(local.container("plugin"))["TANGRAM_DEVICEPLUGIN_HOST_DRIVER_ROOT"] == "/var/lib/tangram-fake-driver"


def test_the_arbiter_reaches_grants_and_sockets_and_neither_driver_nor_library(rendered: Objects) -> None:
    arbiter = rendered.container("arbiter")
    assert {mount["mountPath"]: bool(mount.get("readOnly")) for mount in arbiter["volumeMounts"]} == {
        "/var/lib/tangram/grants": True,
        "/var/lib/tangram/sockets": False,
        "/var/lib/tangram/arbiter": False,
        "/var/lib/tangram/plugin": True,
    }
    given = env(arbiter)
    assert given["TANGRAM_ARBITER_STATUS_SOCKET"] == "/var/lib/tangram/arbiter/status.sock"
    assert given["TANGRAM_ARBITER_NVML_SOCKET"] == "/var/lib/tangram/plugin/nvml.sock"
    assert given["TANGRAM_ARBITER_TRIALS_FILE"] == "/var/lib/tangram/plugin/trials.json"
    assert given.get("NVIDIA_VISIBLE_DEVICES", "void") == "void"
    assert "NVIDIA_DRIVER_CAPABILITIES" not in given


def test_nothing_that_the_arbiter_may_write_holds_the_library(rendered: Objects, tmp_path: Path) -> None:
    """Neither a file of it nor a hard link: in a state folder as the device plugin leaves it, with a container of each layout."""
    settings = env(rendered.container("plugin"))
    root = str(settings["TANGRAM_DEVICEPLUGIN_STATE_ROOT"])
    state, image = tmp_path / "state", tmp_path / "image.so"
    image.write_bytes(b"library")
    grants = Grants(state, image)
    library = grants.install()
    grants.prepare(Record(("GPU-0-1",), "uid", "default", "a", "main", ("GPU-0",), 0.0, 0))
    earlier = state / "grants" / "0123456789abcdef0123456789abcdef"
    earlier.mkdir()
    (earlier / "libtangram.so").hardlink_to(library)
    ready = list((state / "grants").glob(".spare-*"))
    assert library.stat().st_nlink == 3 + len(ready)
    (spec,) = [one["spec"]["template"]["spec"] for one in rendered.of("DaemonSet").values()]
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    writable = [host[m["name"]] for m in rendered.container("arbiter")["volumeMounts"] if not m.get("readOnly")]
    assert writable
    for path in writable:
        assert not Path(root).is_relative_to(path), f"{path} holds the whole state folder"
        assert Path(path).is_relative_to(root)
        folder = state / Path(path).relative_to(root)
        inodes = {one.stat().st_ino for one in folder.rglob("*") if one.is_file()}
        assert library.stat().st_ino not in inodes, f"{path} is writable to the arbiter and holds the library"
        assert not list(folder.rglob("libtangram.so"))


def test_plugin_and_arbiter_meet_where_each_looks_for_the_other(
    rendered: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    arbiter = env(rendered.container("arbiter"))
    for name, value in env(rendered.container("plugin")).items():
        if name.startswith("TANGRAM_"):
            monkeypatch.setenv(name, value if isinstance(value, str) else "from-the-api")
    plugin = DevicePluginSettings()
    sockets = Grants(plugin.state_root, plugin.library).sockets
    assert str(sockets.path("k").parents[1]) == arbiter["TANGRAM_ARBITER_SOCKETS_DIR"]
    assert str(plugin.nvml_socket) == arbiter["TANGRAM_ARBITER_NVML_SOCKET"]
    assert plugin.metrics_access == "review"
    assert str(plugin.access_socket) == arbiter["TANGRAM_ARBITER_METRICS_ACCESS_SOCKET"]
    assert str(plugin.plugin_folder / FILE) == arbiter["TANGRAM_ARBITER_TRIALS_FILE"]
    assert str(plugin.status) == arbiter["TANGRAM_ARBITER_STATUS_SOCKET"]
    assert (plugin.nvml_start_s, plugin.nvml_call_s) == (120, 10)


def test_the_root_of_the_host_is_a_driver_root_too(helm: Helm) -> None:
    spec = helm.objects({"driver": {"root": "/"}}).one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert host["driver-root"] == "/"


def test_in_mode_nvidia_the_runtime_brings_the_driver(nvidia: Objects) -> None:
    spec = nvidia.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
    assert spec["runtimeClassName"] == "nvidia"
    assert {volume["name"] for volume in spec["volumes"]} == {
        "state",
        "grants",
        "sockets",
        "arbiter",
        "plugin",
        "device-plugins",
        "pod-resources",
        "token",
    }
    assert env(nvidia.container("plugin"))["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert env(nvidia.container("plugin"))["NVIDIA_DRIVER_CAPABILITIES"] == "utility,compute"
    assert env(nvidia.container("arbiter"))["NVIDIA_VISIBLE_DEVICES"] == "void"


@pytest.mark.parametrize(
    ("given", "tag"),
    [
        ("v1.36.3", "v1.36.3"),
        ("v1.33.5-gke.1162000", "v1.33.5"),
        ("v1.34.1+k3s1", "v1.34.1"),
        ("v1.30.14-eks-2d5f260", "v1.30.14"),
    ],
)
def test_kube_scheduler_is_of_the_clusters_own_version(helm: Helm, given: str, tag: str) -> None:
    image = helm.objects(kube=given).container("kube-scheduler")["image"]
    assert image == f"registry.k8s.io/kube-scheduler:{tag}"


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_version_of_kubernetes_gets_the_same_objects(helm: Helm, example: str) -> None:
    """But for kube-scheduler's version. So what the API server of one version takes is what all are given."""
    given = {f"v1.{minor}.4" for minor in (30, 33, 36)}
    assert len({helm.text(EXAMPLES[example], kube=kube).replace(kube, "") for kube in given}) == 1


def test_clusters_without_what_the_chart_needs_are_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"1\.30"):
        helm.objects(kube="v1.29.9")


def test_the_scheduler_knows_every_resource_and_requests_the_extender_beside_it(helm: Helm, local: Objects) -> None:
    config = yaml.safe_load(local.one("ConfigMap", "tangram-scheduler")["data"]["scheduler.yaml"])
    extender, _ = config["extenders"]
    port = env(local.container("extender"))["TANGRAM_EXTENDER_PORT"]
    assert extender["urlPrefix"] == f"http://127.0.0.1:{port}"
    names = [resource["name"] for resource in extender["managedResources"]]
    assert names[:3] == ["tangram.sh/gpu-mem", "tangram.sh/gpu-core", "tangram.sh/gpu"]
    assert {"tangram.sh/mig-1g.10gb", "tangram.sh/mig-3g.40gb", "tangram.sh/mig-1g.18gb.me"} <= set(names)
    assert not any(resource["ignoredByScheduler"] for resource in extender["managedResources"])
    assert (extender["nodeCacheCapable"], extender["ignorable"]) == (True, False)
    assert (extender["filterVerb"], extender["preemptVerb"], extender["bindVerb"]) == ("filter", "preempt", "bind")
    assert (extender["prioritizeVerb"], extender["weight"]) == ("prioritize", 2)
    assert config["percentageOfNodesToScore"] == 100
    assert config["profiles"] == [{"schedulerName": "tangram-scheduler"}]
    election = config["leaderElection"]
    assert (election["resourceNamespace"], election["resourceName"]) == (NAMESPACE, "tangram-scheduler")
    assert env(local.container("webhook"))["TANGRAM_WEBHOOK_SCHEDULER_NAME"] == "tangram-scheduler"


@pytest.mark.parametrize(
    ("preempts", "ahead", "may"),
    [(False, "never", False), (True, "never", True), (False, "always", True), (False, "auto", True)],
)
def test_the_scheduler_may_nominate_only_where_it_does(helm: Helm, preempts: bool, ahead: str, may: bool) -> None:
    values = {"preemption": {"enabled": preempts}, "nominateAhead": ahead, "name": "other"}
    objects = helm.objects({"scheduler": values})
    rules = objects.one("ClusterRole", "tangram-scheduler")["rules"]
    assert ("pods/status" in {resource for rule in rules for resource in rule["resources"]}) is may
    given = env(objects.container("extender"))
    assert given["TANGRAM_EXTENDER_NOMINATE_AHEAD"] == ahead
    assert given["TANGRAM_EXTENDER_SCHEDULER_NAME"] == "other"


def test_the_scheduler_may_evict_only_where_preemption_is_on(helm: Helm) -> None:
    evicting = {"pods/eviction", "poddisruptionbudgets"}
    for on in (True, False):
        objects = helm.objects({"scheduler": {"preemption": {"enabled": on}}})
        role = objects.one("ClusterRole", "tangram-scheduler")
        may = {resource for rule in role["rules"] for resource in rule.get("resources", ())}
        assert may & evicting == (evicting if on else set())
        assert "events" in may, "also who evicts nobody tells a pod why it waits"
        assert env(objects.container("extender"))["TANGRAM_EXTENDER_PREEMPTION"] == str(on).lower()


def test_kube_scheduler_has_the_feature_gates_that_are_chosen_and_no_others(helm: Helm) -> None:
    gates = {"GenericWorkload": True, "GangScheduling": True, "SchedulerPopFromBackoffQ": False}
    for chosen, flags in (
        (gates, ["--feature-gates=GangScheduling=true,GenericWorkload=true,SchedulerPopFromBackoffQ=false"]),
        ({}, []),
    ):
        command = helm.objects({"scheduler": {"kubeScheduler": {"featureGates": chosen}}}).container("kube-scheduler")
        assert [one for one in command["command"] if "gates" in one] == flags


SCHEDULING: Final = {
    ("", "nodes", "get,list,watch"),
    ("", "pods", "get,list,watch"),
    ("", "pods/binding", "create"),
    ("", "pods/status", "patch"),
    ("events.k8s.io", "events", "create,patch"),
    ("scheduling.k8s.io", "podgroups", "list,watch"),
}
EVICTING: Final = {("policy", "poddisruptionbudgets", "get,list,watch"), ("", "pods/eviction", "create")}
"""All that the extender may do in the cluster: group, resource, verbs."""


def test_the_scheduler_may_read_workloads_and_controllers_only_where_it_heeds_kueue(helm: Helm) -> None:
    kueue = {"enabled": True, "controllers": ["pods", "jobsets.jobset.x-k8s.io"]}
    wanted = {
        ("kueue.x-k8s.io", "workloads", "list,watch"),
        ("jobset.x-k8s.io", "jobsets", "get"),
        ("", "pods", "get"),
    }
    for values, more in (
        ({"queues": {"kueue": kueue}}, wanted),
        ({"queues": {"kueue": kueue | {"evict": "never"}}}, wanted),
        ({"queues": {"kueue": kueue | {"evict": "whole"}}}, wanted | {("kueue.x-k8s.io", "workloads", "patch")}),
        ({"queues": {"kueue": kueue | {"enabled": False, "evict": "whole"}}}, set()),
        ({"queues": {"kueue": kueue}, "scheduler": {"preemption": {"enabled": False}}}, set()),
    ):
        rules = helm.objects(values).one("ClusterRole", "tangram-scheduler")["rules"]
        may = [
            (group, resource, ",".join(rule["verbs"]))
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        ]
        evicts = values.get("scheduler", {}).get("preemption", {}).get("enabled", True)
        assert sorted(may) == sorted(SCHEDULING | (EVICTING if evicts else set()) | more)
        assert all(rule.keys() == {"apiGroups", "resources", "verbs"} for rule in rules)


def test_a_change_of_the_schedulers_configuration_restarts_it_and_nothing_else(helm: Helm) -> None:
    before, after = helm.objects(), helm.objects({"migProfiles": ["1g.5gb"]})
    changed = {
        thing["metadata"]["name"]
        for (thing, template), (_, other) in zip(before.pods(), after.pods(), strict=True)
        if template != other
    }
    assert changed == {"tangram-scheduler"}


def test_several_active_schedulers_are_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"scheduler\.replicas is 3 with scheduler\.leaderElect=false"):
        helm.objects({"scheduler": {"leaderElect": False, "replicas": 3}})


def test_priority_classes_are_given_only_when_requested_for(local: Objects, nvidia: Objects) -> None:
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


def test_an_existing_scheduler_is_reported_what_it_needs(helm: Helm, api: ApiServer) -> None:
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


def test_a_test_where_the_webhook_does_not_look_is_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"test\.namespace is tangram-system"):
        helm.objects({"test": {"image": "x", "namespace": NAMESPACE}})


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
