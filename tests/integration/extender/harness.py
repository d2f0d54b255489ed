"""A real extender process between a test that plays kube-scheduler and a real API server, over a proxy that can lose what it carries.

test --/filter, /bind--> tangram-extender --Proxy--> kube-apiserver <--ApiServer-- test
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx
from aiohttp import web

from tests.apiserver import ApiServer
from tests.builders import NodeBuilder, PodBuilder
from tests.fake_api import Fault, Handler, hang_up
from tests.ports import free_port
from vgpu.api.codec import assignment_from_json
from vgpu.api.names import DEFAULT
from vgpu.scheduling.snapshot import Snapshot, drift, snapshot_from_json

PATIENCE_S: Final = 90.0
KUBECONFIG: Final = """\
apiVersion: v1
kind: Config
current-context: it
clusters: [{name: it, cluster: {server: "http://127.0.0.1:PORT"}}]
contexts: [{name: it, context: {cluster: it, user: it}}]
users: [{name: it, user: {}}]
"""


class Proxy:
    """Everything the extender sends to the API server passes here. `faults` as in tests/fake_api; `closed` = the network is down."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.faults: list[Fault] = []
        self.closed = False
        self.reporting = asyncio.Event()
        """While it is not set, what watches report waits here."""
        self.reporting.set()
        self._api = api
        self._watches: list[web.Request] = []
        self.kubeconfig = folder / "kubeconfig-of-the-extender"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        connector = aiohttp.TCPConnector(ssl=self._api.admin)
        async with aiohttp.ClientSession(str(self._api.http.base_url), connector=connector) as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.kubeconfig.write_text(KUBECONFIG.replace("PORT", str(runner.addresses[0][1])))
            try:
                yield self
            finally:
                self.close()
                await runner.cleanup()

    def close(self) -> None:
        """Cut every watch, and take no calls until `closed` is False again."""
        self.closed = True
        for request in list(self._watches):
            hang_up(request)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.closed:
            hang_up(request)
            return web.Response()
        for fault in list(self.faults):
            answer = fault(request, self._pass_on)
            if answer is not None:
                self.faults.remove(fault)
                return await answer
        return await self._pass_on(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body, headers = (
            await request.read(),
            {"Content-Type": request.content_type, "Accept": request.headers["Accept"]},
        )
        try:
            async with self._session.request(request.method, request.path_qs, data=body, headers=headers) as answer:
                if "watch" in request.query:
                    return await self._stream(request, answer)
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except aiohttp.ClientError:
            hang_up(request)
            return web.Response()

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status)
        await response.prepare(request)
        self._watches.append(request)
        try:
            async for chunk in answer.content.iter_any():
                await self.reporting.wait()
                await response.write(chunk)
        except ConnectionError:
            return response
        finally:
            self._watches.remove(request)
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()  # an orderly end of TLS would outlive the test
        return response


