"""The faults of the matrix, done to the local cluster: each is a context that begins with the fault and ends when it is over."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from hack.cluster import node as local_node
from hack.cluster import processes
from hack.cluster.cgroups import ROOT, hierarchies
from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.matrix import node
from tests.e2e.matrix.look import address_of
from tests.e2e.matrix.pods import BUSY, STEADY
from tests.e2e.matrix.table import STARVE_S, STARVED_PERCENT, STOP_S, Row
from tests.signals import send_signal
from vgpu.api.contract import PRELOAD_TEXTS

SILENT_PEERS: Final = 40
WEBHOOK: Final = "tangram-webhook"


@contextlib.contextmanager
def harm(cluster: Cluster, namespace: str, row: Row) -> Iterator[None]:
    """The row's fault, from the entry on and until it is over."""
    match row.fault:
        case "kill":
            kill(cluster, namespace, row)
            yield
        case "stop":
            with stopped(victims(cluster, namespace, row)):
                yield
        case "starve":
            with starved(victims(cluster, namespace, row)):
                yield
        case "hang":
            with hanging(cluster, namespace, row):
                yield
        case "lose":
            LOSSES[row.what](cluster, namespace)
            yield


def victims(cluster: Cluster, namespace: str, row: Row) -> list[int]:
    """Pids, at least one."""
    layout = node.NODE.cluster
    if row.part in ("kubelet", "containerd"):
        pid = processes.pid_of(layout, node.NODE.process(row.part))
        found = [pid] if pid is not None else []
    elif row.part == "API server":
        pid = processes.pid_of(layout, "apiserver")
        found = [pid] if pid is not None else []
    elif row.part == "container":
        found = [one.pid for one in node.gpu_processes() if one.uid in subjects(cluster, namespace)]
    elif row.part == "containerd-shim":
        found = [parent(one.pid) for one in node.gpu_processes() if one.uid in subjects(cluster, namespace)]
    else:
        found = eventually(lambda: node.pids_of(row.part), f"{row.part} runs")[:1]
    assert found, f"there is no {row.part} to {row.fault}"
    return found


def subjects(cluster: Cluster, namespace: str) -> set[str]:
    """UIDs of the subject's pods that have processes: also of those that the API forgot."""
    residents = cluster.api.listed("pod", namespace, f"app in ({STEADY},{BUSY})")
    return {one.uid for one in node.gpu_processes() if one.uid} - {pod["metadata"]["uid"] for pod in residents}


def parent(pid: int) -> int:
    """Of a container's first process: its shim."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(cluster: Cluster, namespace: str, row: Row) -> None:
    """SIGKILL. What a node's init system would start again is started again."""
    for pid in victims(cluster, namespace, row):
        with contextlib.suppress(ProcessLookupError):
            send_signal(pid, signal.SIGKILL)
    if row.part == "kubelet":
        processes.stop(node.NODE.cluster, node.NODE.process("kubelet"))
        local_node.start_kubelet(node.NODE)
    elif row.part == "containerd":
        processes.stop(node.NODE.cluster, node.NODE.process("containerd"))
        node.NODE.containerd_socket.unlink(missing_ok=True)
        local_node.start_runtime(node.NODE)


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """For `STOP_S`."""
    for pid in pids:
        send_signal(pid, signal.SIGSTOP)
    until_s = time.monotonic() + STOP_S
    try:
        yield
        time.sleep(max(0.0, until_s - time.monotonic()))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def starved(pids: list[int]) -> Iterator[None]:
    """For `STARVE_S`. With cgroup v1 in a group of their own; with v2, where a process has one group, their whole container."""
    until_s = time.monotonic() + STARVE_S
    with contextlib.ExitStack() as end:
        for pid in pids:
            end.enter_context(_starved_v2(pid) if hierarchies() == [ROOT] else _starved_v1(pid))
        yield
        time.sleep(max(0.0, until_s - time.monotonic()))


@contextlib.contextmanager
def _starved_v1(pid: int) -> Iterator[None]:
    was = cpu_group(pid)
    group = ROOT / "cpu" / f"tangram-starved-{pid}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text(str(STARVED_PERCENT * 1000))
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (was / "cgroup.procs").write_text(member)
        eventually(lambda: _removed(group), f"{group} is empty", timeout_s=10)


@contextlib.contextmanager
def _starved_v2(pid: int) -> Iterator[None]:
    limit = cpu_group(pid) / "cpu.max"
    before = limit.read_text()
    limit.write_text(f"{STARVED_PERCENT * 1000} 100000")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            limit.write_text(before)


