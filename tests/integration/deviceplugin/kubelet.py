"""A kubelet's side of device plugins, as gRPC servers and clients on real sockets. It does what the device manager of Kubernetes 1.36 does;
what it cannot show (containers) is tested on a real one (tests/e2e).
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import grpc.aio

from vgpu.api.names import DEFAULT
from vgpu_pb import deviceplugin_pb2 as dp
from vgpu_pb import deviceplugin_pb2_grpc as dp_grpc
from vgpu_pb import podresources_pb2 as pr
from vgpu_pb import podresources_pb2_grpc as pr_grpc

TIMEOUT_S = 20.0


class Kubelet(dp_grpc.RegistrationServicer, pr_grpc.PodResourcesListerServicer):
    """The device manager, and the pod resources service that reports it."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.plugins = folder / "device-plugins"
        self.registered: list[str] = []
        self.devices: dict[str, dict[str, str]] = {}
        self.used: dict[str, set[str]] = {}
        self.records: dict[tuple[str, str], dict[tuple[str, str], tuple[str, ...]]] = {}
        """(namespace, pod) -> (container, resource) -> device IDs."""
        self.answers: dict[tuple[str, str, str], dp.ContainerAllocateResponse] = {}
        self.waited_s = 0.0
        """Time spent waiting for the plugin's answers."""
        self.hidden: set[tuple[str, str]] = set()
        """(pod, container) of init containers, which the kubelet does not list."""
        self.starts_with: dict[str, bool] = {}
        """Resource -> does its plugin want to be called before a container starts?"""
        self.foreign: dict[str, list[str]] = {}
        """Resource of another device plugin -> its healthy devices."""
        self.silent = False
        """Does the pod resources service hang?"""
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
        own, records = grpc.aio.server(), grpc.aio.server()
        dp_grpc.add_RegistrationServicer_to_server(self, own)
        pr_grpc.add_PodResourcesListerServicer_to_server(self, records)
        own.add_insecure_port(f"unix://{self.plugins / 'kubelet.sock'}")
        (self.folder / "pod-resources/kubelet.sock").unlink(missing_ok=True)
        records.add_insecure_port(f"unix://{self.folder / 'pod-resources/kubelet.sock'}")
        self._servers = [own, records]
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
        assert request.options.get_preferred_allocation_available or not DEFAULT.ours(name)
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
        listed = [self._listed_pod(key, held) for key, held in self.records.items()]
        return pr.ListPodResourcesResponse.FromString(b"".join(listed))

    async def GetAllocatableResources(self, request: Any, context: Any) -> pr.AllocatableResourcesResponse:  # noqa: N802, ARG002
        if self.silent:
            await asyncio.Event().wait()
        answer = pr.AllocatableResourcesResponse()
        own = {resource: self.healthy(resource) for resource in self.devices}
        for resource, ids in (own | self.foreign).items():
            for one in ids:  # one entry for each device, as the real one has them
                answer.devices.add(resource_name=resource, device_ids=[one])
        return answer

    def _listed_pod(self, key: tuple[str, str], held: dict[tuple[str, str], tuple[str, ...]]) -> bytes:
        """Encoded once for its content: the real kubelet is written in Go."""
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
        async with asyncio.timeout(TIMEOUT_S), self.changed:
            await self.changed.wait_for(what)

    def healthy(self, resource: str) -> set[str]:
        return {i for i, health in self.devices.get(resource, {}).items() if health == "Healthy"}

    async def admit(self, pod: dict[str, Any]) -> None:
        """Raises AioRpcError when the plugin refuses; what the pod had until then is free again."""
        meta, spec = pod["metadata"], pod["spec"]
        key = (meta["namespace"], meta["name"])
        records = self.records.setdefault(key, {})
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
                    records[container["name"], resource] = tuple(ids)
                    self.answers[meta["name"], container["name"], resource] = answer.container_responses[0]
                    had = reusable.setdefault(resource, [])
                    reusable[resource] = [*had, *ids] if init else [i for i in had if i not in ids]
        except grpc.aio.AioRpcError:
            self.remove(*key)
            raise

    async def start_container(self, pod: str, container: str, namespace: str = "default") -> None:
        """PreStartContainer for each of its resources that want it, all at once as the kubelet may."""
        held = self.records[namespace, pod]
        calls = [
            self._plugin(resource).PreStartContainer(dp.PreStartContainerRequest(devices_ids=ids))
            for (of, resource), ids in held.items()
            if of == container and self.starts_with[resource]
        ]
        await self._timed(asyncio.gather(*calls))

    async def request_options(self, resource: str) -> dp.DevicePluginOptions:
        return await self._timed(self._plugin(resource).GetDevicePluginOptions(dp.Empty()))

    def remove(self, namespace: str, name: str) -> None:
        for (_, resource), ids in self.records.pop((namespace, name), {}).items():
            self.used[resource] -= set(ids)

    def swap(self, one: str, other: str) -> None:
        """Two pods of the same size get each other's devices."""
        a, b = ("default", one), ("default", other)
        self.records[a], self.records[b] = self.records[b], self.records[a]

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
