"""A kubelet and an API server around a real device plugin process, on the fake driver."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from tests.built import REPOSITORY
from tests.fake import FakeDriver
from tests.fake_api import FakeApi
from tests.integration.deviceplugin.kubelet import TIMEOUT_S, Kubelet
from tests.ports import free_port
from vgpu.api.contract import CONTAINER_DIR, SOCKET
from vgpu.api.names import DEFAULT

NODE = "n1"


class PodApi(FakeApi):
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
                node.setdefault("spec", {}).update(change.get("spec", {}))
                change["metadata"].pop("resourceVersion", None)
                for kind, these in change["metadata"].items():
                    known = node["metadata"].setdefault(kind, {}) | these
                    node["metadata"][kind] = {key: text for key, text in known.items() if text is not None}
                self.put(node)
            return web.json_response(node)
        if request.method == "POST" and request.path.endswith("/events"):
            self.events.append(await request.json())
            return web.json_response({}, status=201)
        if request.method == "DELETE" and "/pods/" in request.path:
            self.deleted.append((request.path.split("/")[-1], await request.json()))
            return web.json_response({})
        return await super()._answer(request)


@dataclass(kw_only=True)
class PluginNode:
    """A node with a device plugin, and a kubelet that is not the harness's own."""

    folder: Path
    driver: FakeDriver
    api: PodApi
    kubelet_folder: Path
    access: str = "cdi"
    port: int = 0
    process: asyncio.subprocess.Process | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    arbiters: list[socket.socket] = field(default_factory=list)
    _reader: asyncio.Task[None] | None = None
    _client: ClientSession | None = None
    """With one connection: an address that opens many is refused (docs/operations/server-limits.md)."""
    _logged: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> Path:
        return self.folder / "state"

    async def start_plugin(self, *options: str) -> None:
        kubeconfig = self.folder / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(self.api.port)))
        self.port = free_port()
        command = [
            sys.executable, "-m", "deviceplugin", "--node-name", NODE, "--state-root", str(self.state),
            "--driver-root", str(self.folder / "driver"), "--host-driver-root", "/host/driver",
            "--kubelet-dir", str(self.kubelet_folder), "--access", self.access, "--cdi-dir", str(self.folder / "cdi"),
            "--library", str(self.folder / "libtangram.so"), "--kubeconfig", str(kubeconfig),
            "--metrics-host", "127.0.0.1", "--metrics-port", str(self.port), "--health-s", "0.1", *options,
        ]  # fmt: skip
        self.process = await asyncio.create_subprocess_exec(
            *command, cwd=REPOSITORY, env={**os.environ, "TANGRAM_FAKE_DRIVER": str(self.driver.socket)},
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read_log(self.process))
        self._client = ClientSession(f"http://127.0.0.1:{self.port}")

    async def stop_plugin(self, *, kill: bool = False) -> None:
        assert self.process
        assert self._reader
        assert self._client
        await self._client.close()
        if self.process.returncode is None:
            self.process.kill() if kill else self.process.terminate()
        await self.process.wait()
        await self._reader
        self.process = None

    async def logged(self, event: str, *, error_has: str = "", **fields: Any) -> dict[str, Any]:
        """The first line with this event and these fields, and with this in its error, now or later."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for line in self.log:
                    said = error_has in str(line.get("error", ""))
                    if said and line["event"] == event and fields.items() <= line.items():
                        return line
                self._logged.clear()
                await self._logged.wait()

    async def published(self) -> None:
        """Return when the node has its annotation."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.api.inventory:
                await self.api.news.wait()

    async def get(self, path: str) -> tuple[int, str]:
        assert self._client
        async with self._client.get(path) as answer:
            return answer.status, await answer.text()

    def arbiter_listens_in(self, folder: Path) -> Path:
        """Do as the arbiter does: a socket for a grant folder, in the folder of sockets. Returns the grant folder."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = self.state / "sockets" / folder.name / SOCKET
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen(16)
        self.arbiters.append(listening)
        return folder

    async def arbiter_says(self, document: bytes) -> asyncio.Server:
        """Answer with this on the status socket, as the arbiter does: to each client that connects, then close."""

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(document)
            writer.close()
            await writer.wait_closed()

        path = self.state / "arbiter/status.sock"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return await asyncio.start_unix_server(answer, path)

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr
        async for line in process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.log.append({"event": line.decode().strip(), "level": "raw"})
            self._logged.set()


@dataclass(kw_only=True)
class Node(PluginNode):
    """A node with a device plugin and our kubelet."""

    kubelet: Kubelet

    async def ready(self) -> None:
        """Return when the kubelet has devices of the three shared resources, and the node its annotation."""
        names = (DEFAULT.gpu_mem, DEFAULT.gpu_core, DEFAULT.gpu)
        await self.kubelet.until(lambda: all(self.kubelet.healthy(name) for name in names))
        await self.published()

    def arbiter_listens(self, pod: str, container: str = "main") -> Path:
        """As `arbiter_listens_in`."""
        return self.arbiter_listens_in(self.grant_folder(pod, container))

    def grant_folder(self, pod: str, container: str = "main") -> Path:
        answer = self.kubelet.answers[pod, container, DEFAULT.gpu_mem]
        (mount,) = [m for m in answer.mounts if m.container_path == CONTAINER_DIR]
        assert mount.read_only
        return Path(mount.host_path)


@asynccontextmanager
async def plugin_node(
    driver: FakeDriver, folder: Path, kubelet_folder: Path, *, access: str
) -> AsyncIterator[PluginNode]:
    """A node whose API server runs; the plugin is the caller's to start."""
    _install(driver, folder)
    async with PodApi() as api:
        made = PluginNode(folder=folder, driver=driver, api=api, kubelet_folder=kubelet_folder, access=access)
        try:
            yield made
        finally:
            await _end(made)


@asynccontextmanager
async def node(driver: FakeDriver, folder: Path, *, access: str = "cdi", seed: int = 0) -> AsyncIterator[Node]:
    """A node whose kubelet and API server run; the plugin is the test's to start."""
    _install(driver, folder)
    async with PodApi() as api:
        kubelet = Kubelet(folder / "kubelet", random.Random(seed))
        await kubelet.start()
        made = Node(
            folder=folder, driver=driver, api=api, kubelet_folder=kubelet.folder, access=access, kubelet=kubelet
        )
        try:
            yield made
        finally:
            await _end(made)
            await kubelet.stop()


def _install(driver: FakeDriver, folder: Path) -> None:
    """The driver's libraries under the root that the plugin looks in, and a library of ours."""
    root = folder / "driver"
    (root / "lib").mkdir(parents=True, exist_ok=True)
    for path in sorted(driver.libraries.glob("lib*.so*")):
        (root / "lib" / path.name).symlink_to(path.resolve() if not path.is_symlink() else path.readlink())
    if not (root / "sys").is_symlink():
        (root / "sys").symlink_to(driver.folder / "sys")
    (folder / "libtangram.so").write_bytes(b"a library\n")


async def _end(made: PluginNode) -> None:
    if made.process is not None:
        await made.stop_plugin()
    for listening in made.arbiters:
        listening.close()


def _kubeconfig(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
