"""The same cluster, chart and images as in CI, on a machine with a real NVIDIA GPU.

    make cluster-up
    TANGRAM_DRIVER_ROOT=/ uv run pytest tests/gpu/test_cluster.py

offline.sh does that where no network is reached. PyTorch comes from the machine itself: the pods mount TANGRAM_TORCH_USR
(default /usr; a writable overlay of it where the driver's libraries are mounted into it) and TANGRAM_TORCH_HOME (default
/opt/torch), and run TANGRAM_TORCH_PYTHON. What is found is written as rows to TANGRAM_GPU_CSV.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack.kubectl import Kubectl
from hack.stack import NO_FAKE_DRIVER, install_chart, uninstall_chart
from hack.waiting import eventually
from tests.e2e.api import served
from tests.e2e.cluster import Cluster
from tests.e2e.gpu_time import containers_of, under_way
from tests.e2e.nvidia import generate_specification, remove_specification
from tests.e2e.objects import RESTRICTED, container, pod
from vgpu.gputime.trial_verdict import FILE, TrialOutcome, trials_from_text
from vgpu.protocol.status import GpuTimeStatus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DRIVER_ROOT = os.environ.get("TANGRAM_DRIVER_ROOT", "/")
LIBRARIES = os.environ.get("TANGRAM_DRIVER_LIBRARIES", "/usr/lib/x86_64-linux-gnu")
"""Where the driver's libraries lie on the node."""
PYTHON = os.environ.get("TANGRAM_TORCH_PYTHON", "/opt/torch/.venv/bin/python3")
MOUNTS = {
    "/usr": os.environ.get("TANGRAM_TORCH_USR", "/usr"),
    "/opt/torch": os.environ.get("TANGRAM_TORCH_HOME", "/opt/torch"),
}
IMAGE = os.environ.get("TANGRAM_TORCH_IMAGE", "localhost/tangram-workload:dev")
TRIALS = f"/var/lib/tangram/plugin/{FILE}"
"""The node's verdicts, in its containers."""

PROGRAM = """
import json, os, signal, torch
MIB = 2**20
free, total = torch.cuda.mem_get_info()
held = []
try:
    while len(held) < 400:
        held.append(torch.empty(512 * MIB, dtype=torch.uint8, device="cuda").fill_(1))
    error = "none"
except torch.OutOfMemoryError:
    error = "torch.OutOfMemoryError"
torch.cuda.synchronize()
count = len(held)
held = held[: count // 2]
torch.cuda.empty_cache()
x = torch.ones(1024, 1024, device="cuda")
right = float((x @ x).sum().item()) == 1024.0**3
held += [torch.empty(512 * MIB, dtype=torch.uint8, device="cuda").fill_(1) for _ in range(count - len(held) - 1)]
torch.cuda.synchronize()
print(json.dumps({"uid": os.getuid(), "total_mib": total // MIB, "held_mib": 512 * count, "error": error, "recovered": right,
                  "gpus": torch.cuda.device_count(), "uuid": str(torch.cuda.get_device_properties(0).uuid)}), flush=True)
signal.pause()
"""


PRODUCTS = """
import sys, time, torch
size, rest_s = int(sys.argv[1]), float(sys.argv[2])
x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
y = torch.empty_like(x)
print("starts", flush=True)
while True:
    torch.mm(x, x, out=y)
    torch.cuda.synchronize()
    time.sleep(rest_s)
"""
"""Matrix products of one size, one after the other, with rests between."""
WINDOW_S, SETTLE_S = 10.0, 3.0


def torch_pod(name: str, mem: str, *, nobody: bool) -> dict[str, Any]:
    """A pod that fills its share with PyTorch, is refused, recovers, and stays."""
    return _with_torch(name, [PROGRAM], mem, 20, {}, nobody=nobody)


def products_pod(
    name: str, size: int, rest_s: float = 0.0, core: int | None = None, service_class: str = ""
) -> dict[str, Any]:
    """A pod that multiplies matrices."""
    annotations = {"tangram.sh/class": service_class} if service_class else {}
    return _with_torch(name, [PRODUCTS, str(size), str(rest_s)], "8Gi", core, annotations)


def _with_torch(
    name: str, program: list[str], mem: str, core: int | None, annotations: dict[str, str], *, nobody: bool = False
) -> dict[str, Any]:
    volumes = [{"name": f"v{i}", "hostPath": {"path": host}} for i, host in enumerate(MOUNTS.values())]
    mounts = [{"name": f"v{i}", "mountPath": path} for i, path in enumerate(MOUNTS)]
    inner = container(
        mem=mem,
        core=core,
        run=[PYTHON, "-c", *program],
        image=IMAGE,
        volumeMounts=mounts,
        env={"HOME": "/tmp", "PATH": "/usr/local/nvidia/bin:/usr/local/bin:/usr/bin:/bin"},
        securityContext=RESTRICTED if nobody else {"runAsUser": 0},
    )
    return pod(name, inner, annotations=annotations, volumes=volumes)


