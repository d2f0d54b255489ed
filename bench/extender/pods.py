"""Processor time that the extender spends on a pod from its creation to the watch's news that it is bound.

A `tangram-extender` process of its own watches a small API server in this process, and is called as kube-scheduler calls it: filter with the
names of all nodes, then bind, one pod after another. Pods are as an API server has them, managedFields included. `ahead`: the extender
nominates pods that wait, and kube-scheduler names the nominated node alone. Processor time is that of the extender's process. It depends
less on what else the machine does than seconds do, but not little: compare versions of one run.
`bare` is the same calls to a process with the extender's server that answers nothing, a pod.

    python -m bench.extender.pods [--nodes 1000 5000 --pods 2000 --repeats 3] [--label COMMIT]      appends to pods.csv beside this file
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench.calls import Kept, posted, wait_for
from bench.extender.filter import SIZES_MIB, ready, start_extender
from bench.process import cpu_s
from bench.rows import append
from tests.builders import node, pod
from tests.fake_api import FakeApi
from tests.ports import free_port

HERE: Final = Path(__file__).parent
MODES: Final = ("plain", "ahead")
NAME: Final = "gke-production-gpu-pool-{:02}-5d8f1c2e-{:04}"
SETTLED_S: Final = 1.0
"""For what the extender does by itself before the first call and after the last: it nominates no pod before the first."""
START_LIMIT_S: Final = 60
Thing = dict[str, Any]

BARE: Final = """
import sys, uvloop
from extender.server import scheduler_app
from observe.bounds import VERBS
from observe.ports import listen
from observe.serving import Server
from extender.verbs import VerbResponse
class Nothing:
    async def filter(self, body): return VerbResponse(b'{"NodeNames":["a"],"Error":""}')
    async def bind(self, body): return VerbResponse(b'{"Error":""}')
uvloop.run(Server(scheduler_app(Nothing()), VERBS).serve([listen("127.0.0.1", int(sys.argv[1]))]))
"""


def as_stored(plain: Thing) -> Thing:
    """The pod as the API server has it: defaults, a token's volume, the managers of each field."""
    meta, spec = plain["metadata"], plain["spec"]
    mount = {
        "name": "kube-api-access-x7x2b",
        "readOnly": True,
        "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
    }
    containers = [
        one | {
            "image": "registry.example.com/team/training:2026.1", "command": ["python", "train.py"], "volumeMounts": [mount],
            "env": [{"name": f"SETTING_{at}", "value": "some value of it"} for at in range(6)],
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File", "imagePullPolicy": "IfNotPresent",
        }
        for one in spec["containers"]
    ]  # fmt: skip
    sources: list[Thing] = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    ]
    fields = {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in meta.get("annotations", {})}}}
    fields["f:spec"] = {"f:containers": {'k:{"name":"main"}': {f"f:{key}": {} for key in containers[0]}}}
    written = {"manager": "kubectl-create", "operation": "Update", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z"}
    return {
        "kind": "Pod", "apiVersion": "v1",
        "metadata": meta | {
            "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1,
            "managedFields": [written | {"fieldsType": "FieldsV1", "fieldsV1": fields}],
        },
        "spec": spec | {
            "containers": containers, "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst",
            "volumes": [{"name": mount["name"], "projected": {"sources": sources, "defaultMode": 420}}],
            "serviceAccountName": "default", "serviceAccount": "default", "securityContext": {}, "schedulerName": "tangram-scheduler",
            "priority": 0, "enableServiceLinks": True, "preemptionPolicy": "PreemptLowerPriority",
            "tolerations": [
                {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
                for key in ("not-ready", "unreachable")
            ],
        },
        "status": {"phase": "Pending", "qosClass": "BestEffort"},
    }  # fmt: skip


def schedule(port: int, names: Sequence[str], pods: Sequence[Thing], api: FakeApi) -> int:
    """As kube-scheduler. Returns for how many pods one node was named."""
    every, nominated = json.dumps(names, separators=(",", ":")), 0
    filtering, binding = Kept(port), Kept(port)
    for made in pods:
        meta = made["metadata"]
        known = api.pod(f"{meta['namespace']}/{meta['name']}") or made
        node_name = known["status"].get("nominatedNodeName", "")
        nominated += bool(node_name)
        sent = known | {"metadata": {key: value for key, value in known["metadata"].items() if key != "managedFields"}}
        listed = json.dumps([node_name]) if node_name else every
        _, body = filtering.send(
            posted("/filter", f'{{"Pod":{json.dumps(sent)},"Nodes":null,"NodeNames":{listed}}}'.encode())
        )
        answer = json.loads(body)
        (chosen,) = answer["NodeNames"]
        bound = {
            "PodName": meta["name"],
            "PodNamespace": meta["namespace"],
            "PodUID": meta["uid"],
            "Node": chosen,
        }
        _, body = binding.send(posted("/bind", json.dumps(bound).encode()))
        assert not json.loads(body)["Error"], body[:300]
    filtering.close()
    binding.close()
    return nominated


async def measure(nodes: int, count: int, mode: str) -> dict[str, object]:
    """One run."""
    async with FakeApi() as api:
        built = [node(NAME.format(at // 250, at % 250)).with_gpus(8) for at in range(nodes)]
        for one in built:
            api.put(one.plain())
        names = [one.name for one in built]
        process, port, metrics_port = start_extender(
            api.port, "--nominate-ahead", "always" if mode == "ahead" else "never"
        )
        try:
            await asyncio.wait_for(ready(metrics_port), START_LIMIT_S)
            load, before_s = os.getloadavg()[0], cpu_s(process.pid)
            pods = [
                as_stored(pod(f"train-{at:05}").asking(mib=SIZES_MIB[at % len(SIZES_MIB)], core=10 * (at % 4)).plain())
                for at in range(count)
            ]
            for one_pod in pods:
                api.put(one_pod)
            await asyncio.sleep(SETTLED_S)
            nominated = await asyncio.to_thread(schedule, port, names, pods, api)
            await asyncio.sleep(SETTLED_S)
            spent_ms = (cpu_s(process.pid) - before_s) * 1000 / count
        finally:
            process.terminate()
            process.wait()
        bare_ms = await asyncio.to_thread(bare, names, pods, api)
    return {
        "mode": mode, "nodes": nodes, "pods": count, "nominated": nominated,
        "cpu_ms": round(spent_ms, 3), "bare_cpu_ms": round(bare_ms, 3), "load": round(load, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }  # fmt: skip


def bare(names: Sequence[str], pods: Sequence[Thing], api: FakeApi) -> float:
    """Milliseconds a pod of a process that only serves."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", BARE, str(port)]) as process:
        try:
            wait_for(port)
            before_s = cpu_s(process.pid)
            schedule(port, names, pods, api)
            return (cpu_s(process.pid) - before_s) * 1000 / len(pods)
        finally:
            process.terminate()


def main() -> int:
    """Measure and append to the CSV."""
    parser = argparse.ArgumentParser(prog="bench.extender.pods", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[1_000, 5_000])
    parser.add_argument("--pods", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--label", default="", help="commit that is measured; without it nothing is written")
    arguments = parser.parse_args()
    for nodes, _, mode in product(arguments.nodes, range(arguments.repeats), arguments.modes):
        row: dict[str, object] = {
            "label": arguments.label, "date": time.strftime("%Y-%m-%d"), **asyncio.run(measure(nodes, arguments.pods, mode)),
        }  # fmt: skip
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if arguments.label:
            append(HERE / "pods.csv", row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
