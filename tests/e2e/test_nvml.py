"""NVML that hangs on a node, and an arbiter without a privilege."""

from __future__ import annotations

import re
from pathlib import Path

from hack.stack import FAKE_DRIVER_ROOT, NAMESPACE
from hack.waiting import eventually
from tests.e2e.cluster import Cluster, runs_in_a_container
from tests.e2e.gpus import UNITS
from tests.e2e.objects import share

CAP_KILL = 1 << 5


def fault(cluster: Cluster, *words: str) -> None:
    socket = f"{FAKE_DRIVER_ROOT}/run/nvidia-persistenced/socket"
    program = ("nvidia-fake-driverd", "ctl", "--socket", socket, "fault")
    cluster.kubectl("-n", "fake-gpu", "exec", "daemonset/fake-driver", "--", *program, *words)


def inside(cluster: Cluster, container: str, script: str) -> str:
    """What a script prints in a container of the DaemonSet."""
    return cluster.kubectl("-n", NAMESPACE, "exec", "ds/tangram-node", "-c", container, "--", "sh", "-c", script)


def readyz(cluster: Cluster) -> str:
    """The page of the plugin, by its own container."""
    request = (
        "import urllib.request, urllib.error\n"
        "try: print(urllib.request.urlopen('http://127.0.0.1:9402/readyz').read().decode())\n"
        "except urllib.error.HTTPError as error: print(error.read().decode())"
    )
    return inside(cluster, "plugin", f'python3 -c "{request}"').strip()


def children() -> set[int]:
    """Pids of the plugin's NVML processes. Local cluster only."""
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if runs_in_a_container(folder, "nvml")}


def offered(cluster: Cluster) -> int:
    return int(cluster.node()["status"]["allocatable"].get("tangram.sh/gpu-mem", 0))


def test_the_arbiter_has_one_capability_and_neither_driver_nor_library(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("limited", 8))
    status = inside(cluster, "arbiter", "grep -e CapEff -e NoNewPrivs -e Seccomp: /proc/self/status")
    assert int(re.search(r"CapEff:\s+(\w+)", status)[1], 16) == CAP_KILL  # type: ignore[index]
    assert re.search(r"NoNewPrivs:\s+1", status)
    assert re.search(r"Seccomp:\s+2", status)
    assert inside(cluster, "arbiter", "ls /var/lib/tangram").split() == ["arbiter", "grants", "plugin", "sockets"]
    assert "Read-only" in inside(cluster, "arbiter", "touch /var/lib/tangram/plugin/x 2>&1 || true")
    assert "Read-only" in inside(cluster, "arbiter", "touch /var/lib/tangram/grants/x 2>&1 || true")
    assert inside(cluster, "arbiter", "find /var/lib/tangram/sockets -name 'libtangram*' -o -type f") == ""
    assert inside(cluster, "arbiter", "ls /dev | grep -c nvidia || true").strip() == "0"
    grabbed = cluster.exec(namespace, "limited", "sh", "-c", "gpuview grab 12Gi || true")
    assert re.search(r"after [67] GiB the driver said CUDA_ERROR_OUT_OF_MEMORY", grabbed)


def test_nvml_that_hangs_takes_the_gpus_out_of_use_until_it_answers(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("running", 8))
    fault(cluster, "hang", "nvmlDeviceGetMemoryInfo", "seconds=1000")
    try:
        eventually(lambda: offered(cluster) == 0, "the kubelet offers no GPU", timeout_s=120)
        assert re.search(r"a call of NVML for .* did not return within 10 s", readyz(cluster))
        assert cluster.exec(namespace, "running", "gpuview", "grab", "4Gi"), "a running pod gets memory all the same"
    finally:
        fault(cluster, "none")
    eventually(lambda: readyz(cluster) == "ok", "the plugin recovers", timeout_s=120)
    eventually(lambda: offered(cluster) == 2 * UNITS, "and the kubelet with it", timeout_s=60)
    cluster.run(namespace, share("next", 8))
    assert len(children()) == 1
