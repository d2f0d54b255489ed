"""A GPU in MIG mode, as the driver keeps it: it outlives the plugin, which may be killed before and after each of its steps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from deviceplugin.allocation import NodePod
from deviceplugin.gpus.offer import Offer
from deviceplugin.mig.instances import MigInstances
from deviceplugin.mig.on_demand import MigOnDemand
from deviceplugin.mig.record import MigRecord, SlotRecord
from deviceplugin.pod_resources import ContainerDevices
from kube.objects import Pod
from nvml.errors import NvmlError
from nvml.messages import MigInstanceFacts, MigReply, ProcessesReply, ProcessUsage
from tests.builders import gpu, uuid_of
from vgpu.api.grant import Assignment
from vgpu.api.inventory import Gpu
from vgpu.api.mig import MigSlot, MigTable
from vgpu.api.mig_tables import model_of
from vgpu.api.names import DEFAULT

H100 = "NVIDIA H100 80GB HBM3"


def mig_gpu(model: str = H100, index: int = 0) -> Gpu:
    return replace(gpu(index, 81_920, model=model), mig=True)


class Killed(BaseException):
    """As SIGKILL: nothing that follows has an effect."""


@dataclass
class Steps:
    """Counts the steps of a process, and ends it before one of them."""

    cut_at: int | None = None
    done: int = 0

    def step(self) -> None:
        if self.cut_at is not None and self.done >= self.cut_at:
            raise Killed
        self.done += 1


@dataclass
class MigDouble:
    """NVML of one GPU."""

    model: str = H100
    steps: Steps = field(default_factory=Steps)
    instances: dict[int, MigInstanceFacts] = field(default_factory=dict)
    processes: dict[str, set[int]] = field(default_factory=dict)
    """UUID of the GPU or of an instance -> processes there."""
    refuses: str = ""
    """Why each creation fails; empty: none does."""
    destroyed: list[MigSlot] = field(default_factory=list)
    created: list[MigSlot] = field(default_factory=list)
    on: bool = True
    reads: Counter[bool] = field(default_factory=Counter)
    """Is it a brief one? -> readings of the GPU."""
    _numbers: count[int] = field(default_factory=lambda: count(1))

    @property
    def table(self) -> MigTable:
        model = model_of(self.model)
        assert model is not None
        return model.table

    def layout(self) -> tuple[MigSlot, ...]:
        return tuple(sorted(MigSlot(one.start, one.profile) for one in self.instances.values()))

    def at(self, slot: MigSlot) -> MigInstanceFacts | None:
        return next((one for one in self.instances.values() if MigSlot(one.start, one.profile) == slot), None)

    def add(self, slot: MigSlot) -> MigInstanceFacts:
        """As another program does."""
        number = next(self._numbers)
        made = MigInstanceFacts(number, slot.profile, slot.start, (uuid_of(f"{self.model}/{number}", "MIG"),), True)
        self.instances[number] = made
        return made

    def reset(self) -> None:
        """No instance outlives it."""
        self.instances.clear()
        self.processes.clear()

    def mig(self, uuid: str, *, brief: bool = False) -> MigReply:  # noqa: ARG002
        self.reads[brief] += 1
        if brief:
            devices = [replace(one, profile="", start=0) for one in self.instances.values() if one.complete]
            return MigReply("", "", True, self.on, self.on, (), tuple(devices))
        profiles = self.table.profiles if self.on else ()
        return MigReply("0x233010de", self.model, True, self.on, self.on, profiles, tuple(self.instances.values()))

    def create_mig(self, uuid: str, profile: int, start: int) -> MigInstanceFacts:  # noqa: ARG002
        self.steps.step()
        name = next(one.name for one in self.table.profiles if one.number == profile)
        slot = MigSlot(start, name)
        if self.refuses:
            raise NvmlError(self.refuses, 19)
        if not self.table.possible((*self.layout(), slot)):
            raise NvmlError("Insufficient Resources", 23)
        number = next(self._numbers)
        self.instances[number] = MigInstanceFacts(number, name, start, (), False)
        self.steps.step()
        made = MigInstanceFacts(number, name, start, (uuid_of(f"{self.model}/{number}", "MIG"),), True)
        self.instances[number] = made
        self.created.append(slot)
        self.steps.step()
        return made

    def destroy_mig(self, uuid: str, instance: int) -> None:  # noqa: ARG002
        self.steps.step()
        one = self.instances[instance]
        if any(self.processes.get(its) for its in one.uuids):
            raise NvmlError("In use by another client", 19)
        self.destroyed.append(MigSlot(one.start, one.profile))
        self.instances[instance] = replace(one, uuids=(), complete=False)
        self.steps.step()
        del self.instances[instance]
        self.steps.step()

    def held_of(self, uuids: Collection[str]) -> Mapping[str, ProcessesReply | NvmlError]:
        return {uuid: self._held(uuid) for uuid in uuids}

    def _held(self, uuid: str) -> ProcessesReply:
        whole = not uuid.startswith("MIG-")
        pids = set().union(*self.processes.values()) if whole else self.processes.get(uuid, set())
        return ProcessesReply(tuple(ProcessUsage(pid, uuid, 1) for pid in sorted(pids)))


class CutRecord(MigRecord):
    """Each write of it is a step before, and one after."""

    steps = Steps()

    def _write(self, slots: dict[str, SlotRecord]) -> None:
        self.steps.step()
        super()._write(slots)
        self.steps.step()


class PodsThatHave:
    """The pods of a node, as one that has all these devices."""

    synced = True

    def __init__(self) -> None:
        self.given: dict[str, dict[tuple[str, str], frozenset[str]]] = {}
        self.change, self.waited_for = asyncio.Event(), asyncio.Event()
        self._pod = NodePod("uid", "default", "p", (1, "p"), (), Assignment({}), waiting=False)

    def have(self, devices: Iterable[str]) -> None:
        self.given = {"uid": {("main", "mig"): frozenset(devices)}}
        self.change.set()
        self.change = asyncio.Event()

    def node_pods(self) -> Sequence[NodePod]:
        return (self._pod,)

    def find(self, namespace: str, name: str) -> Pod | None:  # noqa: ARG002
        return None

    def pods(self) -> Mapping[str, Pod]:
        return {}

    async def changed(self) -> None:
        self.waited_for.set()
        await self.change.wait()


def on_demand_of(driver: MigDouble, pods: PodsThatHave, folder: Path, **more: Any) -> tuple[Offer, MigOnDemand]:
    """A node of one such GPU. `more`: arguments of `MigOnDemand`."""
    offer = Offer(DEFAULT, 1024)
    instances = MigInstances(driver, MigRecord(folder, "boot"), enabled=True, wait=lambda _: None)

    async def no_holdings() -> Sequence[ContainerDevices]:
        return ()

    async def no_cdi() -> None:
        return None

    rest: dict[str, Any] = {
        "given": lambda: pods.given, "usage": (), "holdings": no_holdings, "write_cdi": no_cdi, "report": lambda _: None,
        "idle_s": 0.0,
    }  # fmt: skip
    node = MigOnDemand(instances, offer, pods, **(rest | more))
    offer.slots = node
    return offer, node
