"""What the end-to-end tests do to the cluster, and what they see in it. Waits are watches, or polls with a deadline."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster import node as local_node
from hack.cluster import processes
from hack.cluster.cgroups import GROUP
from hack.cluster.layout import Layout
from hack.kubectl import CommandFailed, Kubectl
from hack.stack import NAMESPACE, install_chart
from hack.waiting import NotSoon
from tests.e2e.api import ANYWHERE, Api, path_of
from tests.signals import send_signal
from vgpu.api.contract import uuid_of
from vgpu.api.names import DEFAULT

SCRAPER = "test-scraper"
SIDE_BY_SIDE = 4
"""Processes that are started in containers at a time. Guessed, for two processors."""
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def assigned_to(pod: dict[str, Any], container: str = "main") -> list[str]:
    """UUIDs of the GPUs in the pod's assignment."""
    text = pod["metadata"]["annotations"]["tangram.sh/assignment"]
    return [assigned["uuid"].partition("-")[2] for assigned in json.loads(text)["containers"][container]]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Kubernetes cluster under test."""

    kubectl: Kubectl
    """For what a user would type."""
    api: Api
    """For what tests look at."""

    def make_namespace(self, name: str, **labels: str) -> None:
        self.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        self.api.until(
            "serviceaccount", name, lambda seen: "default" in seen, f"namespace {name} has its service account"
        )

    def drop_namespaces(self, *names: str) -> None:
        """Return when their pods are gone; the rest takes some seconds more, without a wait.

        Kubernetes begins to empty a namespace five seconds after it was deleted: its pods are deleted here. No controller can make
        another one meanwhile."""
        for name in names:
            self.api.delete("namespace", name)
            self.api.delete_all("pod", name)
        for name in names:
            self.api.until("pod", name, lambda seen: not seen, f"the pods of {name} are gone", timeout_s=120)

    def metrics_token(self) -> str:
        """Of a service account that may read the metrics of nodes, as Prometheus has one."""
        return _metrics_token(self.api)

    def pods_with_gpus(self) -> list[str]:
        """Namespace and name of every pod that requests any of our resources and has not ended."""
        alive = "status.phase!=Succeeded,status.phase!=Failed"
        return [
            f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            for pod in self.api.listed("pod", ANYWHERE, fields=alive)
            if any(
                DEFAULT.ours(name) for one in pod["spec"]["containers"] for name in one["resources"].get("limits", {})
            )
        ]

    def find(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        """The object, or None when there is none."""
        return self.api.find(kind, name, namespace)

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        found = self.find("pod", name, namespace)
        assert found is not None, f"pod {namespace}/{name} is not there"
        return found

    def run(self, namespace: str, *pods: dict[str, Any], timeout_s: int = 90) -> None:
        """Create pods and wait until all are Ready."""
        self.create(namespace, *pods)
        self.ready(namespace, *(thing["metadata"]["name"] for thing in pods), timeout_s=timeout_s)

    def create(self, namespace: str, *things: dict[str, Any]) -> None:
        for thing in things:
            self.api.create(thing, namespace)

    def ready(self, namespace: str, *names: str, timeout_s: int = 90) -> None:
        self._wait(namespace, names, is_ready, "ready", timeout_s)

    def ended(self, namespace: str, name: str, phase: str = "Succeeded", *, timeout_s: int = 90) -> str:
        """Wait until a pod has ended in a phase; its log."""
        self._wait(namespace, [name], lambda pod: pod["status"].get("phase") == phase, phase, timeout_s)
        return self.log(namespace, name)

    def all_ended(self, namespace: str, *names: str, timeout_s: int = 90) -> list[tuple[dict[str, Any], str]]:
        """Wait until pods have succeeded; each with its log."""
        pods = self._wait(
            namespace, names, lambda pod: pod["status"].get("phase") == "Succeeded", "Succeeded", timeout_s
        )
        return [(pods[name], self.log(namespace, name)) for name in names]

    def log(self, namespace: str, name: str, container: str | None = None) -> str:
        """Of a container, or of all."""
        if container is None:
            spec = self.pod(namespace, name)["spec"]
            inside = [one["name"] for one in [*spec.get("initContainers", ()), *spec["containers"]]]
        else:
            inside = [container]
        return "".join(self.api.log(namespace, name, one) for one in inside)

    def _wait(
        self,
        namespace: str,
        names: Sequence[str],
        judge: Callable[[dict[str, Any]], bool],
        what: str,
        timeout_s: int,
    ) -> dict[str, dict[str, Any]]:
        def all_are(seen: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]] | None:
            return seen if all(name in seen and judge(seen[name]) for name in names) else None

        try:
            return self.api.until("pod", namespace, all_are, f"{', '.join(names)}: {what}", timeout_s=timeout_s)
        except NotSoon as error:
            raise NotSoon(f"{error}\n{self.describe(namespace, *names)}") from None

    def refused(self, namespace: str, thing: dict[str, Any]) -> str:
        """Admission's answer to an object that it must deny."""
        try:
            self.create(namespace, thing)
        except CommandFailed as error:
            return str(error)
        raise AssertionError(f"{thing['metadata']['name']} was admitted and should have been refused")

    def describe(self, namespace: str, *names: str) -> str:
        return self.kubectl("-n", namespace, "describe", "pod", *names)

    def exec(self, namespace: str, name: str, *command: str, container: str | None = None) -> str:
        return self.api.exec(namespace, name, *command, container=container)

    def delete(self, namespace: str, *names: str) -> None:
        """And wait until they are gone."""
        for name in names:
            self.api.delete("pod", name, namespace)
        self.api.until(
            "pod", namespace, lambda seen: not seen.keys() & set(names), f"{', '.join(names)} are gone", timeout_s=90
        )

    def sees(self, namespace: str, name: str, container: str | None = None) -> list[str]:
        """UUIDs of the GPUs that a process in the container sees through CUDA."""
        return UUID.findall(self.exec(namespace, name, "gpuview", container=container))

    def all_see_their_own(self, namespace: str, *names: str) -> None:
        """A process in each of these pods sees the GPUs of its pod's assignment, and no other."""
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            seen = dict(zip(names, pool.map(lambda name: self.sees(namespace, name), names), strict=True))
        assert seen == {name: self.assigned(namespace, name) for name in names}

    def assigned(self, namespace: str, name: str, container: str = "main") -> list[str]:
        """UUIDs of the GPUs in the pod's assignment."""
        return assigned_to(self.pod(namespace, name), container)

    def events(self, namespace: str, name: str) -> list[str]:
        """`Reason: note` of every event on a pod."""
        return _reported(name, self.api.listed("event", namespace))

    def event(
        self, namespace: str, name: str, judge: Callable[[str], bool], what: str, *, timeout_s: float = 60
    ) -> str:
        """Wait for an event on a pod."""
        return self.api.until(
            "event",
            namespace,
            lambda seen: next(filter(judge, _reported(name, seen.values())), None),
            what,
            timeout_s=timeout_s,
        )

    def node(self) -> dict[str, Any]:
        """The first node."""
        return self.api.listed("node")[0]

    def wait_for_gpus(self, resource: str = "tangram.sh/gpu-mem", *, timeout_s: float = 90) -> int:
        """Wait until the node offers a resource; how much."""
        return self.api.until(
            "node",
            None,
            lambda seen: int(next(iter(seen.values()))["status"]["allocatable"].get(resource, 0)),
            f"{resource} on the node",
            timeout_s=timeout_s,
        )

    def own_pods(self, component: str) -> list[str]:
        """Names of Tangram's own pods of one component."""
        listed = self.api.listed("pod", NAMESPACE, f"app.kubernetes.io/component={component}")
        return [pod["metadata"]["name"] for pod in listed]

    def node_pod(self) -> str:
        """Name of the pod with the device plugin and the arbiter, on the one node."""
        (name,) = self.own_pods("node")
        return name

    def pool_pod(self, *, without: str = "") -> str:
        """Name of the host pool's pod once it is ready. `without`: one that was replaced."""

        def ready(seen: dict[str, dict[str, Any]]) -> str | None:
            pods = (name for name, pod in seen.items() if name.startswith("tangram-pool-") and is_ready(pod))
            return next((name for name in pods if name != without), None)

        return self.api.until("pod", NAMESPACE, ready, "the pool's pod is ready", timeout_s=120)

    def restart_component(self, component: str, kind: str) -> None:
        """Kill the pods of a component at once and wait until their replacement is ready."""
        self.kubectl("-n", NAMESPACE, "delete", "pod", *self.own_pods(component), "--grace-period=0", "--force")
        self.kubectl("-n", NAMESPACE, "rollout", "status", kind, "--timeout=120s")

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """`helm upgrade` with further values, and wait until only the new parts serve."""
        install_chart(self.kubectl, values)
        self.wait_for_the_new_parts()

    def wait_for_the_new_parts(self) -> None:
        """And for the end of the others: a webhook that ends goes on answering for a while, over connections that the API server keeps."""
        self.api.until("pod", NAMESPACE, _none_ends, "the old parts have ended")
        self.wait_for_gpus()

    def restart_kubelet(self) -> None:
        """Stop the first node's kubelet and start it again. Local cluster only."""
        layout = Layout()
        target = layout.node(1)
        processes.stop(layout, target.process("kubelet"))
        local_node.start_kubelet(target)
        self.kubectl.wait(f"node/{target.name}", "condition=Ready", timeout_s=90)

    @contextlib.contextmanager
    def kubelet_paused(self) -> Iterator[None]:
        """The first node's kubelet sees and does nothing meanwhile. Local cluster only."""
        pid = processes.pid_of(Layout(), Layout().node(1).process("kubelet"))
        assert pid is not None, "no local kubelet runs"
        send_signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def signal_program(self, program: str, number: signal.Signals) -> None:
        """Send a signal to every process of the cluster's containers that runs a program. Local cluster only."""
        pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if runs_in_a_container(folder, program)]
        assert pids, f"no process of the cluster runs {program}"
        for pid in pids:
            send_signal(pid, number)

    def assigned_amounts(self, namespace: str) -> dict[tuple[str, str], int]:
        """(GPU UUID, resource) -> units that the assignments of a namespace's pods add up to."""
        counted: Counter[tuple[str, str]] = Counter()
        for pod in self.api.listed("pod", namespace):
            for gpus in json.loads(pod["metadata"]["annotations"]["tangram.sh/assignment"])["containers"].values():
                for assigned in gpus:
                    counted[assigned["uuid"], "gpu-mem"] += assigned["mib"] // 1024
                    counted[assigned["uuid"], "gpu-core"] += assigned.get("core", 0)
        return {key: amount for key, amount in counted.items() if amount}

    def kubelet_devices(self, namespace: str) -> dict[tuple[str, str], int]:
        """(GPU UUID, resource) -> devices that the kubelet's own checkpoint counts for the pods of a namespace."""
        uids = {pod["metadata"]["uid"] for pod in self.api.listed("pod", namespace)}
        folder = Layout().node(1).own("/var/lib/kubelet")
        document = json.loads((folder / "device-plugins/kubelet_internal_checkpoint").read_text())
        counted: Counter[tuple[str, str]] = Counter()
        for entry in document["Data"]["PodDeviceEntries"]:
            if entry["PodUID"] in uids:
                ids = [device for devices in entry["DeviceIDs"].values() for device in devices]
                counted.update((uuid_of(device), entry["ResourceName"].partition("/")[2]) for device in ids)
        return dict(counted)


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _none_ends(pods: dict[str, dict[str, Any]]) -> bool:
    return not any("deletionTimestamp" in pod["metadata"] for pod in pods.values())


def _reported(name: str, events: Iterable[dict[str, Any]]) -> list[str]:
    return [f"{e.get('reason')}: {e.get('note', '')}" for e in events if (e.get("regarding") or {}).get("name") == name]


@functools.cache
def _metrics_token(api: Api) -> str:
    """The account is made outside of Tangram's namespace, which an uninstall leaves empty. Valid for a day: `make faults` takes hours."""
    account = {"kind": "ServiceAccount", "name": SCRAPER, "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "tangram-node-metrics-reader"}
    api.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SCRAPER}}, "default")
    api.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": SCRAPER},
            "roleRef": role, "subjects": [account],
        }
    )  # fmt: skip
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 86400}}
    token: str = api.call("POST", f"{path_of('serviceaccount', 'default', SCRAPER)}/token", request).json()["status"][
        "token"
    ]
    return token


def runs_in_a_container(process: Path, program: str) -> bool:
    """Is this folder of /proc a process of the local cluster's pods that runs the program?"""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return f"/{GROUP}/" in (process / "cgroup").read_text() and any(Path(word).name == program for word in words)
    except OSError:  # it ended meanwhile
        return False
