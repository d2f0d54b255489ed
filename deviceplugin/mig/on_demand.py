"""MIG on demand on this node: which slots are offered, what a container gets for one, and when an idle instance is removed.

A slot is in use while a container has it by the ledger, the kubelet's records or a record of what a pod uses, and while a pod that is not finished was
assigned it. Until the pods and the kubelet's records are known, each slot of the record counts as in use: nothing is removed before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Final, Protocol

import structlog

from deviceplugin.allocation import NodePod
from deviceplugin.gpus.offer import Offer
from deviceplugin.mig.instances import Instance, InstanceReplaced, MigInstances, NoRoom
from deviceplugin.mig.record import MigRecord
from deviceplugin.pod_resources import ContainerDevices, KubeletUnreachable
from deviceplugin.pods.usage_records import UsageRecord
from kube.objects import Pod
from nvml.errors import NvmlError
from vgpu.api.errors import Refused
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, GpuCondition, Inventory, MigInstance, Withdrawal
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device, slot_mib, slot_of_device
from vgpu.mig.on_demand import layout_in_use
from vgpu.scheduling.mig_choice import offered

CHECK_S: Final = 1.0
"""While no pod changes: how late an idle instance is removed. Guessed."""
REFRESH_S: Final = 10.0
"""Between checks for instances that others made. Guessed; such a check is some 60 calls of NVML."""
MAKE_S: Final = 30.0
"""For an instance to be made, where NVML or the disk does not answer. It is removed again once it is there and no pod has it. Guessed."""
ROOM_WAIT_S: Final = 1.0
"""For the watch and the kubelet's records to show that the pod before has ended: the scheduler may know it first. Guessed; Allocate is to answer within 2 s."""

log = structlog.get_logger("deviceplugin.mig.on_demand")


class KnownPods(Protocol):
    """Of `deviceplugin.pods.node_pods.NodePods`."""

    @property
    def synced(self) -> bool: ...

    def node_pods(self) -> Sequence[NodePod]: ...

    def find(self, namespace: str, name: str) -> Pod | None: ...

    def pods(self) -> Mapping[str, Pod]: ...

    async def changed(self) -> None: ...


Given = Mapping[str, Mapping[tuple[str, str], Collection[str]]]
"""Pod UID -> (container, resource) -> device IDs, as `DeviceLedger.done`."""


