"""The real kube-scheduler, configured by the chart, with its extender before a real API server.

Nodes are objects and nothing else: they are created with their status and their inventory. What becomes of pods, `following` watches.

ApiCalls --writes--> kube-apiserver <--/binding-- extender <--/filter, /bind, /preempt-- kube-scheduler
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx
import msgspec
import yaml

from hack.kubectl import ROOT
from tests.apiserver import MERGE, ApiServer, Program
from tests.builders import NodeBuilder, PodBuilder
from tests.contract.chart.rendering import NAMESPACE, Helm, env
from tests.integration.extender.harness import Extender
from tests.ports import free_port
from vgpu.api.names import DEFAULT

Thing = dict[str, Any]

AT_ONCE: Final = 16
"""Calls under way to the API server. More is not faster on two cores."""

PODS: Final = "/api/v1/pods"
NODES: Final = "/api/v1/nodes"
LEASES: Final = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
CALLS_A_SECOND: Final = 5_000
"""Of kube-scheduler to the API server. Its default of 50 would be all that a test of thousands of pods sees."""


class ApiRefused(Exception):
    """The API server refused. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class ApiCalls:
    """Calls to the API server by the thousand."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def call(self, method: str, path: str, body: object = None, content_type: str = "application/json") -> Any:
        """Decoded answer. Raises ApiRefused."""
        raw = msgspec.json.encode(body) if body is not None else None
        async with self.session.request(method, path, data=raw, headers={"Content-Type": content_type}) as answer:
            text = await answer.read()
            if answer.status >= 400:
                raise ApiRefused(answer.status, text.decode(errors="replace")[:500])
            return msgspec.json.decode(text)

    async def patch(self, path: str, body: object) -> Any:
        """Merge patch."""
        return await self.call("PATCH", path, body, MERGE)

    async def create(self, path: str, things: Iterable[Thing]) -> list[Thing]:
        """All of them, a few at a time, as the API server made them."""
        rest, made = iter(things), []

        async def some() -> None:
            for thing in rest:
                answer = await self.call("POST", path, thing)
                made.append(answer)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())
        return made

    async def delete(self, pod: Thing, **options: object) -> None:
        """Delete a pod, or find that it is gone."""
        with suppress(ApiRefused):
            await self.call("DELETE", path_of(pod), options)

    async def empty(self) -> None:
        """No pods and no nodes are left."""
        await self.call("DELETE", "/api/v1/namespaces/default/pods", {"gracePeriodSeconds": 0})
        await self.call("DELETE", NODES)


@asynccontextmanager
async def connected(server: ApiServer) -> AsyncIterator[ApiCalls]:
    """An `ApiCalls` of this server."""
    connector = aiohttp.TCPConnector(ssl=server.admin, limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    base = str(server.http.base_url)
    async with aiohttp.ClientSession(base, connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        yield ApiCalls(session)


@dataclass(frozen=True, slots=True)
class SchedulerPair:
    """A kube-scheduler and its extender, as one pod of the chart's Deployment has them."""

    scheduler: Program
    extender: Extender | None
    secure_port: int

    async def kill(self) -> None:
        """SIGKILL for both."""
        self.scheduler.kill()
        if self.extender is not None:
            await self.extender.kill()

    @property
    def leads(self) -> bool:
        """Has it been elected?"""
        return "uccessfully acquired lease" in self.scheduler.log.read_text(errors="replace")

    async def comes_to_lead(self, *, timeout_s: float = 60) -> None:
        """Return when it is elected. Only its log shows it."""
        async with asyncio.timeout(timeout_s):
            while not self.leads:
                assert self.scheduler.running, self.scheduler.log.read_text(errors="replace")[-3000:]
                await asyncio.sleep(0.1)

    def pid(self) -> int:
        """Of kube-scheduler."""
        assert self.scheduler.process is not None
        return self.scheduler.process.pid


