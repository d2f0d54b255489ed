"""The Job that runs after the release is gone, against an API server that still has annotated nodes."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import pytest

from tests.apiserver import ApiServer
from tests.contract.chart.rendering import CHART, Helm, env
from vgpu.api.names import Names

NODES = "/api/v1/nodes"
OURS, FOREIGN = tuple(f"gpu.example.com/{name}" for name in ("inventory", "bursts", "numa")), "example.com/kept"
LABELS = Names("gpu.example.com").node_labels


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The chart's file, as a module."""
    spec = importlib.util.spec_from_file_location("clean_up", CHART / "files/clean_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def through_http(api: ApiServer) -> Iterator[str]:
    """The API server for a program that has a token and no client certificate: requests are passed on, node `gone` is not there."""

    class PassOn(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(None)

        def do_PATCH(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def do_POST(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def do_DELETE(self) -> None:
            self.pass_on(None)

        def pass_on(self, body: bytes | None) -> None:
            assert self.headers["Authorization"] == "Bearer token"
            if self.command == "PATCH" and self.path.endswith("/gone"):
                api("DELETE", self.path)
            answer = api.http.request(
                self.command, self.path, content=body, headers={"Content-Type": self.headers["Content-Type"]}
            )
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), PassOn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def annotations_of(api: ApiServer, name: str) -> dict[str, str]:
    return dict(api("GET", f"{NODES}/{name}")["metadata"].get("annotations") or {})


def test_the_plugins_annotations_go_from_every_node_and_nothing_else(
    program: ModuleType, api: ApiServer, through_http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several pages, and though a node is deleted meanwhile."""
    monkeypatch.setattr(program, "PAGE", 1)
    names = ["gone", "has-gpus", "has-more", "plain"]
    for name in names:
        given = {FOREIGN: "yes"} | (
            dict.fromkeys(OURS[: 1 if name == "has-gpus" else 2], "{}") if name != "plain" else {}
        )
        marked = {FOREIGN: "yes"} | (dict.fromkeys(LABELS, "x") if name == "has-more" else {})
        api(
            "POST",
            NODES,
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "annotations": given, "labels": marked}},
        )
    assert program.strip(program.Api(through_http, "token", None), {"annotations": OURS, "labels": LABELS}) == 3
    for name in names[1:]:
        assert annotations_of(api, name) == {FOREIGN: "yes"}
        assert api("GET", f"{NODES}/{name}")["metadata"]["labels"] == {FOREIGN: "yes"}
        api("DELETE", f"{NODES}/{quote(name)}")


def test_the_plugins_taint_goes_from_every_node_and_no_other_taint(
    program: ModuleType, api: ApiServer, through_http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though somebody writes a node in between, and a node is deleted meanwhile."""
    key, kept = Names("gpu.example.com").unhealthy_taint, {"key": FOREIGN, "value": "x", "effect": "NoExecute"}
    ours = {"key": key, "value": "true", "effect": "NoSchedule"}
    for name, taints in (("gone", [ours]), ("has-both", [kept, ours]), ("has-none", [kept]), ("has-one", [ours])):
        spec = {"taints": taints}
        api("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec})
    caller = program.Api(through_http, "token", None)
    call, written = caller.call, []

    def between(method: str, path: str, body: Any = None) -> Any:
        if method == "PATCH" and path.endswith("/has-both") and not written:
            written.append(api.patch(f"{NODES}/has-both", {"metadata": {"labels": {"a": "b"}}}))
        return call(method, path, body)

    monkeypatch.setattr(caller, "call", between)
    assert program.untaint(caller, key) == 3
    assert written
    found = {name: api("GET", f"{NODES}/{name}")["spec"] for name in ("has-both", "has-none", "has-one")}
    assert found == {"has-both": {"taints": [kept]}, "has-none": {"taints": [kept]}, "has-one": {}}
    for name in found:
        api("DELETE", f"{NODES}/{name}")


def test_what_the_release_made_by_itself_goes(
    program: ModuleType, helm: Helm, api: ApiServer, through_http: str, release_namespace: str
) -> None:
    """The lease of leader election and who was preempted, at the paths that the Job gets; that they are gone already is no error."""
    (container,) = helm.objects().one("Job", "tangram-cleanup")["spec"]["template"]["spec"]["containers"]
    extender = helm.objects().container("extender")
    assert env(extender)["TANGRAM_EXTENDER_PREEMPTED_CONFIG_MAP"] == f"{release_namespace}/tangram-scheduler-preempted"
    paths = container["command"][7:]
    assert [path.rpartition("/")[2] for path in paths] == ["tangram-scheduler", "tangram-scheduler-preempted"]
    for path, version, kind in zip(paths, ("coordination.k8s.io/v1", "v1"), ("Lease", "ConfigMap"), strict=True):
        collection, _, name = path.rpartition("/")
        meta = {"name": name, "namespace": release_namespace}
        api("POST", collection, {"apiVersion": version, "kind": kind, "metadata": meta})
        assert program.delete(program.Api(through_http, "token", None), path) is True
        assert program.delete(program.Api(through_http, "token", None), path) is False


def test_where_nothing_is_made_nothing_is_to_delete(helm: Helm) -> None:
    objects = helm.objects({"scheduler": {"enabled": False}})
    (container,) = objects.one("Job", "tangram-cleanup")["spec"]["template"]["spec"]["containers"]
    assert len(container["command"]) == 7
    role = objects.one("Role", "tangram-cleanup")["rules"]
    assert {name for rule in role for name in rule["resources"]} == {"daemonsets", "pods", "pods/log"}


def test_who_was_preempted_is_deleted_also_where_preemption_is_off_by_now(helm: Helm) -> None:
    values = {"leaderElect": False, "replicas": 1, "preemption": {"enabled": False}}
    objects = helm.objects({"scheduler": values})
    (container,) = objects.one("Job", "tangram-cleanup")["spec"]["template"]["spec"]["containers"]
    (path,) = container["command"][7:]
    rule = objects.one("Role", "tangram-cleanup")["rules"][0]
    assert rule["resourceNames"] == [path.rpartition("/")[2]] == ["tangram-scheduler-preempted"]


def test_the_extender_may_do_with_the_config_map_what_it_does_and_no_more(helm: Helm) -> None:
    rules = helm.objects().one("Role", "tangram-scheduler")["rules"]
    named = [rule for rule in rules if rule.get("resourceNames") == ["tangram-scheduler-preempted"]]
    assert [rule["verbs"] for rule in named] == [["list", "watch", "patch"]]


def test_the_job_strips_the_annotation_of_the_charts_domain(helm: Helm) -> None:
    objects = helm.objects({"domain": "gpu.example.com"})
    job = objects.one("Job", "tangram-cleanup")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][2].split(",") == list(OURS)
    assert container["command"][3].split(",") == list(LABELS)
    assert container["command"][4] == Names("gpu.example.com").unhealthy_taint
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ConfigMap", "Job"):
        hook = objects.one(kind, "tangram-cleanup")["metadata"]["annotations"]
        assert hook["helm.sh/hook"] == "post-delete"
        assert hook["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    assert (
        objects.one("ConfigMap", "tangram-cleanup")["data"]["clean_up.py"].strip()
        == (CHART / "files/clean_up.py").read_text().strip()
    )


def on_nodes(api: ApiServer, namespace: str, desired: int, *logs: str) -> str:
    """A DaemonSet as its controller and the kubelets leave it: one pod for each log. Its path."""
    labels = {"app": "cleanup"}
    spec = {"containers": [{"name": "cleanup", "image": "none"}]}
    path = f"/apis/apps/v1/namespaces/{namespace}/daemonsets"
    meta = {"name": "tangram-cleanup", "namespace": namespace}
    template = {"metadata": {"labels": labels}, "spec": spec}
    whole = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": meta,
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    made = api("POST", path, whole)
    status = {"desiredNumberScheduled": desired, "currentNumberScheduled": 0, "numberMisscheduled": 0, "numberReady": 0}
    status["observedGeneration"] = made["metadata"]["generation"]
    api("PUT", f"{path}/tangram-cleanup/status", made | {"status": status})
    for number, _ in enumerate(logs):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"cleanup-{number}", "labels": labels},
            "spec": spec | {"nodeName": f"n{number}"},
        }
        api("POST", f"/api/v1/namespaces/{namespace}/pods", pod)
    return f"{path}/tangram-cleanup"


@pytest.fixture
def logged(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What pods have printed, by name: no kubelet is there to answer."""
    printed: dict[str, str] = {}

    def text(_: Any, path: str) -> str:
        name = path.rpartition("/log")[0].rpartition("/")[2]
        if name not in printed:
            raise HTTPError(path, 400, "has not started", Message(), None)
        return printed[name]

    monkeypatch.setattr(program.Api, "text", text)
    return printed


@pytest.fixture
def cleanup_pods(api: ApiServer, release_namespace: str) -> Iterator[str]:
    yield release_namespace
    for pod in api("GET", f"/api/v1/namespaces/{release_namespace}/pods")["items"]:
        api("DELETE", f"/api/v1/namespaces/{release_namespace}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0")
    api("DELETE", f"/apis/apps/v1/namespaces/{release_namespace}/daemonsets/tangram-cleanup")


def test_the_job_waits_until_each_node_has_reported(
    program: ModuleType, api: ApiServer, through_http: str, cleanup_pods: str, logged: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path = on_nodes(api, cleanup_pods, 2, "a", "b")
    logged["cleanup-0"] = '{"removed": ["/state/tangram"]}\n'
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            logged["cleanup-1"] = '{"kept": ["team/trains", "team/serves"]}\n'

    monkeypatch.setattr(program.time, "sleep", sleep)
    results = program.node_results(program.Api(through_http, "token", None), path)
    assert results == {"n0": {"removed": ["/state/tangram"]}, "n1": {"kept": ["team/trains", "team/serves"]}}
    assert len(looks) == 2


def test_a_node_that_does_not_report_ends_the_wait_at_its_limit(
    program: ModuleType, api: ApiServer, through_http: str, cleanup_pods: str, logged: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path = on_nodes(api, cleanup_pods, 2, "a", "b")
    logged["cleanup-0"] = "Traceback (most recent call last):"
    now = [0.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(program.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 40 * seconds))
    assert program.node_results(program.Api(through_http, "token", None), path) == {"n0": None, "n1": None}
    assert now[0] >= program.NODES_S


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"removed": []}, ""),
        ({"kept": ["a/b", "a/c"]}, "containers with a share still run, of a/b, a/c"),
        ({"error": "disk on fire"}, "disk on fire"),
        (None, "no pod reported that it removed them"),
    ],
)
def test_a_node_whose_files_stay_is_named_with_the_reason_and_the_command(
    program: ModuleType, result: Any, why: str
) -> None:
    note = f"Tangram's files stay on node n1: {why}. When they may go, run there: rm -rf /x"
    assert program.sentence("n1", result, "rm -rf /x") == (note if why else "")


def test_the_event_is_one_that_the_api_server_takes_and_says_the_sentence(
    program: ModuleType, api: ApiServer, through_http: str
) -> None:
    program.report(program.Api(through_http, "token", None), "n1", "x" * 5000)
    events = api("GET", "/api/v1/namespaces/default/events")["items"]
    (event,) = [one for one in events if one["metadata"]["name"].startswith("tangram-cleanup-")]
    assert (event["involvedObject"]["kind"], event["involvedObject"]["name"], event["reason"]) == (
        "Node",
        "n1",
        "FilesKept",
    )
    assert event["message"] == "x" * 1024
    api("DELETE", f"/api/v1/namespaces/default/events/{event['metadata']['name']}")


@pytest.mark.parametrize("mode", ["cdi", "nvidia"])
@pytest.mark.parametrize("pool", [False, True])
def test_the_pods_that_remove_files_have_the_rights_for_that_and_no_more(helm: Helm, mode: str, *, pool: bool) -> None:
    burst = {"burst": {"enabled": True, "hostPool": "1Gi"}} if pool else {}
    objects = helm.objects({"accessMode": mode, "stateRoot": "/srv/gpu/tangram", "cdiDir": "/etc/cdi"} | burst)
    spec = objects.one("DaemonSet", "tangram-cleanup-node")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    cdi = mode == "cdi"
    assert container["command"][4:] == ["/state/tangram", *(["/cdi/tangram.sh-gpu.json"] if cdi else [])]
    assert {one["hostPath"]["path"] for one in spec["volumes"]} == {"/srv/gpu", *(["/etc/cdi"] if cdi else [])}
    assert spec["affinity"] == objects.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]["affinity"]
    rights = container["securityContext"]
    assert rights.get("privileged", False) is (pool or cdi)
    assert rights.get("capabilities") == (None if pool or cdi else {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]})
    (job,) = objects.one("Job", "tangram-cleanup")["spec"]["template"]["spec"]["containers"]
    assert f"--command=rm -rf /srv/gpu/tangram{' /etc/cdi/tangram.sh-gpu.json' if cdi else ''}" in job["command"]


def test_the_files_stay_where_the_admin_says_so(helm: Helm) -> None:
    objects = helm.objects({"cleanup": {"nodeFiles": False}})
    assert set(objects.of("DaemonSet")) == {"tangram-node"}
    (job,) = objects.one("Job", "tangram-cleanup")["spec"]["template"]["spec"]["containers"]
    assert not [word for word in job["command"] if word.startswith("--")]
    rules = [*objects.one("Role", "tangram-cleanup")["rules"], *objects.one("ClusterRole", "tangram-cleanup")["rules"]]
    assert {name for rule in rules for name in rule["resources"]} == {"nodes", "leases", "configmaps"}