@dataclass
class HeldBinding:
    """A Binding under way: `reached` when the extender has sent it, passed on at `go`, written at `done`."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse] | None:
        return self._hold(request, handler) if request.path.endswith("/binding") else None

    async def _hold(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        await request.read()
        self.reached.set()
        await self.go.wait()
        answer = await handler(request)
        self.done.set()
        return answer


class Extender:
    """A process, and kube-scheduler's side of the protocol."""

    def __init__(self, process: Process, port: int, metrics_port: int, http: httpx.AsyncClient) -> None:
        self._process, self._port, self._metrics_port, self._http = process, port, metrics_port, http
        self._log: list[bytes] = []
        self._synced = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stderr
        async for line in self._process.stderr:
            self._log.append(line)
            if b'"synced"' in line:
                self._synced.set()

    async def synced(self) -> None:
        """Return when it is synced."""
        waiting = asyncio.create_task(self._synced.wait())
        await asyncio.wait({waiting, self._reading}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert self._synced.is_set(), b"".join(self._log).decode()

    async def ended(self) -> None:
        """Return when its process has ended."""
        await self._process.wait()

    async def kill(self) -> None:
        """SIGKILL."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _call(self, verb: str, body: object) -> dict[str, Any]:
        answer = await self._http.post(f"http://127.0.0.1:{self._port}/{verb}", content=json.dumps(body))
        assert answer.status_code == 200, "anything else hides the reason from the user"
        decoded: dict[str, Any] = answer.json()
        return decoded

    async def filter(self, pod: dict[str, Any], *names: str) -> dict[str, Any]:
        return await self._call("filter", {"Pod": pod, "Nodes": None, "NodeNames": list(names)})

    async def bind(self, pod: dict[str, Any], name: str) -> str:
        """The error, empty on success."""
        meta = pod["metadata"]
        body = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": name}
        error: str = (await self._call("bind", body))["Error"]
        return error

    async def snapshot(self) -> Snapshot:
        """What it decides by. Its records are compared with a count from scratch each time."""
        answer = await self._http.get(f"http://127.0.0.1:{self._port}/snapshot")
        snapshot = snapshot_from_json(answer.content)
        assert list(drift(snapshot)) == []
        return snapshot

    async def relists(self) -> set[str]:
        """Why its caches have listed everything again."""
        pattern = r'tangram_extender_cache_relists_total{cache="\w+",reason="(\w+)"} [1-9]'
        return set(re.findall(pattern, await self.metrics()))

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    async def metrics(self) -> str:
        """What it reports of itself."""
        return (await self._http.get(f"http://127.0.0.1:{self._metrics_port}/metrics")).text

    async def comes_to(self, true: Callable[[Snapshot], bool]) -> Snapshot:
        """Return when its state is so. It is another process, so this polls."""
        async with asyncio.timeout(PATIENCE_S):
            while not true(snapshot := await self.snapshot()):  # noqa: ASYNC110 - no event comes from another process
                await asyncio.sleep(0.02)
        return snapshot


class ExtenderOnApiServer:
    """What a test needs, in one object."""

    def __init__(self, api: ApiServer, proxy: Proxy, http: httpx.AsyncClient) -> None:
        self.api, self.proxy, self._http = api, proxy, http
        self._extenders: list[Extender] = []

    async def extender(self, *more: str) -> Extender:
        """One more, which is synced. `more`: further flags."""
        port, metrics_port = free_port(), free_port()
        flags = ["--kubeconfig", str(self.proxy.kubeconfig), "--port", str(port), "--metrics-port", str(metrics_port)]
        command = [
            sys.executable,
            "-m",
            "extender",
            *flags,
            "--metrics-host",
            "127.0.0.1",
            "--bind-timeout-s",
            "2",
            *more,
        ]
        started = Extender(await asyncio.create_subprocess_exec(*command, stderr=PIPE), port, metrics_port, self._http)
        self._extenders.append(started)
        await started.synced()
        return started

    def add(self, *nodes: NodeBuilder) -> None:
        for built in nodes:
            self.api("POST", "/api/v1/nodes", _new(built.plain()))

    def create(self, built: PodBuilder) -> dict[str, Any]:
        """The pod as the API server made it, which is what the scheduler sends."""
        made: dict[str, Any] = self.api("POST", "/api/v1/namespaces/default/pods", _new(built.plain()))
        return made

    def get(self, pod: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.api("GET", _path(pod))
        return found

    def delete(self, pod: dict[str, Any]) -> None:
        self.api("DELETE", _path(pod), {"gracePeriodSeconds": 0})

    def bind_past_us(self, pod: dict[str, Any], name: str) -> None:
        """As another scheduler would."""
        target = {"apiVersion": "v1", "kind": "Node", "name": name}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}, "target": target}
        self.api("POST", f"{_path(pod)}/binding", body)

    def versions(self, pod: dict[str, Any]) -> list[dict[str, Any]]:
        """Every version of a pod since it was made, as a watch reports them."""
        meta = pod["metadata"]
        query = f"watch=1&timeoutSeconds=1&resourceVersion={meta['resourceVersion']}&fieldSelector=metadata.name={meta['name']}"
        lines = self.api.http.get(f"/api/v1/namespaces/default/pods?{query}").text.splitlines()
        return [json.loads(line)["object"] for line in lines]

    def bound(self) -> list[dict[str, Any]]:
        pods = self.api("GET", "/api/v1/namespaces/default/pods")["items"]
        return [pod for pod in pods if pod["spec"].get("nodeName")]

    def assigned_mib(self) -> dict[str, int]:
        """UUID -> MiB over all bound pods, as the API server reports them."""
        mib: dict[str, int] = {}
        for pod in self.bound():
            for assigned in assignment_from_json(pod["metadata"]["annotations"][DEFAULT.assignment]).held():
                mib[assigned.uuid] = mib.get(assigned.uuid, 0) + assigned.mib
        return mib

    async def leave(self) -> None:
        """Nothing of this test is there for the next."""
        for extender in self._extenders:
            await extender.kill()
        for pod in self.api("GET", "/api/v1/namespaces/default/pods")["items"]:
            self.delete(pod)
        self.api("DELETE", "/api/v1/nodes")


def free_mib(snapshot: Snapshot, name: str) -> list[int]:
    """Per GPU of a node."""
    return [gpu.mib for node in snapshot.nodes if node.name == name for gpu in node.free]


def allocated_pods(snapshot: Snapshot) -> dict[str, str]:
    """Pod -> stage."""
    return {pod.key.partition("/")[2]: pod.stage for pod in snapshot.pods}


def names_of(pods: Iterable[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def _new(thing: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in thing["metadata"].items() if key not in ("uid", "resourceVersion")}
    return {key: value for key, value in thing.items() if key != "status"} | {"metadata": metadata}


def _path(pod: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