class Stack:
    """Pairs before one API server. All are gone when `leave` returns. `flags`: more of kube-scheduler's."""

    def __init__(
        self, server: ApiServer, scheduler: Path, helm: Helm, folder: Path, api: ApiCalls, http: httpx.AsyncClient,
        *flags: str,
    ) -> None:  # fmt: skip
        self.api, self.server, self.flags = api, server, flags
        self._scheduler, self._helm, self._folder, self._http = scheduler, helm, folder, http
        self.pairs: list[SchedulerPair] = []

    async def pair(
        self,
        *,
        elected: bool = False,
        alone: bool = False,
        lease_s: int = 9,
        ahead: str = "never",
        spare_weight: int | None = None,
        before: Sequence[Thing] = (),
    ) -> SchedulerPair:
        """One more, whose extender is synced. `elected`: it waits until it leads; `alone`: without the extender;
        `ahead` and `spare_weight`: the chart's values nominateAhead and spareWeight; `before`: other extenders, which kube-scheduler calls before this one.
        """
        port, metrics_port, secure_port = free_port(), free_port(), free_port()
        extender_values = {"port": port, "metricsPort": metrics_port}
        if spare_weight is not None:
            extender_values["spareWeight"] = spare_weight
        values = {
            "scheduler": {
                "leaderElect": elected,
                "replicas": 2 if elected else 1,
                "leaseDurationSeconds": lease_s,
                "nominateAhead": ahead,
                "extender": extender_values,
            }
        }
        configuration, variables = self.configured(values)
        configuration["extenders"] = [*before, *configuration["extenders"]]
        if alone:
            del configuration["extenders"]
        extender = None if alone else await self.extender(variables, port, metrics_port)
        pair = SchedulerPair(self.scheduler(configuration, secure_port), extender, secure_port)
        self.pairs.append(pair)
        return pair

    def configured(self, values: Thing) -> tuple[Thing, Mapping[str, object]]:
        """What the chart gives kube-scheduler and the extender: its configuration, its environment."""
        rendered = self._helm.objects(values)
        (text,) = rendered.one("ConfigMap", "tangram-scheduler")["data"].values()
        configuration = yaml.safe_load(text)
        configuration["clientConnection"] = {
            "kubeconfig": str(self.server.kubeconfig), "qps": CALLS_A_SECOND, "burst": CALLS_A_SECOND,
        }  # fmt: skip
        return configuration, env(rendered.container("extender"))

    def scheduler(self, configuration: Thing, secure_port: int, *, name: str = "") -> Program:
        """A kube-scheduler, started; `name`: of its process."""
        file = self._folder / f"scheduler-{secure_port}.yaml"
        file.write_text(yaml.safe_dump(configuration))
        command = [
            "kube-scheduler", f"--config={file}", f"--secure-port={secure_port}", "--bind-address=127.0.0.1",
            f"--authentication-kubeconfig={self.server.kubeconfig}",
            f"--authorization-kubeconfig={self.server.kubeconfig}",
            "--authorization-always-allow-paths=/healthz,/readyz,/metrics", "--v=2", *self.flags,
        ]  # fmt: skip
        executable = self._scheduler
        if name:
            executable = self._folder / name
            executable.symlink_to(self._scheduler)
        program = Program(command, self._folder / f"scheduler-{secure_port}.log", executable)
        program.start()
        return program

    async def extender(
        self, variables: Mapping[str, object], port: int, metrics_port: int, *, kubeconfig: Path | None = None
    ) -> Extender:
        """With the environment that the chart gives it, but for the kube-scheduler that it may end: here it would see those of others."""
        given = {"TANGRAM_EXTENDER_SCHEDULER_PROCESS": ""} | {
            key: value for key, value in variables.items() if isinstance(value, str) and value != "kube-scheduler"
        }
        given["TANGRAM_EXTENDER_PORT"], given["TANGRAM_EXTENDER_METRICS_PORT"] = str(port), str(metrics_port)
        settings = ["--kubeconfig", str(kubeconfig or self.server.kubeconfig), "--metrics-host", "127.0.0.1"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "extender", *settings, stderr=PIPE, env={**os.environ, **given}, cwd=ROOT
        )
        extender = Extender(process, port, metrics_port, self._http)
        await extender.synced()
        return extender

    async def scheduler_metrics(self, pair: SchedulerPair) -> str:
        """What kube-scheduler reports of itself."""
        async with self.api.session.get(f"https://127.0.0.1:{pair.secure_port}/metrics", ssl=False) as answer:
            return await answer.text()

    async def leave(self) -> None:
        """Leave nothing to the next test: also no lease of a kube-scheduler that was killed, which the next one would wait for."""
        for pair in self.pairs:
            await pair.kill()
        await self.api.empty()
        await self.api.call("DELETE", LEASES)


async def prepare(api: ApiCalls) -> None:
    """The namespace of the release, for the lease."""
    with suppress(ApiRefused):
        await api.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})


def node_object(built: NodeBuilder) -> Thing:
    """The node as its kubelet and our device plugin would have it."""
    gpus = len(built.gpus)
    mib = sum(gpu.mib for gpu in built.gpus)
    capacity = {
        "cpu": "256", "memory": "2Ti", "pods": "500", DEFAULT.gpu: str(gpus), DEFAULT.gpu_core: str(100 * gpus),
        DEFAULT.gpu_mem: str(mib // built.unit_mib),
    }  # fmt: skip
    plain = built.plain()
    metadata = {"name": built.name, "labels": {"kubernetes.io/hostname": built.name}}
    metadata |= {"annotations": plain["metadata"].get("annotations", {})}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def pod_object(built: PodBuilder, service_class: str = "") -> Thing:
    """The pod as the webhook would leave it; `service_class` is its PriorityClass."""
    plain = built.plain()
    meta = {key: plain["metadata"][key] for key in ("name", "annotations", "labels") if key in plain["metadata"]}
    spec = plain["spec"] | {"terminationGracePeriodSeconds": 30}
    if service_class:
        spec["priorityClassName"] = service_class
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def path_of(pod: Thing) -> str:
    """Where the API has it."""
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