@pytest.fixture(scope="module", params=["cdi", "nvidia"])
def mode(request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    """Tangram installed over the real driver, once for each access mode."""
    access: str = request.param
    kubectl = Kubectl.local()
    node = {"privileged": "auto", **NO_FAKE_DRIVER}
    over: dict[str, Any] = {"driver": {"root": DRIVER_ROOT}, "accessMode": access, "node": node}
    if access == "nvidia":
        over["runtimeClassName"] = "nvidia"
        generate_specification(DRIVER_ROOT, "/", LIBRARIES)
    try:
        with served(kubectl) as api:
            cluster = Cluster(kubectl, api)
            install_chart(kubectl, over)
            cluster.wait_for_gpus()
            yield access, cluster
            on_node(cluster, "rm", TRIALS)  # each access mode makes its own
            uninstall_chart(kubectl)
    finally:
        if access == "nvidia":
            remove_specification()


@contextmanager
def own_namespace(cluster: Cluster, namespace: str) -> Iterator[str]:
    """A namespace whose pods are gone afterwards, whatever became of them: the next test has the whole GPU."""
    cluster.make_namespace(namespace)
    try:
        yield namespace
    finally:
        cluster.drop_namespaces(namespace)


def processes() -> dict[int, int]:
    """Host pid -> MiB, in the driver's own accounting."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(pid): int(mib) for pid, mib in (row.split(", ") for row in rows if row)}


def record(rows: list[tuple[str, str, object]]) -> None:
    """Append rows to the CSV that is committed."""
    where = os.environ.get("TANGRAM_GPU_CSV")
    if where:
        with Path(where).open("a", newline="") as out:
            csv.writer(out).writerows(rows)


def on_node(cluster: Cluster, *command: str) -> str:
    """Run a command in the device plugin's container."""
    return cluster.kubectl("-n", "tangram-system", "exec", "ds/tangram-node", "-c", "plugin", "--", *command)


def test_the_device_plugin_tried_suspending_before_it_offered_the_gpu(mode: tuple[str, Cluster]) -> None:
    access, cluster = mode
    trials = trials_from_text(on_node(cluster, "cat", TRIALS))
    (tried,) = trials.tried
    verdict = tried.verdict
    facts = {
        "outcome": verdict.outcome,
        "why": verdict.why,
        "count before, during, after": f"{verdict.before} {verdict.during} {verdict.after}",
        "suspend and resume us": f"{verdict.suspend_us:.0f} {verdict.resume_us:.0f}",
    }
    record([(access, f"trial in the plugin's container: {key}", value) for key, value in facts.items()])
    assert verdict.outcome is TrialOutcome.WORKS
    assert min(verdict.before, verdict.after) > 0
    assert verdict.during == 0


def test_pytorch_pods_are_held_to_their_shares(mode: tuple[str, Cluster]) -> None:
    access, cluster = mode
    shares = {"root-8": 8192, "root-30": 30720, "nobody-8": 8192, "nobody-30": 30720}
    with own_namespace(cluster, f"gpu-{access}") as namespace:
        began = time.monotonic()
        cluster.run(
            namespace,
            *(torch_pod(name, f"{mib // 1024}Gi", nobody=name.startswith("nobody")) for name, mib in shares.items()),
            timeout_s=180,
        )
        seen = {name: _report(cluster, namespace, name) for name in shares}
        used = processes()
        record(
            [
                (access, "driver MiB of all containers", sum(used.values())),
                (access, "granted MiB", sum(shares.values())),
                (access, "seconds from create to reports", round(time.monotonic() - began, 1)),
            ]
        )
        for name, mib in shares.items():
            record([(access, f"{name}: {key}", value) for key, value in seen[name].items()])
            assert seen[name]["total_mib"] == mib
            assert seen[name]["error"] == "torch.OutOfMemoryError"
            assert mib - 1024 <= seen[name]["held_mib"] <= mib
            assert seen[name]["recovered"] is True
            assert seen[name]["gpus"] == 1
            assert seen[name]["uid"] == (65534 if name.startswith("nobody") else 0)
            assert [seen[name]["uuid"]] == cluster.assigned(namespace, name)
        assert len(used) == len(shares)
        assert sum(used.values()) <= sum(shares.values())
        smi = cluster.exec(
            namespace, "root-8", "nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"
        )
        record([(access, "root-8: nvidia-smi total MiB", smi.strip())])
        assert smi.strip() == "8192"


def _report(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        lines = [line for line in cluster.kubectl("-n", namespace, "logs", name).splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else None

    return eventually(look, f"the report of pod {name}", timeout_s=180)


def test_a_pod_without_a_share_sees_no_gpu(mode: tuple[str, Cluster]) -> None:
    access, cluster = mode
    with own_namespace(cluster, f"gpu-{access}-none") as namespace:
        cluster.run(namespace, pod("none", container(run=["gpuview", "view", "--then-wait"])))
        assert "no CUDA driver" in cluster.kubectl("-n", namespace, "logs", "none")


@dataclass(frozen=True)
class Reading:
    """GPU time of pods that have reported their channels, and when it was read."""

    at_s: float
    gpu_times: dict[str, GpuTimeStatus]


def read_gpu_times(namespace: str) -> Reading:
    """Of all pods in a namespace."""
    found = containers_of(namespace)
    at_s = time.monotonic()
    gpu_times = {name: one.gpu_time for name, one in found.items() if one.gpu_time is not None}
    assert gpu_times.keys() == found.keys(), f"of {sorted(found)} only {sorted(gpu_times)} have reported their channels"
    return Reading(at_s, gpu_times)


def test_a_latency_critical_pod_comes_first_and_an_edited_class_counts(mode: tuple[str, Cluster]) -> None:
    access, cluster = mode
    with own_namespace(cluster, f"gpu-{access}-class") as namespace:
        be, lc = (
            products_pod("be", 16384, service_class="best-effort"),
            products_pod("lc", 4096, 0.02, service_class="latency-critical"),
        )
        cluster.run(namespace, be, lc, timeout_s=180)
        under_way(namespace, "be", "lc")
        time.sleep(SETTLE_S)  # the matrix library loads its kernels, and NVML begins to count
        then = read_gpu_times(namespace).gpu_times
        time.sleep(WINDOW_S)  # what is counted is what happens in this time
        now = read_gpu_times(namespace).gpu_times
        requests = now["lc"].arrivals - then["lc"].arrivals
        waited_s = now["lc"].off_s + now["lc"].clearing_s - then["lc"].off_s - then["lc"].clearing_s
        suspends, on_s = now["be"].suspends - then["be"].suspends, now["be"].on_s - then["be"].on_s
        facts = {
            "requests": requests,
            "milliseconds that one waited": round(1000 * waited_s / max(1, requests), 3),
            "suspends of the neighbour": suspends,
            "seconds that the neighbour was on": round(on_s, 2),
            "seconds of both that NVML counted": round(sum(seen_s(now[name]) - seen_s(then[name]) for name in now), 2),
            "taken for liars": sum(gpu_time.unreported for gpu_time in now.values()),
        }
        record([(access, f"classes: {key}", value) for key, value in facts.items()])
        assert requests > 50
        assert suspends > requests / 2
        assert waited_s / requests < 0.005, "a suspend, and no product of 16384^3"
        assert on_s > WINDOW_S / 2, "the best-effort pod has the rest"
        assert {gpu_time.mode for gpu_time in now.values()} == {"suspend"}
        assert not any(gpu_time.unreported for gpu_time in now.values())
        cluster.kubectl("-n", namespace, "annotate", "pod", "lc", "--overwrite", "tangram.sh/class=best-effort")
        cluster.kubectl("-n", namespace, "annotate", "pod", "be", "--overwrite", "tangram.sh/class=latency-critical")

        def waits() -> bool:
            gpu_time = read_gpu_times(namespace).gpu_times["lc"]
            return gpu_time.working and not gpu_time.on

        eventually(waits, "it waits: two seconds, and what looking takes", timeout_s=5)


def test_core_limits_of_two_pods_are_enforced_side_by_side(mode: tuple[str, Cluster]) -> None:
    access, cluster = mode
    requested = {"few": 30, "many": 60}
    with own_namespace(cluster, f"gpu-{access}-core") as namespace:
        cluster.run(
            namespace, *(products_pod(name, 8192, core=core) for name, core in requested.items()), timeout_s=180
        )
        under_way(namespace, *requested)
        time.sleep(SETTLE_S)  # the matrix library loads its kernels, and credit saved up meanwhile is spent
        then = read_gpu_times(namespace)
        time.sleep(WINDOW_S)  # what is counted is what happens in this time
        now = read_gpu_times(namespace)
        passed_s = now.at_s - then.at_s
        for name in requested:
            before, after = then.gpu_times[name], now.gpu_times[name]
            got = 100 * (after.on_s - before.on_s) / passed_s
            facts = {
                "percent": round(got, 2),
                "percent that NVML counted": round(100 * (seen_s(after) - seen_s(before)) / passed_s, 2),
                "suspends": after.suspends - before.suspends,
                "taken for a liar": int(after.unreported),
            }
            record([(access, f"core limit {requested[name]}: {key}", value) for key, value in facts.items()])
            assert abs(got - requested[name]) < 2
            assert not after.unreported


def seen_s(gpu_time: GpuTimeStatus) -> float:
    """GPU seconds that the driver counted, as the arbiter read them."""
    assert gpu_time.seen_s is not None
    return gpu_time.seen_s
