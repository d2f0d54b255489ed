"""A kubelet and an API server around a real device plugin process, on the fake driver.

The kubelet is made of real gRPC servers and clients on real sockets and does what the device manager of Kubernetes 1.36 does; what it
cannot show (containers) is tested on a real one (tests/e2e).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from aiohttp import ClientSession, web

from tests.fake import REPOSITORY, FakeDriver
from tests.fake_api import FakeApi
from vgpu.contract import SOCKET
from vgpu.names import DEFAULT
from vgpu_pb import deviceplugin_pb2 as dp
from vgpu_pb import deviceplugin_pb2_grpc as dp_grpc
from vgpu_pb import podresources_pb2 as pr
from vgpu_pb import podresources_pb2_grpc as pr_grpc

NODE = "n1"
PATIENCE_S = 20.0


class Api(FakeApi):
    """The fake API server, with what a device plugin writes: a node's annotations, Events, deletions."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.deleted: list[tuple[str, dict[str, Any]]] = []
        """Pod, options."""
        self.news = asyncio.Event()
        self.put({"kind": "Node", "metadata": {"name": NODE, "uid": "node"}})

    @property
    def inventory(self) -> str | None:
        return self.objects["/api/v1/nodes"][NODE]["metadata"].get("annotations", {}).get(DEFAULT.inventory)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        answer = await self._written(request)
        self.news.set()
        self.news = asyncio.Event()
        return answer

    async def _written(self, request: web.Request) -> web.StreamResponse:
        if request.path == f"/api/v1/nodes/{NODE}":
            node = self.objects["/api/v1/nodes"][NODE]
            if request.method == "PATCH":
                change = await request.json()
                node["metadata"].setdefault("annotations", {}).update(change["metadata"]["annotations"])
                self.put(node)
            return web.json_response(node)
        if request.method == "POST" and request.path.endswith("/events"):
            self.events.append(await request.json())
            return web.json_response({}, status=201)
        if request.method == "DELETE" and "/pods/" in request.path:
            self.deleted.append((request.path.split("/")[-1], await request.json()))
            return web.json_response({})
        return await super()._answer(request)


