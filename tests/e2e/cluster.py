"""What the end-to-end tests do to the cluster, and what they see in it. Waits are `kubectl wait`, or polls with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster import node as local_node
from hack.cluster import processes
from hack.cluster.cgroups import GROUP
from hack.cluster.layout import Layout
from hack.kubectl import CommandFailed, Kubectl
from hack.stack import NAMESPACE, install_chart
from hack.waiting import NotSoon, eventually
from tests.signals import send_signal
from vgpu.contract import uuid_of
from vgpu.names import DEFAULT

SCRAPER = "test-scraper"
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def assigned_to(pod: dict[str, Any], container: str = "main") -> list[str]:
    """UUIDs of the GPUs in the pod's assignment."""
    text = pod["metadata"]["annotations"]["tangram.sh/assignment"]
    return [piece["uuid"].partition("-")[2] for piece in json.loads(text)["containers"][container]]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Kubernetes cluster under test."""

    kubectl: Kubectl

    def make_namespace(self, name: str, **labels: str) -> None:
        self.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        eventually(lambda: self.find("serviceaccount", "default", name), f"service account of namespace {name}")

    def drop_namespace(self, name: str) -> None:
        """Return when its pods are gone; the rest of it takes some seconds more, in which nobody has to wait."""
        self.kubectl("delete", "namespace", name, "--wait=false")
        eventually(
            lambda: not self.kubectl("-n", name, "get", "pods", "-o", "name"),
            f"the pods of {name} are gone",
            timeout_s=120,
        )

    def metrics_token(self) -> str:
        """Of a service account that may read the metrics of nodes, as Prometheus has one. The account is made once, outside of Tangram's namespace, which an uninstall
        leaves empty."""
        if self.find("clusterrolebinding", SCRAPER) is None:
            account = {"kind": "ServiceAccount", "name": SCRAPER, "namespace": "default"}
            role = {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "tangram-node-metrics-reader",
            }
            self.kubectl.apply(
                {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SCRAPER, "namespace": "default"}},
                {
                    "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": SCRAPER},
                    "roleRef": role, "subjects": [account],
                },
            )  # fmt: skip
        return self.kubectl("-n", "default", "create", "token", SCRAPER).strip()

    def pods_with_gpus(self) -> list[str]:
        """Namespace and name of every pod that asks for any of our resources and has not ended."""
        alive = "--field-selector=status.phase!=Succeeded,status.phase!=Failed"
        return [
            f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            for pod in json.loads(self.kubectl("get", "pods", "-A", "-o", "json", alive))["items"]
            if any(
                DEFAULT.ours(name) for one in pod["spec"]["containers"] for name in one["resources"].get("limits", {})
            )
        ]

    def find(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        """The object, or None when there is none."""
        where = ("-n", namespace) if namespace else ()
        text = self.kubectl(*where, "get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def pod(self, namespace: str, name: str) -> dict[str, Any]:
        found = self.find("pod", name, namespace)
        assert found is not None, f"pod {namespace}/{name} is not there"
        return found

    def run(self, namespace: str, *pods: dict[str, Any], timeout_s: int = 90) -> None:
        """Create pods and wait until all are Ready."""
        self.create(namespace, *pods)
        self.ready(namespace, *(thing["metadata"]["name"] for thing in pods), timeout_s=timeout_s)

    def create(self, namespace: str, *things: dict[str, Any]) -> None:
        self.kubectl(
            "-n",
            namespace,
            "create",
            "-f",
            "-",
            stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(things)}),
        )

    def ready(self, namespace: str, *names: str, timeout_s: int = 90) -> None:
        self._wait(namespace, names, "condition=Ready", timeout_s)

    def ended(self, namespace: str, name: str, phase: str = "Succeeded", *, timeout_s: int = 90) -> str:
        """Wait until a pod has ended in a phase; its log."""
        self._wait(namespace, [name], f"jsonpath={{.status.phase}}={phase}", timeout_s)
        return self.kubectl("-n", namespace, "logs", name, "--all-containers")

    def all_ended(self, namespace: str, *names: str, timeout_s: int = 90) -> list[tuple[dict[str, Any], str]]:
        """Wait until pods have succeeded; each with its log. A call for each would take longer than the pods."""
        self._wait(namespace, names, "jsonpath={.status.phase}=Succeeded", timeout_s)
        many = ("--prefix", "--tail=-1", f"--max-log-requests={len(names)}")
        lines = self.kubectl("-n", namespace, "logs", "-l", "suite=e2e", "--all-containers", *many).splitlines()
        pods = {pod["metadata"]["name"]: pod for pod in self.kubectl.get("-n", namespace, "pods")["items"]}
        return [(pods[name], "\n".join(line for line in lines if line.startswith(f"[pod/{name}/"))) for name in names]

    def _wait(self, namespace: str, names: Sequence[str], condition: str, timeout_s: int) -> None:
        try:
            self.kubectl.wait("pod", condition, *names, "-n", namespace, timeout_s=timeout_s)
        except CommandFailed as error:
            raise NotSoon(f"{error}\n{self.describe(namespace, *names)}") from None

    def refused(self, namespace: str, thing: dict[str, Any]) -> str:
        """What admission says to an object that it must not let in."""
        try:
            self.create(namespace, thing)
        except CommandFailed as error:
            return str(error)
        raise AssertionError(f"{thing['metadata']['name']} was admitted and should have been refused")

    def describe(self, namespace: str, *names: str) -> str:
        return self.kubectl("-n", namespace, "describe", "pod", *names)

    def exec(self, namespace: str, name: str, *command: str, container: str | None = None) -> str:
        where = ("-c", container) if container else ()
        return self.kubectl("-n", namespace, "exec", name, *where, "--", *command)

    def delete(self, namespace: str, *names: str) -> None:
        self.kubectl("-n", namespace, "delete", "pod", *names, "--wait", "--timeout=90s")

    def sees(self, namespace: str, name: str, container: str | None = None) -> list[str]:
        """UUIDs of the GPUs that a process in the container sees through CUDA."""
        return UUID.findall(self.exec(namespace, name, "gpuview", container=container))

    def assigned(self, namespace: str, name: str, container: str = "main") -> list[str]:
        """UUIDs of the GPUs in the pod's assignment."""
        return assigned_to(self.pod(namespace, name), container)

    def events(self, namespace: str, name: str) -> list[str]:
        """`Reason: note` of every event on a pod."""
        items = self.kubectl.get("-n", namespace, "events.events.k8s.io")["items"]
        return [
            f"{e.get('reason')}: {e.get('note', '')}" for e in items if (e.get("regarding") or {}).get("name") == name
        ]

    def node(self) -> dict[str, Any]:
        """The first node."""
        node: dict[str, Any] = self.kubectl.get("nodes")["items"][0]
        return node

    def wait_for_gpus(self, resource: str = "tangram.sh/gpu-mem", *, timeout_s: float = 90) -> int:
        """Wait until the node offers a resource; how much."""
        return eventually(
            lambda: int(self.node()["status"]["allocatable"].get(resource, 0)),
            f"{resource} on the node",
            timeout_s=timeout_s,
        )

    def own_pods(self, component: str) -> list[str]:
        """Names of Tangram's own pods of one component."""
        listed = self.kubectl.get("-n", NAMESPACE, "pods", "-l", f"app.kubernetes.io/component={component}")["items"]
        return [pod["metadata"]["name"] for pod in listed]

    def restart_component(self, component: str, kind: str) -> None:
        """Kill the pods of a component at once and wait until their replacement is ready."""
        self.kubectl("-n", NAMESPACE, "delete", "pod", *self.own_pods(component), "--grace-period=0", "--force")
        self.kubectl("-n", NAMESPACE, "rollout", "status", kind, "--timeout=120s")

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """`helm upgrade` with further values, and wait until only the new parts serve.

        A webhook that was told to end goes on answering for a while, over connections that the API server keeps.
        """
        install_chart(self.kubectl, values)
        eventually(lambda: not self._ending(), "the old parts have ended")
        self.wait_for_gpus()

    def _ending(self) -> list[str]:
        listed = self.kubectl.get("-n", NAMESPACE, "pods")["items"]
        return [pod["metadata"]["name"] for pod in listed if "deletionTimestamp" in pod["metadata"]]

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
        for pod in self.kubectl.get("-n", namespace, "pods")["items"]:
            for pieces in json.loads(pod["metadata"]["annotations"]["tangram.sh/assignment"])["containers"].values():
                for piece in pieces:
                    counted[piece["uuid"], "gpu-mem"] += piece["mib"] // 1024
                    counted[piece["uuid"], "gpu-core"] += piece.get("core", 0)
        return {key: amount for key, amount in counted.items() if amount}

    def kubelet_devices(self, namespace: str) -> dict[tuple[str, str], int]:
        """(GPU UUID, resource) -> devices that the kubelet's own checkpoint counts for the pods of a namespace."""
        uids = {pod["metadata"]["uid"] for pod in self.kubectl.get("-n", namespace, "pods")["items"]}
        folder = Layout().node(1).own("/var/lib/kubelet")
        document = json.loads((folder / "device-plugins/kubelet_internal_checkpoint").read_text())
        counted: Counter[tuple[str, str]] = Counter()
        for entry in document["Data"]["PodDeviceEntries"]:
            if entry["PodUID"] in uids:
                ids = [device for devices in entry["DeviceIDs"].values() for device in devices]
                counted.update((uuid_of(device), entry["ResourceName"].partition("/")[2]) for device in ids)
        return dict(counted)


def runs_in_a_container(process: Path, program: str) -> bool:
    """Is this folder of /proc a process of the local cluster's pods that runs the program?"""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return f"/{GROUP}/" in (process / "cgroup").read_text() and any(Path(word).name == program for word in words)
    except OSError:  # it ended meanwhile
        return False
