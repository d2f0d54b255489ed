"""Be known to the kubelet: serve every resource that the node offers, register each, and do so again whenever it forgets.

A kubelet that starts removes all plugins' sockets and makes kubelet.sock anew; that is how its restart is seen. A kubelet that dropped
us without a restart is seen by its ListAndWatch call being gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import structlog

from deviceplugin.gpus.offer import Offer
from deviceplugin.service import DevicePluginService, ResourceServer
from vgpu.api.back_off import BackOff
from vgpu_pb import deviceplugin_pb2 as pb
from vgpu_pb import deviceplugin_pb2_grpc

API_VERSION: Final = "v1beta1"
CHECK_S: Final = 0.5
"""How often kubelet.sock is checked: a kubelet is known again within this after its start. A check costs some 10 us."""
REGISTER_DEADLINE_S: Final = 5.0
BACKOFF_S: Final = (0.2, 5.0)
"""First and longest wait after a registration that failed, doubled each time."""
STREAM_WAIT_S: Final = 5.0
"""How long after a registration the kubelet has to call ListAndWatch. It does so at once."""

log = structlog.get_logger("deviceplugin.registration")


class KubeletRegistration:
    """Serves and registers resources as the offer has them."""

    def __init__(self, folder: Path, offer: Offer, service: Callable[[str], DevicePluginService]) -> None:
        self.servers: dict[str, ResourceServer] = {}
        self.registrations = 0
        self._folder, self._offer, self._service = folder, offer, service
        self._registered_at: dict[str, float] = {}

    @property
    def known(self) -> bool:
        """Does the kubelet watch every resource that we offer?"""
        return all(r in self.servers and self.servers[r].service.streams > 0 for r in self._offer.resources())

    async def run(self) -> None:
        """Until cancelled."""
        seen: tuple[int, int] | None = None
        back_off = BackOff(*BACKOFF_S)
        try:
            while True:
                now = self._socket_identity()
                if now != seen:
                    seen = now
                    self._registered_at.clear()
                if now is not None:
                    try:
                        await self._serve_and_register()
                        back_off.succeeded()
                    except (grpc.aio.AioRpcError, OSError, RuntimeError) as error:
                        wait_s = back_off.failed()
                        log.warning("not registered with the kubelet", error=_text(error), retry_s=wait_s)
                        await asyncio.sleep(wait_s)
                        continue
                await self._wait_for_change()
        finally:
            for server in self.servers.values():
                await server.stop()

    async def _serve_and_register(self) -> None:
        loop = asyncio.get_running_loop()
        for resource in self._offer.resources():
            if resource not in self.servers:
                path = self._folder / _socket_name(resource)
                self.servers[resource] = ResourceServer(self._service(resource), path)
        lost = [server for server in self.servers.values() if server.lost]
        await asyncio.gather(
            *(server.start() for server in lost)
        )  # at once: a kubelet that finds no socket refuses pods
        for server in lost:
            self._registered_at.pop(server.service.resource, None)
        for resource in self._offer.resources():
            server = self.servers[resource]
            at = self._registered_at.get(resource)
            forgotten = at is not None and server.service.streams == 0 and loop.time() - at > STREAM_WAIT_S
            if at is None or forgotten:
                await self._register(server)
                self._registered_at[resource] = loop.time()

    async def _register(self, server: ResourceServer) -> None:
        resource = server.service.resource
        async with grpc.aio.insecure_channel(f"unix://{self._folder / 'kubelet.sock'}") as channel:
            stub = deviceplugin_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            request = pb.RegisterRequest(
                version=API_VERSION, endpoint=server.socket.name, resource_name=resource, options=server.service.options
            )
            await stub.Register(request, timeout=REGISTER_DEADLINE_S)
        self.registrations += 1
        log.info("registered", resource=resource, devices=len(self._offer.devices(resource)))

    async def _wait_for_change(self) -> None:
        version = self._offer.version
        try:
            async with asyncio.timeout(CHECK_S):
                await self._offer.changed_since(version)
        except TimeoutError:
            return

    def _socket_identity(self) -> tuple[int, int] | None:
        try:
            found = (self._folder / "kubelet.sock").stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns


def _socket_name(resource: str) -> str:
    return f"tangram-{resource.rpartition('/')[2]}.sock"


def _text(error: Exception) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
