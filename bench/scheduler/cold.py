"""How long an extender that starts takes to know a large cluster, and what it weighs then.

Nodes and running pods with their assignments are written into etcd as the API server would (in JSON, which it reads as well as its own
form) before it starts: making 50,000 pods through the API would take minutes. Measured is the time from the start of the process to
its /readyz, and its resident memory then and at its highest. The API server has read everything before, as one that runs has.

The extender starts as it does in its image: modules are compiled, and no kubeconfig file is read. From a checkout that has neither, it takes 1.4 s more of
processor time and 23 MiB.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.process import cpu_s, memory_mib
from hack.kubectl import ROOT
from tests.apiserver import ApiServer, running
from tests.builders import node, pod, share
from tests.integration.extender.scheduling import Thing, node_object, pod_object
from tests.ports import free_port

GPUS: Final = 8
A_TRANSACTION: Final = 100
"""Keys; etcd takes 128."""
MADE: Final = "2026-01-01T00:00:00Z"
REQUESTED_EACH_S: Final = 0.02
TIMEOUT_S: Final = 300

AS_IN_A_POD: Final = """
import sys
import kube.client
from kube.auth import Credentials, TlsContexts, TlsFiles
server, *files = sys.argv[1:5]
del sys.argv[1:5]
contexts = TlsContexts()
async def load(): return Credentials(server, contexts.of(TlsFiles(*files)))
kube.client.loader = lambda kubeconfig: load
from extender.__main__ import main
main()
"""
"""Without a kubeconfig file the official client is not imported."""


@dataclass(frozen=True, slots=True)
class Cold:
    """What was measured."""

    nodes: int
    gpus_a_node: int
    pods: int
    ready_s: float
    cpu_s: float
    rss_mib: int
    highest_rss_mib: int
    load: float


def measure(programs: dict[str, Path], folder: Path, nodes: int, pods: int) -> Cold:
    """One start of an extender."""
    folder.mkdir(parents=True)
    with running(programs, folder) as server:
        server.stop()
        fill(server.etcd, nodes, pods)
        server.start()
        for path, count in (("/api/v1/nodes", nodes), ("/api/v1/pods", pods)):
            listed = server("GET", f"{path}?limit=1")
            found = len(listed["items"]) + listed["metadata"].get("remainingItemCount", 0)
            assert found == count, f"{path}: {found} objects, {count} were written"
            server.http.get(f"{path}?resourceVersion=0&limit=1", timeout=TIMEOUT_S)
        return _start(server, nodes, pods)


def _start(server: ApiServer, nodes: int, pods: int) -> Cold:
    port, metrics_port = free_port(), free_port()
    flags = ["--port", str(port), "--metrics-port", str(metrics_port), "--metrics-host", "127.0.0.1"]
    pki, environment = server.kubeconfig.parent / "pki", _compiled(server.kubeconfig.parent / "compiled")
    files = [str(pki / name) for name in ("ca.crt", "admin.crt", "admin.key")]
    program = [sys.executable, "-c", AS_IN_A_POD, str(server.http.base_url).rstrip("/"), *files]
    load, began = os.getloadavg()[0], time.monotonic()
    process = subprocess.Popen([*program, *flags, "--log-level", "warning"], cwd=ROOT, env=environment)
    try:
        with httpx.Client(trust_env=False) as http:
            while not _ready(http, metrics_port):
                assert time.monotonic() - began < TIMEOUT_S, f"not ready after {TIMEOUT_S} s"
                time.sleep(REQUESTED_EACH_S)
        took = time.monotonic() - began
        rss_mib, highest_mib = (int(memory_mib(process.pid, what)) for what in ("VmRSS", "VmHWM"))
        cpu = cpu_s(process.pid)
    finally:
        process.terminate()
        process.wait()
    return Cold(nodes, GPUS, pods, round(took, 1), round(cpu, 1), rss_mib, highest_mib, round(load, 1))


def _compiled(folder: Path) -> dict[str, str]:
    """The environment of a process that finds its modules compiled in this folder, as they are in the image."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder)
    subprocess.run(
        [sys.executable, "-c", "import extender.__main__, extender.app"], cwd=ROOT, env=environment, check=True
    )
    return environment


def _ready(http: httpx.Client, port: int) -> bool:
    try:
        return http.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def fill(etcd: str, nodes: int, pods: int) -> None:
    """Write them all."""
    with httpx.Client(base_url=etcd, trust_env=False, timeout=60) as http:
        some: list[dict[str, Any]] = []
        for key, thing in _things(nodes, pods):
            value = base64.b64encode(json.dumps(thing, separators=(",", ":")).encode()).decode()
            some.append({"requestPut": {"key": base64.b64encode(key.encode()).decode(), "value": value}})
            if len(some) == A_TRANSACTION:
                http.post("/v3/kv/txn", json={"success": some}).raise_for_status()
                some = []
        if some:
            http.post("/v3/kv/txn", json={"success": some}).raise_for_status()


def _things(nodes: int, pods: int) -> Iterator[tuple[str, Thing]]:
    built = [node(f"node-{at:05}").with_gpus(GPUS) for at in range(nodes)]
    for one in built:
        thing = node_object(one)
        thing["metadata"] |= {"uid": f"uid-{one.name}", "creationTimestamp": MADE}
        yield f"/registry/minions/{one.name}", thing
    for at in range(pods):
        where = built[at % nodes]
        running_pod = (
            pod(f"p{at:05}")
            .asking(mib=8_192, core=10)
            .on(where.name)
            .assigned(share(where.gpus[at // nodes % GPUS], 8_192, 10))
        )
        thing = pod_object(running_pod)
        thing["metadata"] |= {"namespace": "default", "uid": f"uid-p{at:05}", "creationTimestamp": MADE}
        thing["status"] = {"phase": "Running", "startTime": MADE}
        yield f"/registry/pods/default/p{at:05}", thing
