"""Make and remove MIG instances for slots, and keep the record in step with the driver. Every method may wait for NVML: called in threads.

The steps, each of which a killed plugin may end with (`vgpu.mig.on_demand.sort_out` tells afterwards what is there):

    making    is entered; the instance is made; made is entered with its UUID
    removing  is entered; the instance is removed; the slot leaves the record
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final, Literal, Protocol

import structlog

from deviceplugin.mig.record import MigRecord, SlotRecord
from nvml.errors import NvmlAway, NvmlError, NvmlHalf, NvmlHung
from nvml.messages import MigInstanceFacts, MigReply, ProcessesReply
from vgpu.api.errors import Refused
from vgpu.api.inventory import Gpu
from vgpu.api.mig import MigSlot, MigTable
from vgpu.api.mig_device import slot_device
from vgpu.api.mig_tables import model_of
from vgpu.mig.on_demand import Existing, Sorted, disagreement, in_the_way, sort_out

LATE_S: Final = 30.0
"""An instance whose making was interrupted may still appear for so long: the call of NVML may be in the driver. Guessed: three times the limit of a call."""
PROCESS_WAIT_S: Final = 0.5
"""For processes of a pod that has just ended. Guessed; Allocate is to answer within 2 s."""
PROCESS_POLL_S: Final = 0.05
OFF: Final = "MIG on demand is off for this node (node.migOnDemand)"

UNFINISHED: Final = (NvmlAway, NvmlHung, NvmlHalf)
"""After these, a part of an instance may be there, or come yet: the record keeps the step, and `sort_out` finds it."""

log = structlog.get_logger("deviceplugin.mig.instances")


Change = Literal["made", "failed", "removed"]


class NoRoom(Refused):
    """Instances in use are where the slot is: that may pass."""


class InstanceReplaced(Refused):
    """A container that starts again does not get the instance that it was answered with: only a new pod can mend that."""


class MigDriver(Protocol):
    """Of `nvml.queries.Nvml`. Each raises NvmlError."""

    def mig(self, uuid: str) -> MigReply: ...

    def create_mig(self, uuid: str, profile: int, start: int) -> MigInstanceFacts: ...

    def destroy_mig(self, uuid: str, instance: int) -> None: ...

    def held_of(self, uuids: Collection[str]) -> Mapping[str, ProcessesReply | NvmlError]: ...


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU in MIG mode, as it was seen last."""

    gpu: str
    table: MigTable
    """Empty for a model that is not known."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Profile -> its number."""
    ours: Mapping[MigSlot, Existing] = field(default_factory=dict)
    why_not: str = ""
    """Why no instance is made on it; empty = it is on demand."""
    declared: bool = False
    """All its instances are others', and there are some: as an operator declared them."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What a container gets for a slot."""

    uuid: str
    answered: str
    """The name by which the container runtime knows it."""


