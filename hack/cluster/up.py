"""Bring the cluster up, or what is missing of it.

Whatever runs already is left running, so a second `up` takes a second or two. One thing cannot be continued: etcd keeps
nothing once it died, so a cluster without its etcd is taken down first and made anew.
"""

from __future__ import annotations

from pathlib import Path

from hack.cluster import control_plane, debian, down, images, node, pki, processes
from hack.cluster.api import Api, wait
from hack.cluster.build import build, link_programs
from hack.cluster.caller import own_by_person, person
from hack.cluster.console import Steps
from hack.cluster.layout import DNS_SERVICE_ADDRESS, MAX_NODES, Layout, NodeLayout, cache_folder
from hack.cluster.network import add_address
from hack.cluster.processes import Program
from hack.cluster.programs import CLUSTER, kubernetes_version

API_TIMEOUT_S = 120.0
NODE_TIMEOUT_S = 120.0
"""Guessed: on two busy cores the API server took 15 s."""


def bring_up(layout: Layout, nodes: int, steps: Steps) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"nodes: {nodes} requested, 1 to {MAX_NODES} is possible on one machine")
    packages = debian.missing(debian.CLUSTER)
    if packages:
        with steps.step(f"install {' '.join(packages)}"):
            debian.install(packages)
    programs = build(cache_folder(), CLUSTER, steps)
    if layout.state.exists() and processes.pid_of(layout, "etcd") is None:
        down.take_down(layout, steps)
    layout.state.mkdir(parents=True, exist_ok=True)
    layout.provider.write_text("local\n")
    link_programs(programs, layout.bin)
    api = _start_control_plane(layout, steps)
    for index in range(1, max(nodes, len(layout.nodes())) + 1):
        _start_node(layout.node(index), api, steps)
    with steps.step("wait for the default service account"):
        path = "/api/v1/namespaces/default/serviceaccounts/default"
        wait("service account default/default", lambda: api.get(path) is not None, 60, lambda: None)


def _start(layout: Layout, program: Program) -> None:
    processes.start(layout, program)


def _died(layout: Layout, *names: str) -> str | None:
    """A sentence with the end of the log of the first program that is not running."""
    for name in names:
        if processes.pid_of(layout, name) is None:
            log = processes.log_path(layout, name)
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            return f"{name} ended; the end of {log}:\n{tail}"
    return None


def _start_control_plane(layout: Layout, steps: Steps) -> Api:
    add_address(1, layout.node(1).address)  # the API server announces that it is there
    pki.make_pki(layout)
    _own_by_caller(layout.kubeconfig)
    control_plane.write_settings(layout)
    api = Api(layout)
    with steps.step(f"start etcd and the API server {kubernetes_version()}"):
        _start(layout, control_plane.etcd(layout))
        _start(layout, control_plane.apiserver(layout))
        wait("API server", api.is_ready, API_TIMEOUT_S, lambda: _died(layout, "etcd", "apiserver"))
    with steps.step("start the controllers, the scheduler and the service proxy"):
        for program in (control_plane.controller_manager, control_plane.scheduler, control_plane.proxy):
            _start(layout, program(layout))
        _create_objects(api)
    return api


def _create_objects(api: Api) -> None:
    """RuntimeClass nvidia, and a DNS service without endpoints: nothing here needs names, and a look-up fails.

    It fails late: glibc queries a UDP port that nothing answers for 5 s. What a program looks up at its start costs it that.
    """
    runtime_class = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia"},
        "handler": "nvidia",
    }
    api.ensure("/apis/node.k8s.io/v1/runtimeclasses", runtime_class)
    ports = [{"name": name.lower(), "protocol": name, "port": 53} for name in ("UDP", "TCP")]
    dns = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {"clusterIP": DNS_SERVICE_ADDRESS, "ports": ports},
    }
    if api.get("/api/v1/namespaces/kube-system/services/kube-dns") is None:
        api.ensure("/api/v1/namespaces/kube-system/services", dns)


def _start_node(target: NodeLayout, api: Api, steps: Steps) -> None:
    names = [target.process(program) for program in node.PROGRAMS]
    was_running = all(processes.pid_of(target.cluster, name) is not None for name in names)
    if was_running and api.node_is_ready(target.name):
        steps.print(f"  ok {target.name} runs")
        return
    with steps.step(f"start {target.name} and wait until it is Ready"):
        node.start_runtime(target)
        images.load_first(target)
        node.start_kubelet(target)
        wait(
            f"node {target.name}",
            lambda: api.node_is_ready(target.name),
            NODE_TIMEOUT_S,
            lambda: _died(target.cluster, *names),
        )


def _own_by_caller(path: Path) -> None:
    """Under sudo the kubeconfig belongs to the caller."""
    if person() is not None:
        own_by_person(path)
        path.parent.chmod(0o755)
