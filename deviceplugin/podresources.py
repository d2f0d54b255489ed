"""The kubelet's own books: which container has which devices. Read over its pod resources socket; never written.

The kubelet does not list init containers that run to completion (server_v1.go, Kubernetes 1.36): their devices show only in the
app containers that use them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from vgpu.errors import TangramError
from vgpu_pb import podresources_pb2 as pb
from vgpu_pb import podresources_pb2_grpc

DEADLINE_S: Final = 5.0
MESSAGE_LIMIT: Final = 64 * 2**20
"""A node of 110 pods with a thousand IDs each is 6 MB; the kubelet's own client takes 16 MiB."""


class KubeletSilent(TangramError):
    """The kubelet does not answer on its pod resources socket."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Devices of one resource that one container has."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: frozenset[str]


class PodResources:
    """A client of the kubelet's pod resources socket. Connects when asked, again after a restart of the kubelet."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel: grpc.aio.Channel | None = None

    async def holdings(self, domain: str) -> tuple[Holding, ...]:
        """Every device under our domain that a container has. Raises KubeletSilent."""
        if self._channel is None:
            options = [("grpc.max_receive_message_length", MESSAGE_LIMIT), ("grpc.max_reconnect_backoff_ms", 1000)]
            self._channel = grpc.aio.insecure_channel(f"unix://{self._socket}", options=options)
        stub = podresources_pb2_grpc.PodResourcesListerStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            answer = await stub.List(pb.ListPodResourcesRequest(), timeout=DEADLINE_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise KubeletSilent(f"pod resources at {self._socket}: {error.code().name}: {error.details()}") from None
        return tuple(_holdings(answer, f"{domain}/"))

    async def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


def _holdings(answer: pb.ListPodResourcesResponse, prefix: str) -> Iterable[Holding]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            found: dict[str, set[str]] = {}
            for devices in container.devices:
                if devices.resource_name.startswith(prefix):
                    found.setdefault(devices.resource_name, set()).update(devices.device_ids)
            for resource, ids in found.items():
                yield Holding(pod.namespace, pod.name, container.name, resource, frozenset(ids))


def holders(
    holdings: Iterable[Holding], resource: str, ids: Collection[str]
) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """((namespace, pod), its containers that have exactly these devices).

    The containers are () when only some app container shares devices with what must be an init container; the pod is None when
    nobody is known.
    """
    wanted = frozenset(ids)
    same = [h for h in holdings if h.resource == resource]
    exact = [h for h in same if h.ids == wanted]
    if exact:
        pod = (exact[0].namespace, exact[0].pod)
        return pod, tuple(h.container for h in exact if (h.namespace, h.pod) == pod)
    sharing = next((h for h in same if h.ids & wanted), None)
    return ((sharing.namespace, sharing.pod), ()) if sharing else (None, ())
