"""Another device plugin on a node, as NVIDIA's is one: `python -m tests.other_device_plugin FOLDER RESOURCE`.

FOLDER is the kubelet's for device plugins. Each line of standard input is a JSON list of device IDs. The plugin offers these from then on; with the first
list it registers with the kubelet. It answers each with a line of JSON: how many lists it has offered. It ends with its standard input, and its resource then
has no healthy device.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio

from tests.built import REPOSITORY
from tests.line_process import LineProcess
from vgpu_pb import deviceplugin_pb2 as pb
from vgpu_pb import deviceplugin_pb2_grpc as rpc

VERSION: Final = "v1beta1"
REGISTER_S: Final = 10.0


class OtherPlugin(rpc.DevicePluginServicer):
    """Its side of the kubelet's API. It gives away what it offers, and nothing with it."""

    def __init__(self) -> None:
        self.ids: tuple[str, ...] = ()
        self.lists = 0
        self.changed = asyncio.Event()

    def offer(self, ids: Sequence[str]) -> None:
        """From now on."""
        self.ids, self.lists = tuple(ids), self.lists + 1
        self.changed.set()
        self.changed = asyncio.Event()

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> pb.DevicePluginOptions:  # noqa: N802, ARG002
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[pb.ListAndWatchResponse]:  # noqa: N802, ARG002
        while True:
            changed = self.changed
            yield pb.ListAndWatchResponse(devices=[pb.Device(ID=one, health="Healthy") for one in self.ids])
            await changed.wait()

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: N802, ARG002
        return pb.AllocateResponse(
            container_responses=[pb.ContainerAllocateResponse()] * len(request.container_requests)
        )


def socket_of(folder: Path, resource: str) -> Path:
    """Where it serves a resource."""
    return folder / f"other-{resource.rpartition('/')[2]}.sock"


async def serve(folder: Path, resource: str) -> None:
    """Until the end of standard input."""
    plugin, server = OtherPlugin(), grpc.aio.server()
    rpc.add_DevicePluginServicer_to_server(plugin, server)  # type: ignore[no-untyped-call]
    socket = socket_of(folder, resource)
    socket.unlink(missing_ok=True)
    server.add_insecure_port(f"unix://{socket}")
    await server.start()
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            plugin.offer(json.loads(line))
            if plugin.lists == 1:
                await _register(folder, socket.name, resource)
            print(plugin.lists, flush=True)
    finally:
        await server.stop(None)
        socket.unlink(missing_ok=True)


async def _register(folder: Path, endpoint: str, resource: str) -> None:
    async with grpc.aio.insecure_channel(f"unix://{folder / 'kubelet.sock'}") as channel:
        stub = rpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
        request = pb.RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=resource)
        await stub.Register(request, timeout=REGISTER_S)


class OtherPluginProcess:
    """The program, as a test starts it. Nothing is offered before the first call."""

    def __init__(self, folder: Path, resource: str) -> None:
        self._socket = socket_of(folder, resource)
        self._process = LineProcess(
            ["-m", __name__, str(folder), resource], {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
        self._lists = 0

    def offer(self, *ids: str) -> None:
        """From now on. Returns when the kubelet knows the plugin."""
        self._process.send(json.dumps(ids))
        self._lists += 1
        assert self._process.answer() == self._lists

    def end(self) -> None:
        """Kill it, if it runs."""
        if self._process.process.returncode is None:
            self._process.end()
            self._socket.unlink(missing_ok=True)


@contextlib.contextmanager
def other_plugin(folder: Path, resource: str = "nvidia.com/gpu") -> Iterator[OtherPluginProcess]:
    """Killed at the end, if the test has not done so before."""
    process = OtherPluginProcess(folder, resource)
    try:
        yield process
    finally:
        process.end()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
