"""The kubelet's calls for one resource: protobuf in, protobuf out. Its parts make every decision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import grpc
import grpc.aio
import msgspec
import structlog

from deviceplugin.allocation import Choice, DeviceRequest
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.gpus.offer import Offer
from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.grant_directories import GrantDirectories
from vgpu.api.contract import CONTAINER_DIR, GPUS_ENV, GRANT, GRANT_ENV, NVIDIA_ENV, cdi_names, mounts
from vgpu.api.errors import Refused, TangramError
from vgpu.api.mig_device import slot_of_device
from vgpu.api.names import Names
from vgpu_pb import deviceplugin_pb2 as pb
from vgpu_pb import deviceplugin_pb2_grpc

HEALTH: Final = {True: "Healthy", False: "Unhealthy"}
"""Specified by k8s.io/kubelet, constants.go."""


def options(resource: str, names: Names) -> pb.DevicePluginOptions:
    """What the kubelet should call. Before a start not for gpu-core: its container has gpu-mem too, and that call does the work."""
    return pb.DevicePluginOptions(
        pre_start_required=resource != names.gpu_core, get_preferred_allocation_available=True
    )


log = structlog.get_logger("deviceplugin.service")


class CallObserver(Protocol):
    """Reports what happened: metrics and Events."""

    def served(self, call: str, resource: str, seconds: float) -> None:
        """A call was answered."""

    def refused(self, call: str, request: DeviceRequest, error: Exception) -> None:
        """A call was refused."""


class DevicePluginService(deviceplugin_pb2_grpc.DevicePluginServicer):
    """One resource."""

    def __init__(
        self,
        resource: str,
        *,
        offer: Offer,
        ledger: DeviceLedger,
        grants: GrantDirectories,
        prestart: Callable[[str, Sequence[str]], Awaitable[object]],
        state_root: Path,
        observer: CallObserver,
        make_instances: Callable[[Sequence[str]], Awaitable[tuple[str, ...]]] | None = None,
        answering: Callable[[], AbstractContextManager[None]] = nullcontext,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.resource = resource
        self.options = options(resource, offer.names)
        self.streams = 0
        """ListAndWatch calls that are open: the kubelet keeps one."""
        self._offer, self._ledger, self._grants, self._prestart = offer, ledger, grants, prestart
        self._state_root, self._observer, self._now = state_root, observer, now
        self._make_instances, self._answering = make_instances, answering

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:  # noqa: ARG002, N802
        """What the kubelet should call."""
        return self.options

    async def ListAndWatch(  # noqa: N802
        self,
        request: pb.Empty,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """All devices, now and after each change."""
        self.streams += 1
        last: list[pb.Device] | None = None
        try:
            while True:
                version, listed = self._offer.version, self._listed()
                if listed != last:
                    yield pb.ListAndWatchResponse(devices=listed)
                    last = listed
                await self._offer.changed_since(version)
        finally:
            self.streams -= 1

    async def GetPreferredAllocation(  # noqa: N802
        self, request: pb.PreferredAllocationRequest, context: Any
    ) -> pb.PreferredAllocationResponse:
        """IDs on the GPU that the pod most likely being admitted was assigned."""
        answers = []
        with self._serving("GetPreferredAllocation"):
            for one in request.container_requests:
                wanted = DeviceRequest(self.resource, one.allocation_size)
                try:
                    ids = await self._ledger.prefer(
                        self.resource, one.available_deviceIDs, one.must_include_deviceIDs, one.allocation_size
                    )
                except TangramError as error:
                    await self._refuse(context, "GetPreferredAllocation", wanted, error)
                answers.append(pb.ContainerPreferredAllocationResponse(deviceIDs=ids))
        return pb.PreferredAllocationResponse(container_responses=answers)

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: N802
        """Enter the IDs into the ledger; answer what the container gets with them."""
        answers = []
        with self._serving("Allocate"):
            for one in request.container_requests:
                wanted = DeviceRequest(self.resource, len(one.devices_ids))
                try:
                    choice = await self._ledger.allocate(self.resource, one.devices_ids)
                    answers.append(await self._with_devices(choice, one.devices_ids))
                except (TangramError, OSError) as error:
                    await self._refuse(context, "Allocate", wanted, error)
                log.info(
                    "allocated", resource=self.resource, quantity=wanted.quantity, pod=f"{choice.node_pod.namespace}/{choice.node_pod.name}",
                    uid=choice.node_pod.uid, container=choice.container, gpus=list(choice.gpus), swapped=choice.swapped,
                )  # fmt: skip
        return pb.AllocateResponse(container_responses=answers)

    async def PreStartContainer(  # noqa: N802
        self, request: pb.PreStartContainerRequest, context: Any
    ) -> pb.PreStartContainerResponse:
        """Write the grant and verify what the container mounts."""
        with self._serving("PreStartContainer"):
            try:
                await self._prestart(self.resource, request.devices_ids)
            except (TangramError, OSError) as error:
                wanted = DeviceRequest(self.resource, len(request.devices_ids))
                await self._refuse(context, "PreStartContainer", wanted, error)
        return pb.PreStartContainerResponse()

    @contextmanager
    def _serving(self, call: str) -> Iterator[None]:
        """The kubelet waits meanwhile. The observer gets the time of a call that was not refused."""
        began_s = time.perf_counter()
        with self._answering():
            yield
        self._observer.served(call, self.resource, time.perf_counter() - began_s)

    def _listed(self) -> list[pb.Device]:
        # The GPU is chosen before the kubelet decides, and a NUMA node could only force another one: none is named, unless that is predicted.
        listed = [pb.Device(ID=one.id, health=HEALTH[one.healthy]) for one in self._offer.devices(self.resource)]
        for device, one in zip(listed, self._offer.devices(self.resource), strict=True):
            if self._offer.names_numa and one.numa >= 0:
                device.topology.nodes.add(ID=one.numa)
        return listed

    async def _with_devices(self, choice: Choice, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        names, gpus = self._offer.names, tuple(choice.gpus)
        answer = pb.ContainerAllocateResponse()
        if self._make_instances is not None and any(map(slot_of_device, gpus)):
            gpus = await self._make_instances(gpus)
        if names.mig_profile(self.resource):
            # Not from the assignment: nobody knows the UUID of an instance on demand before this.
            answer.envs.update(dict.fromkeys((NVIDIA_ENV, GPUS_ENV), ",".join(gpus)))
        if self.resource == names.gpu_mem:
            key = await self._prepared(choice, ids)
            # a library of the release before, put back after a rollback, knows no mount there and would limit nothing
            answer.envs[GRANT_ENV] = f"{CONTAINER_DIR}/{GRANT}"
            earlier = choice.container in choice.node_pod.earlier
            for mount in mounts(str(self._state_root), key, earlier=earlier):
                answer.mounts.add(host_path=mount.host, container_path=mount.container, read_only=True)
        if self.resource != names.gpu_core and self._offer.inventory().access == "cdi":
            for name in cdi_names(gpus):
                answer.cdi_devices.add(name=name)
        return answer

    async def _prepared(self, choice: Choice, ids: Sequence[str]) -> str:
        """The key of a new directory. Raises OSError, Refused when the disk does not answer: the kubelet itself would wait for ever."""
        missing = f"{choice.node_pod} gets no directory for its grant"
        key = await self._grants.disk_thread.do(self._prepare, choice, ids, otherwise=missing)
        self._grants.durability.begin(key)
        return key

    def _prepare(self, choice: Choice, ids: Sequence[str]) -> str:
        """Raises OSError."""
        node_pod = choice.node_pod
        record = Record(
            tuple(ids), node_pod.uid, node_pod.namespace, node_pod.name, choice.container, tuple(choice.gpus), self._now(),
            choice.place,
        )  # fmt: skip
        self._move(choice)
        return self._grants.prepare(record)

    def _move(self, choice: Choice) -> None:
        """Directories that were made for another pod are this one's, by all that the kubelet requested since. Raises OSError."""
        node_pod = choice.node_pod
        containers: dict[frozenset[str], list[str]] = {}
        for (container, resource), ids in choice.moves.items():
            if resource == self.resource:
                containers.setdefault(ids, []).append(container)
        for ids, names in containers.items():
            for folder, container in zip(self._grants.newest(ids), reversed(names), strict=False):
                if folder.record is not None and folder.grant is None:
                    whose = {"uid": node_pod.uid, "namespace": node_pod.namespace, "pod": node_pod.name}
                    self._grants.update(msgspec.structs.replace(folder.record, container=container, **whose))

    async def _refuse(self, context: Any, call: str, wanted: DeviceRequest, error: Exception) -> NoReturn:
        log.warning("refused", call=call, resource=self.resource, quantity=wanted.quantity, error=str(error))
        self._observer.refused(call, wanted, error)
        code = grpc.StatusCode.FAILED_PRECONDITION if isinstance(error, Refused) else grpc.StatusCode.INTERNAL
        await context.abort(code, str(error))
        raise AssertionError("abort raises")


class ResourceServer:
    """A `DevicePluginService` on a socket of its own."""

    def __init__(self, service: DevicePluginService, socket: Path) -> None:
        self.service, self.socket = service, socket
        self._server: grpc.aio.Server | None = None

    @property
    def lost(self) -> bool:
        """Did another process (a kubelet that starts) remove the socket?"""
        return self._server is None or not self.socket.exists()

    async def start(self) -> None:
        """Listen, on a new socket if need be."""
        await self.stop()
        self.socket.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(self.service, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix://{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """Hang up on the kubelet."""
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.shield(server.stop(grace=0.2))
