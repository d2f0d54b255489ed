"""Who has a GPU or a MIG instance of this node: so that a declared MIG configuration changes none that is in use.

Every record counts: pods and their assignments, what the plugin allocated, the kubelet's list, pods that left the API while their processes may run. A
pod whose assignment cannot be read may have any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deviceplugin.allocation import NodePod
from deviceplugin.gpus.offer import Offer
from deviceplugin.mig.on_demand import Given
from deviceplugin.pod_resources import ContainerDevices
from deviceplugin.pods.node_pods import UnreadablePod
from deviceplugin.pods.usage_records import UsageRecord
from kube.objects import Pod
from vgpu.api.codec import assignment_from_json
from vgpu.api.errors import BadDocument
from vgpu.api.grant import AssignedGpu
from vgpu.api.mig_device import slot_of_device
from vgpu.api.names import Names


class Pods(Protocol):
    """Of `deviceplugin.pods.node_pods.NodePods`."""

    @property
    def synced(self) -> bool: ...

    def node_pods(self) -> Sequence[NodePod]: ...

    def unreadable(self) -> Sequence[UnreadablePod]: ...

    def pods(self) -> Mapping[str, Pod]: ...

    def find(self, namespace: str, name: str) -> Pod | None: ...


class UsersUnknown(Exception):
    """It is not known now who has what."""


@dataclass(frozen=True, slots=True)
class Users:
    """At one moment: device ID, GPU or instance by UUID, or slot by name -> who has it, for a person."""

    devices: Mapping[str, str]

    def of_instance(self, uuid: str) -> str:
        """Who has this MIG instance; empty: nobody."""
        return self.devices.get(uuid, "") or self._part(uuid)

    def of_gpu(self, uuid: str) -> str:
        """Who has the GPU, or a share of it; empty: nobody. Slots of MIG on demand are no use of the GPU as it is without MIG mode."""
        return self.devices.get(uuid, "") or self._part(uuid)

    def _part(self, uuid: str) -> str:
        found = (
            who
            for device, who in self.devices.items()
            if device.startswith((f"{uuid}-", f"{uuid}::")) and slot_of_device(device) is None
        )
        return next(found, "")


class Listing(Protocol):
    """Of `deviceplugin.pod_resources.PodResources`."""

    async def holdings(self, domain: str) -> Sequence[ContainerDevices]: ...


class Ledger(Protocol):
    """Of `deviceplugin.device_ledger.DeviceLedger`."""

    @property
    def done(self) -> Given: ...


class DeviceUsers:
    """Of one node. `gone`: pods that the API lacks and that are not known to be gone."""

    def __init__(
        self, pods: Pods, offer: Offer, names: Names, listing: Listing, ledger: Ledger, gone: Callable[[], Iterable[UsageRecord]]
    ) -> None:  # fmt: skip
        self._pods, self._offer, self._names = pods, offer, names
        self._listing, self._ledger, self._gone = listing, ledger, gone

    async def read(self) -> Users:
        """Raises UsersUnknown, KubeletUnreachable."""
        listed = await self._listing.holdings(self._names.domain)
        return Users(self._found(listed))

    def known(self) -> object:
        """Compares equal while nothing changed of all that is known without the kubelet."""
        try:
            return self._found(()), frozenset(uid for uid, pod in self._pods.pods().items() if pod.finished)
        except UsersUnknown as error:
            return str(error)

    def _found(self, listed: Iterable[ContainerDevices]) -> dict[str, str]:
        """Raises UsersUnknown."""
        if not self._pods.synced:
            raise UsersUnknown("the pods of the node are not known yet")
        found: dict[str, str] = {}
        for device, who in (*self._of_pods(), *self._of_unreadable(), *self._of_gone(), *self._listed(listed)):
            found.setdefault(device, who)
        return found

    def _of_pods(self) -> Iterable[tuple[str, str]]:
        given = self._ledger.done
        for pod in self._pods.node_pods():
            who = f"pod {pod.namespace}/{pod.name}"
            for gpus in pod.assignment.containers.values():
                yield from _held(gpus, who)
            for ids in given.get(pod.uid, {}).values():
                yield from ((one, who) for one in ids)

    def _of_unreadable(self) -> Iterable[tuple[str, str]]:
        """Raises UsersUnknown. A pod without an assignment has what the kubelet lists."""
        for other in self._pods.unreadable():
            meta = other.pod.metadata
            if (text := meta.annotation(self._names.assignment)) is None:
                continue
            try:
                yield from _held(assignment_from_json(text).held(), f"pod {meta.namespace}/{meta.name}")
            except BadDocument:
                raise UsersUnknown(f"pod {meta.namespace}/{meta.name} may have any GPU: {other.why}") from None

    def _of_gone(self) -> Iterable[tuple[str, str]]:
        for record in self._gone():
            yield from _held(record.held, f"pod {record.namespace}/{record.pod}, deleted by force")
        for orphan in self._offer.inventory().orphans:
            yield from _held(orphan.held, f"pod {orphan.key}, deleted by force")

    def _listed(self, holdings: Iterable[ContainerDevices]) -> Iterable[tuple[str, str]]:
        """Of pods that are not known to have ended."""
        pods = self._pods.pods().values()
        finished = {(pod.metadata.namespace, pod.metadata.name) for pod in pods if pod.finished}
        for one in holdings:
            if (one.namespace, one.pod) not in finished or self._pods.find(one.namespace, one.pod) is not None:
                yield from ((device, f"pod {one.namespace}/{one.pod}") for device in one.ids)


def _held(gpus: Iterable[AssignedGpu], who: str) -> Iterable[tuple[str, str]]:
    return ((one.uuid, who) for one in gpus)
