"""The kubelet's own records: which container has which devices. Read over its pod resources socket; never written.

The kubelet does not list init containers that run to completion (server_v1.go, Kubernetes 1.36): their devices show only in the
app containers that use them again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from vgpu.api.errors import TangramError
from vgpu.health.foreign import ForeignDevice, may_be_gpu
from vgpu_pb import podresources_pb2 as pb

DEADLINE_S: Final = 5.0
PAUSE_S: Final = 0.02
"""The kubelet answers 10 requests at once and 100 in a second, of all clients together, and refuses others (apis/podresources, Kubernetes 1.36)."""
MESSAGE_LIMIT: Final = 64 * 2**20
"""A node of 110 pods with a thousand IDs each is 6 MB; the kubelet's own client takes 16 MiB."""

LIST: Final = "/v1.PodResourcesLister/List"
ALLOCATABLE: Final = "/v1.PodResourcesLister/GetAllocatableResources"
REQUEST: Final = pb.ListPodResourcesRequest().SerializeToString()
"""Empty, as the one for `ALLOCATABLE`."""
POD_TAG: Final = 0x0A
"""Field 1 (pod_resources), of a length that follows. Specified by protobuf's encoding and the API's field numbers."""


class KubeletUnreachable(TangramError):
    """The kubelet does not answer on its pod resources socket."""