class MigOnDemand:
    """Of one node. `idle_s`: how long an instance stays that no container has. `write_cdi` describes the devices to container runtimes; raises OSError."""

    def __init__(
        self, instances: MigInstances, offer: Offer, pods: KnownPods, *, given: Callable[[], Given], usage: Iterable[UsageRecord],
        holdings: Callable[[], Awaitable[Sequence[ContainerDevices]]], write_cdi: Callable[[], Awaitable[None]], report: Callable[[str], None],
        idle_s: float, clock: Callable[[], float] = time.monotonic, make_s: float = MAKE_S,
    ) -> None:  # fmt: skip
        self._instances, self._offer, self._pods, self._given, self._usage = instances, offer, pods, given, usage
        self._holdings, self._write_cdi, self._report = holdings, write_cdi, report
        self._idle_s, self._clock, self._make_s = idle_s, clock, make_s
        self._listed: dict[str, tuple[str, str]] | None = None
        """Slot -> namespace and name of the pod that had it by the kubelet's records; None = not known yet."""
        self._idle_since_s: dict[str, float] = {}
        self._reported: dict[str, str] = {}
        self._refreshed_s = float("-inf")
        self._changing = asyncio.Lock()
        """One change of instances at a time: what is in use is determined under it."""

    @property
    def record(self) -> MigRecord:
        """Which instances were made on demand."""
        return self._instances.record

    def shown(self, gpu: Gpu) -> Gpu:
        """The GPU as the inventory has it. Instances of ours are never offered as declared ones."""
        view = self._instances.views.get(gpu.uuid)
        if view is None or not gpu.mig:
            return gpu if not gpu.mig or not self._instances.record.of_gpu(gpu.uuid) else _without(gpu)
        if view.why_not:
            return _without(gpu) if view.ours else gpu
        return self._with_ours(gpu, on_demand=True)

    def devices(self, gpu: Gpu) -> dict[str, tuple[str, ...]]:
        """Profile -> slots that the GPU offers, by name. Those in use are always among them."""
        view = self._instances.views.get(gpu.uuid)
        held, assigned = self._held(gpu.uuid), self._assigned(gpu.uuid)
        found: dict[str, set[MigSlot]] = {}
        if view is not None and not view.why_not and gpu.mig:
            layout = layout_in_use(view.table, held, assigned)
            found = {profile: set(slots) for profile, slots in offered(view.table, layout).items()}
        for slot in held:
            found.setdefault(slot.profile, set()).add(slot)
        return {profile: tuple(slot_device(gpu.uuid, one) for one in sorted(slots)) for profile, slots in found.items()}

    def described(self, inventory: Inventory) -> tuple[Inventory, dict[str, str]]:
        """What container runtimes are told: the inventory with all instances, and other names of some: name -> UUID."""
        gpus = tuple(self._with_ours(gpu, on_demand=False) if self._ours(gpu) else gpu for gpu in inventory.gpus)
        there = {instance.uuid for gpu in gpus for instance in gpu.instances}
        aliases = {
            one.answered: one.uuid
            for one in self._instances.record.all()
            if one.step == "made" and one.uuid in there and one.answered and one.answered not in there
        }
        return replace(inventory, gpus=gpus), aliases

    async def prepare(self, inventory: Inventory) -> None:
        """After a probe, before its GPUs are offered."""
        for gpu in inventory.gpus:
            if self._instances.concerns(gpu) and not self._left_out(gpu):
                await self._refresh(gpu)

    async def allocate(self, devices: Sequence[str]) -> tuple[str, ...]:
        """UUIDs by which the container runtime knows the instances of these slots; they are made. Raises Refused, OSError."""
        with suppress(NoRoom):
            return await self._made(devices)
        await self._list_again()
        until_s = self._clock() + ROOM_WAIT_S
        while (left_s := until_s - self._clock()) > 0:
            with suppress(NoRoom):
                return await self._made(devices)
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._pods.changed()
            await self._list_again()
        return await self._made(devices)

    async def _made(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Raises NoRoom and as `allocate`."""
        async with self._changing:
            made = [await self._make(device, again=False) for device in devices]
            self._offer.refresh()
            await self._write_cdi()
        return tuple(one.answered for one in made)

    async def before_start(self, ids: Collection[str]) -> None:
        """The instances of a container that starts are there: the kubelet answers a restart from its own records. Raises Refused, OSError."""
        slots = [one for one in ids if slot_of_device(one)]
        if not slots:
            return
        async with self._changing:
            for device in slots:
                one = await self._make(device, again=True)
                if one.uuid != one.answered and self._offer.inventory().access != "cdi":
                    raise InstanceReplaced(
                        f"the MIG instance of {device} was made again and is {one.uuid} now, and the container gets {one.answered} from the kubelet's records: the pod has to be replaced"
                    )
            self._offer.refresh()
            await self._write_cdi()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._offer.refresh()
            try:
                await self._tidy()
            except (NvmlError, OSError) as error:
                log.warning("idle MIG instances are not removed now", error=str(error), retry_s=CHECK_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._pods.changed()

    async def _make(self, device: str, *, again: bool) -> Instance:
        parsed = slot_of_device(device)
        gpu = next((one for one in self._offer.reported.gpus if parsed and one.uuid == parsed[0]), None)
        if parsed is None or gpu is None:
            raise Refused(f"{device} is no MIG slot of a GPU of this node")
        now = self._offer.inventory().gpu(gpu.uuid)
        if not again and (now is None or not now.healthy):
            raise Refused(f"GPU {gpu.uuid} is unhealthy: no MIG instance is made on it")
        if (reasons := self._withdrawn(gpu.uuid)) and not again:
            raise Refused(f"GPU {gpu.uuid} is withdrawn, and no MIG instance is made on it: {reasons[0]}")
        held, given_up = self._held(gpu.uuid), Event()
        try:
            async with asyncio.timeout(self._make_s):
                return await asyncio.to_thread(
                    self._instances.make, gpu, parsed[1], held, again=again, given_up=given_up.is_set
                )
        except TimeoutError:
            raise Refused(
                f"GPU {gpu.uuid}: the MIG instance {parsed[1].profile} at slice {parsed[1].start} was not made within {self._make_s:g} s"
            ) from None
        except NvmlError as error:
            raise Refused(
                f"GPU {gpu.uuid}: no MIG instance {parsed[1].profile} at slice {parsed[1].start}: {error}"
            ) from None
        finally:
            given_up.set()  # the thread may wait still: what it would do then fits what is in use no more

    async def _tidy(self) -> None:
        """Remove what has been idle for long. Raises NvmlError, OSError."""
        gpus = [gpu for gpu in self._offer.reported.gpus if self._instances.concerns(gpu) and not self._left_out(gpu)]
        if not gpus or not self._pods.synced:
            return
        due = self._clock() - self._refreshed_s >= REFRESH_S
        idle = [one for gpu in gpus for one in self._removable(gpu)]
        if due or idle or self._listed is None:
            try:
                self._list(await self._holdings())
            except KubeletUnreachable:
                return
        async with self._changing:
            if due:
                self._refreshed_s = self._clock()
                for gpu in gpus:
                    await self._refresh(gpu)
            now = {slot_device(gpu.uuid, slot): (gpu, slot) for gpu in gpus for slot in self._removable(gpu)}
            self._idle_since_s = {one: self._idle_since_s.get(one, self._clock()) for one in now}
            for device, (gpu, slot) in now.items():
                if self._clock() - self._idle_since_s[device] >= self._idle_s:
                    await self._remove(gpu, slot)

    async def _remove(self, gpu: Gpu, slot: MigSlot) -> None:
        in_use = self._held(gpu.uuid) | self._assigned(gpu.uuid)
        if slot not in self._removable(gpu):  # any more
            return
        try:
            removed = await asyncio.to_thread(self._instances.remove, gpu, slot, in_use)
        except NvmlError as error:
            log.warning(
                "an idle MIG instance is not removed",
                gpu=gpu.uuid,
                profile=slot.profile,
                start=slot.start,
                error=str(error),
            )
            return
        if removed:
            self._offer.refresh()
            await self._write_cdi()

    async def _refresh(self, gpu: Gpu) -> None:
        in_use = self._held(gpu.uuid) | self._assigned(gpu.uuid)
        before = self._instances.views.get(gpu.uuid)
        try:
            view = await asyncio.to_thread(self._instances.refresh, gpu, in_use)
        except (NvmlError, OSError) as error:
            log.warning("the MIG instances of a GPU are not known now", gpu=gpu.uuid, error=str(error))
            return
        if self._reported.get(gpu.uuid, "") != view.why_not and self._instances.enabled:
            self._reported[gpu.uuid] = view.why_not
            was_on_demand = before is not None and not before.why_not
            if view.why_not and (was_on_demand or not view.declared):
                self._report(f"GPU {gpu.uuid} makes no MIG instances on demand: {view.why_not}")
        if view != before and self._offer.probed:
            self._offer.refresh()
            await self._write_cdi()

    def _withdrawn(self, uuid: str) -> tuple[GpuCondition, ...]:
        """Why new pods do not get a GPU."""
        shown = self._offer.inventory().gpu(uuid)
        return shown.withdrawn if shown is not None else ()

    def _left_out(self, gpu: Gpu) -> bool:
        """Nothing of Tangram opens it, so that it can be reset."""
        return any(one.reason == Withdrawal.RELEASED for one in self._withdrawn(gpu.uuid))

    def _removable(self, gpu: Gpu) -> set[MigSlot]:
        """Slots whose instances no container of ours has. None of a GPU whose instances another device plugin may have given away."""
        if any(one.reason in (Withdrawal.CLASH, Withdrawal.UNKNOWN) for one in self._withdrawn(gpu.uuid)):
            return set()
        view = self._instances.views.get(gpu.uuid)
        ours = set(view.ours) if view is not None else set()
        return ours - self._held(gpu.uuid) - self._assigned(gpu.uuid)

    async def _list_again(self) -> None:
        """Where the kubelet does not answer in time, what it said before is what counts."""
        with suppress(KubeletUnreachable, TimeoutError):
            async with asyncio.timeout(ROOM_WAIT_S):
                self._list(await self._holdings())

    def _list(self, holdings: Iterable[ContainerDevices]) -> None:
        self._listed = {one: (held.namespace, held.pod) for held in holdings for one in held.ids if slot_of_device(one)}

    def _held(self, gpu: str) -> set[MigSlot]:
        """Slots that containers have."""
        if not self._pods.synced or self._listed is None:
            return _of(gpu, (one.device for one in self._instances.record.all())) | self._known(gpu)
        return self._known(gpu)

    def _known(self, gpu: str) -> set[MigSlot]:
        pods, alive = self._pods.pods(), {pod.uid: pod for pod in self._pods.node_pods()}
        devices = [one for uid in alive for ids in self._given().get(uid, {}).values() for one in ids]
        devices += [one.uuid for pod in alive.values() if not pod.waiting for one in _assigned(pod)]
        for record in self._usage:
            known = pods.get(record.uid)
            if known is None or not known.finished:
                devices += [one.uuid for one in record.held]
        finished = {(pod.metadata.namespace, pod.metadata.name) for pod in pods.values() if pod.finished}
        devices += [
            device
            for device, whose in (self._listed or {}).items()
            if whose not in finished or self._pods.find(*whose) is not None
        ]
        return _of(gpu, devices)

    def _assigned(self, gpu: str) -> set[MigSlot]:
        """Slots that pods were assigned, those that wait for the kubelet included."""
        return _of(gpu, (one.uuid for pod in self._pods.node_pods() for one in _assigned(pod)))

    def _ours(self, gpu: Gpu) -> bool:
        view = self._instances.views.get(gpu.uuid)
        return gpu.mig and view is not None and (bool(view.ours) or not view.why_not)

    def _with_ours(self, gpu: Gpu, *, on_demand: bool) -> Gpu:
        view = self._instances.views[gpu.uuid]
        mine = {one.uuid for one in view.ours.values()}
        made = tuple(
            MigInstance(
                one.uuid, slot.profile, slot_mib(gpu.mib, view.table, slot.profile), one.number, 0, start=slot.start
            )
            for slot, one in sorted(view.ours.items())
        )
        others = () if not view.why_not else tuple(one for one in gpu.instances if one.uuid not in mine)
        return replace(gpu, instances=(*made, *others), on_demand=on_demand)


def _assigned(pod: NodePod) -> Iterable[AssignedGpu]:
    return (one for gpus in pod.assignment.containers.values() for one in gpus)


def _of(gpu: str, devices: Iterable[str]) -> set[MigSlot]:
    parsed = filter(None, map(slot_of_device, devices))
    return {slot for uuid, slot in parsed if uuid == gpu}


def _without(gpu: Gpu) -> Gpu:
    return replace(gpu, instances=(), on_demand=False)