class MigInstances:
    """Of one node. `enabled`: the node's value for MIG on demand."""

    def __init__(
        self, driver: MigDriver, record: MigRecord, *, enabled: bool, count: Callable[[Change], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic, wait: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.views: dict[str, GpuView] = {}
        """GPU's UUID -> what was seen last."""
        self.record = record
        self._driver, self.enabled, self._clock, self._wait = driver, enabled, clock, wait
        self._busy, self._count = Lock(), count
        self._absent_since_s: dict[str, float] = {}

    def concerns(self, gpu: Gpu) -> bool:
        """May this GPU have instances of ours?"""
        return gpu.mig and (self.enabled or bool(self.record.of_gpu(gpu.uuid)))

    def refresh(self, gpu: Gpu, in_use: Collection[MigSlot]) -> GpuView:
        """See what is there, and finish what was interrupted. Raises NvmlError, OSError."""
        with self._busy:
            return self._refresh(gpu, in_use)

    def make(
        self, gpu: Gpu, slot: MigSlot, held: Collection[MigSlot], *, again: bool = False, given_up: Callable[[], bool] = bool,
    ) -> Instance:  # fmt: skip
        """The instance at this slot: that which is there, or a new one. `held`: slots of other containers. `again`: the container has been answered before.
        `given_up`: nobody waits for the answer any more. Then nothing is done: `held` may be out of date.

        Raises Refused, NvmlError, OSError.
        """
        with self._busy:
            if given_up():
                raise Refused(
                    f"the MIG instance {slot.profile} at slice {slot.start} of GPU {gpu.uuid} is wanted no more"
                )
            view = self._refresh(gpu, {*held, slot})
            device = slot_device(gpu.uuid, slot)
            before = self.record.get(device)
            if slot not in view.ours:
                if view.why_not:
                    raise Refused(
                        f"GPU {gpu.uuid} makes no MIG instance {slot.profile} at slice {slot.start}: {view.why_not}"
                    )
                if again and (before is None or not before.answered):
                    raise InstanceReplaced(
                        f"the MIG instance of {device} is gone and is not in the record: the pod has to be replaced"
                    )
                others = set(held) - {slot}
                self._make_room(view, slot, others)
                self._create(view, slot, before.answered if again and before else "")
            elif not again and before is not None and before.answered != before.uuid:
                self.record.enter(SlotRecord(device, "made", before.uuid, before.uuid))
            made = self.record.get(device)
            if made is None:
                raise Refused(f"the MIG instance of {device} left the record while it was made")
            return Instance(made.uuid, made.answered)

    def remove(self, gpu: Gpu, slot: MigSlot, in_use: Collection[MigSlot]) -> bool:
        """Remove an instance that no container has. `in_use`: slots that containers have. False if a process uses it or it is not ours. Raises NvmlError, OSError."""
        with self._busy:
            view = self._refresh(gpu, in_use)
            one = view.ours.get(slot)
            if one is None or self._processes((one.uuid,)):
                return False
            self._destroy(view, one)
            return True

    def _refresh(self, gpu: Gpu, in_use: Collection[MigSlot]) -> GpuView:
        reply = self._driver.mig(gpu.uuid)
        found = sort_out(map(_existing, reply.instances), self.record.of_gpu(gpu.uuid))
        if self.record.damaged:
            found = Sorted(foreign=tuple(map(_existing, reply.instances)))
        for one in found.leftovers:
            log.warning("a MIG instance that was half made or removed is removed", gpu=gpu.uuid, number=one.number)
            self._remove_leftover(gpu.uuid, one)
        for slot, one in found.ours.items():
            device = slot_device(gpu.uuid, slot)
            before = self.record.get(device)
            self._absent_since_s.pop(device, None)
            if before is not None and before.step == "making":
                self.record.enter(SlotRecord(device, "made", one.uuid, before.answered or one.uuid))
        for slot in found.absent:
            self._forget_absent(slot_device(gpu.uuid, slot), in_use=slot in in_use)
        view = self._view(gpu, reply, found)
        self.views[gpu.uuid] = view
        return view

    def _remove_leftover(self, gpu: str, one: Existing) -> None:
        """Raises NvmlError, OSError."""
        device = slot_device(gpu, one.slot)
        try:
            self._driver.destroy_mig(gpu, one.number)
        except NvmlError as error:
            if one.complete and not isinstance(error, UNFINISHED):  # a process uses it: it is removed once it is idle
                before = self.record.get(device)
                self.record.enter(SlotRecord(device, "made", one.uuid, before.answered if before else one.uuid))
            raise
        self.record.remove(device)

    def _forget_absent(self, device: str, *, in_use: bool) -> None:
        before = self.record.get(device)
        if before is None:
            return
        since_s = self._absent_since_s.setdefault(device, self._clock())
        if before.step == "making" and self._clock() - since_s < LATE_S:
            return
        if in_use and before.answered:
            if before.step != "lost":
                self.record.enter(SlotRecord(device, "lost", answered=before.answered))
            return
        del self._absent_since_s[device]
        self.record.remove(device)

    def _view(self, gpu: Gpu, reply: MigReply, found: Sorted) -> GpuView:
        model = model_of(reply.model)
        table = model.table if model is not None and model.table.profiles else MigTable.of(reply.profiles)
        why = ""
        if not self.enabled:
            why = OFF
        elif self.record.damaged:
            why = self.record.damaged
        elif not reply.mig:
            why = "its MIG mode is off"
        elif model is None or not model.table.profiles:
            why = f"the placements of model {reply.model!r} are not in Tangram's tables"
        elif found.foreign:
            first = found.foreign[0]
            why = f"it has {len(found.foreign)} MIG instances that Tangram did not make, the first a {first.slot.profile} at slice {first.slot.start}"
        else:
            why = disagreement(table, reply.profiles)
        declared = bool(found.foreign) and not self.record.of_gpu(gpu.uuid)
        return GpuView(
            gpu.uuid, table, {one.name: one.number for one in reply.profiles}, dict(found.ours), why, declared
        )

    def _make_room(self, view: GpuView, slot: MigSlot, held: Collection[MigSlot]) -> None:
        """Raises Refused, NvmlError, OSError."""
        idle = [one for one in view.ours if one not in held and one != slot]
        remove = in_the_way(view.table, held, idle, slot) if slot in _slots(view.table, slot.profile) else None
        if remove is None:
            beside = ", ".join(f"{one.profile} at slice {one.start}" for one in sorted(held)) or "none"
            raise NoRoom(
                f"GPU {view.gpu} has no room for a MIG instance {slot.profile} at slice {slot.start}: in use are {beside}"
            )
        self._check_processes(view, held)
        for one in remove:
            self._destroy(view, view.ours[one])

    def _check_processes(self, view: GpuView, held: Collection[MigSlot]) -> None:
        """No process is on the GPU but in instances that containers have. Raises Refused, NvmlError."""
        known = tuple(one.uuid for slot, one in view.ours.items() if slot in held)
        until_s = self._clock() + PROCESS_WAIT_S
        while foreign := sorted(self._processes((view.gpu,)) - self._processes(known)):
            if self._clock() >= until_s:
                raise Refused(
                    f"GPU {view.gpu} has processes in no MIG instance of a pod, the first is {foreign[0]}: no MIG instance is made beside them"
                )
            self._wait(PROCESS_POLL_S)

    def _processes(self, uuids: Collection[str]) -> set[int]:
        """Raises NvmlError."""
        pids = set()
        for reply in (self._driver.held_of(uuids) if uuids else {}).values():
            if isinstance(reply, NvmlError):
                raise reply
            pids |= {one.pid for one in reply.processes}
        return pids

    def _create(self, view: GpuView, slot: MigSlot, answered: str) -> None:
        """Raises Refused, NvmlError, OSError."""
        device = slot_device(view.gpu, slot)
        self.record.enter(SlotRecord(device, "making", answered=answered))
        try:
            facts = self._driver.create_mig(view.gpu, view.numbers[slot.profile], slot.start)
        except NvmlError as error:
            self._count("failed")
            self._not_made(device, answered, error)
            raise Refused(
                f"GPU {view.gpu}: the MIG instance {slot.profile} at slice {slot.start} was not made: {error}"
            ) from None
        one = _existing(facts)
        self.record.enter(SlotRecord(device, "made", one.uuid, answered or one.uuid))
        self.views[view.gpu] = replace(view, ours={**self.views[view.gpu].ours, slot: one})
        self._count("made")
        log.info("made a MIG instance", device=device, uuid=one.uuid)

    def _not_made(self, device: str, answered: str, error: NvmlError) -> None:
        """The driver refused: nothing of ours is there. Where it did not answer, or refused half way, what is there or appears is ours."""
        self._absent_since_s.pop(device, None)
        if isinstance(error, UNFINISHED):
            return
        if answered:
            self.record.enter(SlotRecord(device, "lost", answered=answered))
        else:
            self.record.remove(device)

    def _destroy(self, view: GpuView, one: Existing) -> None:
        """Raises NvmlError, OSError."""
        device = slot_device(view.gpu, one.slot)
        before = self.record.get(device) or SlotRecord(device, "made", one.uuid, one.uuid)
        self.record.enter(SlotRecord(device, "removing", one.uuid, before.answered))
        try:
            self._driver.destroy_mig(view.gpu, one.number)
        except NvmlError as error:
            if not isinstance(error, UNFINISHED):
                self.record.enter(SlotRecord(device, "made", one.uuid, before.answered))
            raise
        self.record.remove(device)
        now = self.views[view.gpu]
        ours = {slot: other for slot, other in now.ours.items() if slot != one.slot}
        self.views[view.gpu] = replace(now, ours=ours)
        self._count("removed")
        log.info("removed a MIG instance that no container has", device=device, uuid=one.uuid)


def _existing(facts: MigInstanceFacts) -> Existing:
    uuid = facts.uuids[0] if len(facts.uuids) == 1 else ""
    return Existing(facts.number, MigSlot(facts.start, facts.profile), uuid, facts.complete)


def _slots(table: MigTable, profile: str) -> tuple[MigSlot, ...]:
    return table.slots(profile) if profile in table.by_name else ()
