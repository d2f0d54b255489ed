"""Small builders for the device plugin's tests: a node, containers on it, and a kubelet that admits them as the real one does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deviceplugin.allocation import DeviceRequest, NodePod
from deviceplugin.device_ledger import DeviceLedger
from vgpu.api.contract import devices
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.names import DEFAULT, Names
from vgpu.api.request import GpuRequest

UNIT_MIB = 1024


def uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number:012d}"


def inventory(gpus: int = 2, mib: int = 16 * 1024, access: str = "cdi") -> Inventory:
    return Inventory(
        tuple(Gpu(uuid(i), i, "NVIDIA T4", mib, minor=i) for i in range(gpus)),
        UNIT_MIB,
        access,  # type: ignore[arg-type]
    )


def share(container: str, units: int, core: int = 0, gpus: int = 1, *, init: bool = False) -> GpuRequest:
    return GpuRequest(container, "share", gpus, units=units, mib=units // gpus * UNIT_MIB, core_percent=core, init=init)


def node_pod(name: str, order: int, *requests: GpuRequest, on: Sequence[int] | dict[str, Sequence[int]]) -> NodePod:
    """A waiting pod whose containers were assigned the GPUs numbered `on`."""
    where = on if isinstance(on, dict) else {request.container: on for request in requests}
    containers = {
        request.container: tuple(
            AssignedGpu(uuid(i), i, request.mib, request.core_percent, request.kind, request.profile)
            for i in where[request.container]
        )
        for request in requests
    }
    init = frozenset(request.container for request in requests if request.init)
    return NodePod(f"uid-{name}", "default", name, (1, f"{order:06d}"), requests, Assignment(containers, init))


@dataclass
class KnownPods:
    """What the watch shows; `show` brings a change."""

    shown: dict[str, NodePod] = field(default_factory=dict)
    change: asyncio.Event = field(default_factory=asyncio.Event)
    synced: bool = True

    def node_pods(self) -> Sequence[NodePod]:
        return list(self.shown.values())

    def other_scheduler(self, request: DeviceRequest) -> str | None:  # noqa: ARG002
        return None

    async def changed(self) -> None:
        await self.change.wait()

    def show(self, one: NodePod) -> None:
        self.shown[one.uid] = one
        self.change.set()
        self.change = asyncio.Event()

    def admitted(self, one: NodePod) -> None:
        self.show(replace(self.shown[one.uid], waiting=False))

    def gone(self, one: NodePod) -> None:
        del self.shown[one.uid]


class ModelKubelet:
    """The kubelet's device manager, as manager.go of Kubernetes 1.36 has it: reuse first, then preferred, then any."""

    def __init__(self, ledger: DeviceLedger, inventory: Inventory, rng: random.Random, names: Names = DEFAULT) -> None:
        self.ledger, self.rng, self.names = ledger, rng, names
        self.all = {resource: {d.id for d in ids} for resource, ids in devices(inventory, names).items()}
        self.used: dict[str, set[str]] = {resource: set() for resource in self.all}
        self.records: dict[str, dict[tuple[str, str], frozenset[str]]] = {}

    async def admit(self, pod: NodePod) -> None:
        """Raises what the plugin raises; what the pod had until then is free again."""
        records = self.records.setdefault(pod.uid, {})
        reusable: dict[str, set[str]] = {}
        try:
            for request in pod.requests:
                wanted = list(request.resources(self.names).items())
                self.rng.shuffle(wanted)
                for resource, quantity in wanted:
                    ids = await self._devices(resource, quantity, reusable.get(resource, set()))
                    await self.ledger.allocate(resource, ids)
                    self.used[resource] |= ids
                    records[request.container, resource] = frozenset(ids)
                for resource, _ in wanted:
                    had = reusable.setdefault(resource, set())
                    if request.init:
                        had |= records[request.container, resource]
                    else:
                        had -= records[request.container, resource]
        except Exception:
            self.remove(pod)
            raise

    def remove(self, pod: NodePod) -> None:
        for (_, resource), ids in self.records.pop(pod.uid, {}).items():
            self.used[resource] -= ids

    async def _devices(self, resource: str, quantity: int, reusable: set[str]) -> set[str]:
        taken = set(self.rng.sample(sorted(reusable), min(quantity, len(reusable))))
        if len(taken) == quantity:
            return taken
        available = self.all[resource] - self.used[resource]
        assert len(available) >= quantity - len(taken), f"the kubelet has no {quantity} {resource} left"
        offered = list(available | taken)
        self.rng.shuffle(offered)
        preferred = await self.ledger.prefer(resource, offered, sorted(taken), quantity)
        rest = [one for one in preferred if one in available and one not in taken]
        rest += [one for one in self.rng.sample(sorted(available), len(available)) if one not in rest]
        return taken | set(rest[: quantity - len(taken)])