class Kubelet(dp_grpc.RegistrationServicer, pr_grpc.PodResourcesListerServicer):
    """The device manager, and the pod resources service that tells of it."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.plugins = folder / "device-plugins"
        self.registered: list[str] = []
        self.devices: dict[str, dict[str, str]] = {}
        self.used: dict[str, set[str]] = {}
        self.books: dict[tuple[str, str], dict[tuple[str, str], tuple[str, ...]]] = {}
        """(namespace, pod) -> (container, resource) -> device IDs."""
        self.answers: dict[tuple[str, str, str], dp.ContainerAllocateResponse] = {}
        self.waited_s = 0.0
        """Time spent waiting for the plugin's answers."""
        self.hidden: set[tuple[str, str]] = set()
        """(pod, container) of init containers, which the kubelet does not list."""
        self.starts_with: dict[str, bool] = {}
        """Resource -> does its plugin want to be called before a container starts?"""
        self.changed = asyncio.Condition()
        self._listed: dict[tuple[str, str], tuple[object, bytes]] = {}
        self._servers: list[grpc.aio.Server] = []
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        for name in ("device-plugins", "pod-resources"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for path in self.plugins.iterdir():
            path.unlink()
        own, books = grpc.aio.server(), grpc.aio.server()
        dp_grpc.add_RegistrationServicer_to_server(self, own)
        pr_grpc.add_PodResourcesListerServicer_to_server(self, books)
        own.add_insecure_port(f"unix://{self.plugins / 'kubelet.sock'}")
        (self.folder / "pod-resources/kubelet.sock").unlink(missing_ok=True)
        books.add_insecure_port(f"unix://{self.folder / 'pod-resources/kubelet.sock'}")
        self._servers = [own, books]
        for server in self._servers:
            await server.start()

    async def stop(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        self._watches.clear()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        self.devices.clear()
        for server in self._servers:
            await server.stop(None)

    async def Register(self, request: dp.RegisterRequest, context: Any) -> dp.Empty:  # noqa: N802, ARG002
        assert request.version == "v1beta1"
        name = request.resource_name
        assert request.options.get_preferred_allocation_available
        self.starts_with[name] = request.options.pre_start_required
        if old := self._watches.pop(name, None):
            old.cancel()
        if channel := self._channels.pop(name, None):
            await channel.close()
        self._channels[name] = grpc.aio.insecure_channel(f"unix://{self.plugins / request.endpoint}")
        self._watches[name] = asyncio.create_task(self._watch(name))
        self.registered.append(name)
        return dp.Empty()

    async def List(self, request: Any, context: Any) -> pr.ListPodResourcesResponse:  # noqa: N802, ARG002
        listed = [self._listed_pod(key, held) for key, held in self.books.items()]
        return pr.ListPodResourcesResponse.FromString(b"".join(listed))

    def _listed_pod(self, key: tuple[str, str], held: dict[tuple[str, str], tuple[str, ...]]) -> bytes:
        """Encoded once for what it holds: the real kubelet is written in Go."""
        now = (dict(held), frozenset(self.hidden))
        was, encoded = self._listed.get(key, (None, b""))
        if was != now:
            encoded = self._encoded(key, held)
            self._listed[key] = (now, encoded)
        return encoded

    def _encoded(self, key: tuple[str, str], held: dict[tuple[str, str], tuple[str, ...]]) -> bytes:
        answer = pr.ListPodResourcesResponse()
        pod = answer.pod_resources.add(name=key[1], namespace=key[0])
        by_container: dict[str, pr.ContainerResources] = {}
        for (container, resource), ids in held.items():
            if (key[1], container) in self.hidden:
                continue
            if container not in by_container:
                by_container[container] = pod.containers.add(name=container)
            # As the real one does: IDs of one resource may come in several parts, one for each NUMA node.
            for part in (ids[::2], ids[1::2]):
                if part:
                    by_container[container].devices.add(resource_name=resource, device_ids=part)
        return answer.SerializeToString()

    async def until(self, what: Any) -> None:
        """Return when `what()` is true; asked again after each device list."""
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(what)

    def healthy(self, resource: str) -> set[str]:
        return {i for i, health in self.devices.get(resource, {}).items() if health == "Healthy"}

    async def admit(self, pod: dict[str, Any]) -> None:
        """Raises AioRpcError when the plugin refuses; what the pod had until then is free again."""
        meta, spec = pod["metadata"], pod["spec"]
        key = (meta["namespace"], meta["name"])
        books = self.books.setdefault(key, {})
        reusable: dict[str, list[str]] = {}
        try:
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                init = container in spec.get("initContainers", [])
                if init:
                    self.hidden.add((meta["name"], container["name"]))
                wanted = [(r, int(n)) for r, n in container["resources"]["limits"].items()]
                self.rng.shuffle(wanted)
                for resource, quantity in wanted:
                    ids = await self._choose(resource, quantity, reusable.get(resource, []))
                    request = dp.AllocateRequest(container_requests=[dp.ContainerAllocateRequest(devices_ids=ids)])
                    answer = await self._timed(self._plugin(resource).Allocate(request))
                    self.used.setdefault(resource, set()).update(ids)
                    books[container["name"], resource] = tuple(ids)
                    self.answers[meta["name"], container["name"], resource] = answer.container_responses[0]
                    had = reusable.setdefault(resource, [])
                    reusable[resource] = [*had, *ids] if init else [i for i in had if i not in ids]
        except grpc.aio.AioRpcError:
            self.remove(*key)
            raise

    async def start_container(self, pod: str, container: str, namespace: str = "default") -> None:
        """PreStartContainer for each of its resources that want it, all at once as the kubelet may."""
        held = self.books[namespace, pod]
        calls = [
            self._plugin(resource).PreStartContainer(dp.PreStartContainerRequest(devices_ids=ids))
            for (of, resource), ids in held.items()
            if of == container and self.starts_with[resource]
        ]
        await self._timed(asyncio.gather(*calls))

    async def ask_options(self, resource: str) -> dp.DevicePluginOptions:
        return await self._timed(self._plugin(resource).GetDevicePluginOptions(dp.Empty()))

    def remove(self, namespace: str, name: str) -> None:
        for (_, resource), ids in self.books.pop((namespace, name), {}).items():
            self.used[resource] -= set(ids)

    def swap(self, one: str, other: str) -> None:
        """Two pods of the same size get each other's devices."""
        a, b = ("default", one), ("default", other)
        self.books[a], self.books[b] = self.books[b], self.books[a]

    async def _choose(self, resource: str, quantity: int, reusable: list[str]) -> list[str]:
        taken = reusable[:quantity]
        available = self.healthy(resource) - self.used.get(resource, set())
        if len(taken) == quantity:
            return taken
        assert len(available) >= quantity - len(taken), f"no {quantity} {resource} left"
        offered = [*available, *taken]
        self.rng.shuffle(offered)
        request = dp.PreferredAllocationRequest(
            container_requests=[
                dp.ContainerPreferredAllocationRequest(
                    available_deviceIDs=offered, must_include_deviceIDs=taken, allocation_size=quantity
                )
            ]
        )
        answer = await self._timed(self._plugin(resource).GetPreferredAllocation(request))
        preferred = [i for i in answer.container_responses[0].deviceIDs if i in available and i not in taken]
        rest = preferred + [i for i in offered if i in available and i not in preferred]
        return taken + rest[: quantity - len(taken)]

    async def _timed(self, call: Any) -> Any:
        began = time.perf_counter()
        try:
            return await call
        finally:
            self.waited_s += time.perf_counter() - began

    def _plugin(self, resource: str) -> dp_grpc.DevicePluginStub:
        return dp_grpc.DevicePluginStub(self._channels[resource])

    async def _watch(self, resource: str) -> None:
        try:
            async for listed in self._plugin(resource).ListAndWatch(dp.Empty()):
                self.devices[resource] = {device.ID: device.health for device in listed.devices}
                async with self.changed:
                    self.changed.notify_all()
        except grpc.aio.AioRpcError:
            self.devices[resource] = dict.fromkeys(self.devices.get(resource, {}), "Unhealthy")
        async with self.changed:
            self.changed.notify_all()


@dataclass
class Node:
    """A node with a device plugin."""

    folder: Path
    driver: FakeDriver
    api: Api
    kubelet: Kubelet
    access: str = "cdi"
    port: int = 0
    process: asyncio.subprocess.Process | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    arbiters: list[socket.socket] = field(default_factory=list)
    _reader: asyncio.Task[None] | None = None
    _logged: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> Path:
        return self.folder / "state"

    async def start_plugin(self, *options: str) -> None:
        kubeconfig = self.folder / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(self.api.port)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable, "-m", "deviceplugin", "--node-name", NODE, "--state-root", str(self.state),
            "--driver-root", str(self.folder / "driver"), "--host-driver-root", "/host/driver",
            "--kubelet-dir", str(self.kubelet.folder), "--access", self.access, "--cdi-dir", str(self.folder / "cdi"),
            "--library", str(self.folder / "libtangram.so"), "--kubeconfig", str(kubeconfig),
            "--metrics-host", "127.0.0.1", "--metrics-port", str(self.port), "--health-s", "0.1", *options,
        ]  # fmt: skip
        self.process = await asyncio.create_subprocess_exec(
            *command, cwd=REPOSITORY, env={**os.environ, "TANGRAM_FAKE_DRIVER": str(self.driver.socket)},
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read_log(self.process))

    async def stop_plugin(self, *, kill: bool = False) -> None:
        assert self.process
        assert self._reader
        if self.process.returncode is None:
            self.process.kill() if kill else self.process.terminate()
        await self.process.wait()
        await self._reader
        self.process = None

    async def logged(self, event: str, **fields: Any) -> dict[str, Any]:
        """The first line with this event and these fields, now or later."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for line in self.log:
                    if line["event"] == event and fields.items() <= line.items():
                        return line
                self._logged.clear()
                await self._logged.wait()

    async def ready(self) -> None:
        """Return when the kubelet has devices of the three shared resources, and the node its annotation."""
        names = (DEFAULT.gpu_mem, DEFAULT.gpu_core, DEFAULT.gpu)
        await self.kubelet.until(lambda: all(self.kubelet.healthy(name) for name in names))
        async with asyncio.timeout(PATIENCE_S):
            while not self.api.inventory:
                await self.api.news.wait()

    async def get(self, path: str) -> tuple[int, str]:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}{path}") as answer:
            return answer.status, await answer.text()

    def arbiter_listens(self, pod: str, container: str = "main") -> Path:
        """Do as the arbiter does: a socket in the grant folder. Answers the folder."""
        folder = self.grant_folder(pod, container)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (folder / SOCKET).unlink(missing_ok=True)
        listening.bind(str(folder / SOCKET))
        listening.listen(16)
        self.arbiters.append(listening)
        return folder

    async def arbiter_says(self, document: bytes) -> asyncio.Server:
        """Answer with this on the status socket, as the arbiter does: to whoever connects, then hang up."""

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(document)
            writer.close()
            await writer.wait_closed()

        (self.state / "status.sock").unlink(missing_ok=True)
        return await asyncio.start_unix_server(answer, self.state / "status.sock")

    def grant_folder(self, pod: str, container: str = "main") -> Path:
        answer = self.kubelet.answers[pod, container, DEFAULT.gpu_mem]
        (mount,) = [m for m in answer.mounts if m.container_path == "/run/tangram"]
        assert mount.read_only
        return Path(mount.host_path)

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr
        async for line in process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.log.append({"event": line.decode().strip(), "level": "raw"})
            self._logged.set()


@asynccontextmanager
async def node(driver: FakeDriver, folder: Path, *, access: str = "cdi", seed: int = 0) -> AsyncIterator[Node]:
    """A node whose kubelet and API server run; the plugin is the test's to start."""
    root = folder / "driver"
    (root / "lib").mkdir(parents=True, exist_ok=True)
    for path in sorted(driver.libraries.glob("lib*.so*")):
        (root / "lib" / path.name).symlink_to(path.resolve() if not path.is_symlink() else path.readlink())
    (folder / "libtangram.so").write_bytes(b"a library\n")
    async with Api() as api:
        kubelet = Kubelet(folder / "kubelet", random.Random(seed))
        await kubelet.start()
        made = Node(folder, driver, api, kubelet, access)
        try:
            yield made
        finally:
            if made.process is not None:
                await made.stop_plugin()
            for listening in made.arbiters:
                listening.close()
            await kubelet.stop()


def _kubeconfig(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