@dataclass(frozen=True, slots=True)
class ContainerDevices:
    """Devices of one resource that one container has."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: frozenset[str]


class PodResources:
    """A client of the kubelet's pod resources socket. Connects at the first call, again after a restart of the kubelet.

    One call that lists pods is under way at a time. Callers that come meanwhile share the answer of the next one.
    """

    def __init__(self, socket: Path) -> None:
        self.last: tuple[ContainerDevices, ...] = ()
        """What the kubelet listed last of our domain."""
        self._socket = socket
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, Any] = {}
        self._calling = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None
        """The question that waits for the one under way."""

    async def holdings(self, domain: str) -> tuple[ContainerDevices, ...]:
        """Every device under our domain that a container has. Raises KubeletUnreachable."""
        answer = await self._list()
        with self._reading():
            listed = pb.ListPodResourcesResponse.FromString(answer)
        self.last = tuple(_holdings(listed.pod_resources, f"{domain}/"))
        return self.last

    async def holders(self, resource: str, ids: Collection[str]) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
        """The pod with exactly these devices, as the function `holders` answers. Raises KubeletUnreachable."""
        answer = await self._list()
        with self._reading():
            return holders(_holdings(naming(answer, ids), resource), resource, ids)

    async def others(self, domain: str, finished: Set[tuple[str, str]] = frozenset()) -> frozenset[ForeignDevice]:
        """Devices of every resource that is not under our domain, offered or given to pods: those that may be GPUs.

        `finished`: namespace and name of pods that have ended. Raises KubeletUnreachable, also where the answer cannot be read.
        """
        try:
            async with asyncio.timeout(DEADLINE_S):
                offered, listed = await asyncio.gather(self._request(ALLOCATABLE), self._list())
        except TimeoutError:
            raise KubeletUnreachable(f"pod resources at {self._socket}: no answer in {DEADLINE_S:.0f} s") from None
        with self._reading():
            foreign, self.last = await asyncio.to_thread(_sorted_out, offered, listed, f"{domain}/", finished)
        return foreign

    async def pods(self) -> Sequence[pb.PodResources]:
        """All that each pod has. Raises KubeletUnreachable."""
        answer = await self._list()
        with self._reading():
            return (await asyncio.to_thread(pb.ListPodResourcesResponse.FromString, answer)).pod_resources

    async def machine(self) -> pb.AllocatableResourcesResponse:
        """What containers can be given in all, in use or not. Raises KubeletUnreachable."""
        answer = await self._request(ALLOCATABLE)
        with self._reading():
            return await asyncio.to_thread(pb.AllocatableResourcesResponse.FromString, answer)

    async def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            self._calls.clear()
            await channel.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Of an answer that may be no such message. Raises KubeletUnreachable."""
        try:
            yield
        except (DecodeError, IndexError) as error:  # IndexError: `naming`, of a length that is cut off
            raise KubeletUnreachable(f"pod resources at {self._socket}: the answer cannot be read: {error}") from None

    async def _list(self) -> bytes:
        """The kubelet's answer to a question that is put after this call, encoded: what is read of it differs."""
        if self._next is None:
            self._next = asyncio.create_task(self._request_in_turn())
        return await asyncio.shield(self._next)

    async def _request_in_turn(self) -> bytes:
        async with self._calling:
            self._next = None
            return await self._request(LIST)

    async def _request(self, method: str) -> bytes:
        if self._channel is None:
            options = [("grpc.max_receive_message_length", MESSAGE_LIMIT), ("grpc.max_reconnect_backoff_ms", 1000)]
            self._channel = grpc.aio.insecure_channel(f"unix://{self._socket}", options=options)
        call = self._calls.setdefault(method, self._channel.unary_unary(method))
        until_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                answer: bytes = await call(REQUEST, timeout=DEADLINE_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() > until_s:
                    status = f"{error.code().name}: {error.details()}"
                    raise KubeletUnreachable(f"pod resources at {self._socket}: {status}") from None
                await asyncio.sleep(PAUSE_S)
            else:
                return answer


def _sorted_out(
    offered: bytes, listed: bytes, prefix: str, finished: Set[tuple[str, str]]
) -> tuple[frozenset[ForeignDevice], tuple[ContainerDevices, ...]]:
    """Raises DecodeError."""
    pods = pb.ListPodResourcesResponse.FromString(listed).pod_resources
    known = [*pb.AllocatableResourcesResponse.FromString(offered).devices]
    for pod in pods:
        if (pod.namespace, pod.name) not in finished:
            known += (devices for container in pod.containers for devices in container.devices)
    foreign = (
        ForeignDevice(one.resource_name, one_id)
        for one in known
        if not one.resource_name.startswith(prefix)
        for one_id in one.device_ids
    )
    return frozenset(filter(may_be_gpu, foreign)), tuple(_holdings(pods, prefix))


def naming(answer: bytes, ids: Collection[str]) -> list[pb.PodResources]:
    """The pods of an encoded ListPodResourcesResponse in which any of these device IDs stands, and perhaps others.

    A full node's answer names thousands of IDs, and each costs time once Python reads it. So the pods are found by their
    lengths (field 1, protobuf's encoding), and only those are decoded in whose bytes an ID is found.
    """
    named_at = deque(sorted(at for one in ids for at in _all_of(one.encode(), answer)))
    found, at = [], 0
    while at < len(answer):
        if answer[at] != POD_TAG:
            return list(pb.ListPodResourcesResponse.FromString(answer).pod_resources)
        length = shift = 0
        more = True
        while more:
            at += 1
            length |= (answer[at] & 0x7F) << shift
            shift, more = shift + 7, answer[at] >= 0x80
        begin, at = at + 1, at + 1 + length
        if named_at and named_at[0] < at:
            found.append(pb.PodResources.FromString(answer[begin:at]))
        while named_at and named_at[0] < at:
            named_at.popleft()
    return found


def _all_of(part: bytes, whole: bytes) -> Iterator[int]:
    """Where it begins."""
    at = whole.find(part)
    while at >= 0:
        yield at
        at = whole.find(part, at + 1)


def _holdings(pods: Iterable[pb.PodResources], prefix: str) -> Iterable[ContainerDevices]:
    for pod in pods:
        for container in pod.containers:
            found: dict[str, set[str]] = {}
            for devices in container.devices:
                if devices.resource_name.startswith(prefix):
                    found.setdefault(devices.resource_name, set()).update(devices.device_ids)
            for resource, ids in found.items():
                yield ContainerDevices(pod.namespace, pod.name, container.name, resource, frozenset(ids))


def holders(
    holdings: Iterable[ContainerDevices], resource: str, ids: Collection[str]
) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """((namespace, pod), its containers that have exactly these devices).

    The containers are () when only some app container shares devices with what must be an init container; the pod is None when
    no pod is known.
    """
    wanted = frozenset(ids)
    same = [h for h in holdings if h.resource == resource]
    exact = [h for h in same if h.ids == wanted]
    if exact:
        pod = (exact[0].namespace, exact[0].pod)
        return pod, tuple(h.container for h in exact if (h.namespace, h.pod) == pod)
    sharing = next((h for h in same if h.ids & wanted), None)
    return ((sharing.namespace, sharing.pod), ()) if sharing else (None, ())