def cpu_group(pid: int) -> Path:
    """The folder of the process's group that has the processor's controller."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and hierarchies() == [ROOT]:
            return ROOT / path.lstrip("/")
        if "cpu" in controllers.split(","):
            return ROOT / "cpu" / path.lstrip("/")
    raise AssertionError(f"process {pid} is in no group with a processor's controller")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@contextlib.contextmanager
def hanging(cluster: Cluster, namespace: str, row: Row) -> Iterator[None]:
    """A call of the driver that does not return, or silent peers at every door of a part, for `STOP_S` at least."""
    until_s = time.monotonic() + STOP_S
    if row.part in ("NVML child", "container"):
        seconds = 1000 if row.part == "NVML child" else STOP_S
        node.driver("fault", "hang", row.what, f"seconds={seconds:g}")
        try:
            if row.part == "NVML child":
                eventually(lambda: offered(cluster) == 0, "the node offers no GPU while NVML hangs", timeout_s=60)
            yield
            time.sleep(max(0.0, until_s - time.monotonic()))
        finally:
            node.driver("fault", "none")
        return
    with contextlib.ExitStack() as end:
        for connect in doors(cluster, row):
            for _ in range(SILENT_PEERS):
                with contextlib.suppress(OSError):  # it takes no more of them
                    end.enter_context(connect())
        yield
        time.sleep(max(0.0, until_s - time.monotonic()))


def offered(cluster: Cluster) -> int:
    return int(cluster.node()["status"]["allocatable"].get("tangram.sh/gpu-mem", 0))


def doors(cluster: Cluster, row: Row) -> list[Callable[[], socket.socket]]:
    """How to connect to each socket of a part."""
    if row.part == "device plugin":
        grpc = sorted(node.DEVICE_PLUGINS.glob("tangram-*.sock"))
        return [lambda at=at: _unix(at, socket.SOCK_STREAM) for at in grpc] + [  # type: ignore[misc]
            lambda: _unix(node.STATE / "plugin/nvml.sock", socket.SOCK_SEQPACKET)
        ]
    if row.part == "arbiter":
        grants = sorted((node.STATE / "sockets").glob("[!.]*/arbiter.sock"))
        return [lambda at=at: _unix(at, socket.SOCK_SEQPACKET) for at in grants] + [  # type: ignore[misc]
            lambda: _unix(node.STATE / "arbiter/status.sock", socket.SOCK_STREAM)
        ]
    component, ports = {"webhook": ("webhook", (8443, 8080)), "extender": ("scheduler", (8889,))}[row.part]
    address = address_of(cluster.api.listed("pod", NAMESPACE), component)
    return [lambda port=port: socket.create_connection((address, port), timeout=3) for port in ports]  # type: ignore[misc]


def _unix(path: Path, kind: socket.SocketKind) -> socket.socket:
    """By a short name: a socket's path has 107 bytes at most."""
    connected = socket.socket(socket.AF_UNIX, kind)
    folder = os.open(path.parent, os.O_PATH)
    try:
        connected.settimeout(1)
        connected.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError:
        connected.close()
        raise
    finally:
        os.close(folder)
    return connected


def _delete(*patterns: str, under: Path = node.STATE) -> Callable[[Cluster, str], None]:
    """What matches, below the state folder."""

    def lose(_cluster: Cluster, _namespace: str) -> None:
        found = [path for pattern in patterns for path in under.glob(pattern)]
        assert found, f"there is nothing like {', '.join(patterns)} below {under} to lose"
        for path in found:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    return lose


def _lose_annotation(cluster: Cluster, _namespace: str) -> None:
    """As the device plugin: no other account may."""
    account = f"system:serviceaccount:{NAMESPACE}:tangram-node"
    extra = f"authentication.kubernetes.io/node-name={node.NODE.name}"
    cluster.kubectl(
        "annotate", "node", node.NODE.name, "tangram.sh/inventory-", "--as", account, "--as-user-extra", extra
    )


def _lose_checkpoint(_cluster: Cluster, _namespace: str) -> None:
    """With the kubelet: it writes the file from its memory at each pod."""
    processes.stop(node.NODE.cluster, node.NODE.process("kubelet"))
    (node.DEVICE_PLUGINS / "kubelet_internal_checkpoint").unlink()
    local_node.start_kubelet(node.NODE)


def _lose_secret(cluster: Cluster, _namespace: str) -> None:
    cluster.kubectl("-n", NAMESPACE, "delete", "secret", f"{WEBHOOK}-tls")


def _lose_bundle(cluster: Cluster, _namespace: str) -> None:
    patch = json.dumps([{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}])
    cluster.kubectl("patch", "mutatingwebhookconfiguration", WEBHOOK, "--type=json", "-p", patch)


LOSSES: Final[dict[str, Callable[[Cluster, str], None]]] = {
    "allocation record": _delete("grants/*/allocation.json"),
    "pod records": _delete("pods/*.json"),
    "plugin sockets": _delete("tangram-*.sock", under=node.DEVICE_PLUGINS),
    "CDI specification": _delete(node.CDI_SPEC.name, under=node.CDI_SPEC.parent),
    "inventory annotation": _lose_annotation,
    "installed library": _delete("lib/*", *PRELOAD_TEXTS),
    "grant file": _delete("grants/*/grant"),
    "verdicts of the trials": _delete("plugin/trials.json"),
    "status socket": _delete("arbiter/status.sock"),
    "grant sockets": _delete("sockets/*/arbiter.sock"),
    "NVML socket": _delete("plugin/nvml.sock"),
    "kubelet's checkpoint": _lose_checkpoint,
    "webhook's Secret": _lose_secret,
    "webhook's caBundle": _lose_bundle,
}
"""Row.what -> how it is lost."""
