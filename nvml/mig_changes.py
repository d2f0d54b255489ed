"""Carry out plans of MIG on this machine's GPUs: all of them, or none.

Each step that succeeds is noted with what undoes it. If a later one fails, the notes are undone, the last first. A process that is killed in between
leaves what it had done; the next plan continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from nvml.errors import NvmlError, NvmlHalf
from nvml.messages import MigInstanceFacts, MigReply
from vgpu.api.errors import TangramError
from vgpu.api.mig import MigSlot, MigTable, nvidia_form
from vgpu.api.mig_tables import model_of
from vgpu.mig.plan import GpuPlan


class NotCarriedOut(TangramError):
    """The driver refused a step. The layout is as before, or the text names what is not."""


class MigCalls(Protocol):
    """What is called of NVML. Each raises NvmlError."""

    def set_mig_mode(self, uuid: str, on: bool) -> bool: ...
    def create_mig(self, uuid: str, profile: int, start: int) -> MigInstanceFacts: ...
    def destroy_mig(self, uuid: str, instance: int) -> None: ...


Tables = Callable[[str], MigTable]
"""The table of the GPU with this UUID, as its driver reports it now."""


class _Changes:
    def __init__(self, nvml: MigCalls, tables: Tables) -> None:
        self._nvml, self._tables = nvml, tables
        self._undo: list[tuple[str, Callable[[], object]]] = []

    def carry_out(self, plan: GpuPlan) -> None:
        uuid = plan.uuid
        for one in plan.destroy:
            self._nvml.destroy_mig(uuid, one.number)
            if one.complete:
                self._note(f"{_slot(one.slot)} of GPU {plan.index} is destroyed", self._creating(uuid, one.slot))
        if plan.mode is not None:
            active = self._nvml.set_mig_mode(uuid, plan.mode)
            before = not plan.mode
            self._note(f"MIG mode of GPU {plan.index} is changed", lambda: self._mode_back(uuid, before))
            if not active:
                raise NvmlError(
                    f"GPU {plan.index}: MIG mode would change only with a reset of the GPU. Stop every program that uses the driver, the device plugin included"
                )
        for slot in plan.create:
            made = self._create(uuid, slot)
            self._note(f"{_slot(slot)} of GPU {plan.index} is created", self._destroying(uuid, made.number))

    def undo(self) -> list[str]:
        """What could not be undone, for a person."""
        left = []
        for what, undo in reversed(self._undo):
            try:
                undo()
            except NvmlError as error:
                left.append(f"{what} ({error})")
        return left

    def _note(self, what: str, undo: Callable[[], object]) -> None:
        self._undo.append((what, undo))

    def _create(self, uuid: str, slot: MigSlot) -> MigInstanceFacts:
        profile = self._tables(uuid).by_name.get(slot.profile)
        if profile is None:
            raise NvmlError(f"GPU {uuid}: its driver has no MIG profile {nvidia_form(slot.profile)}")
        return self._nvml.create_mig(uuid, profile.number, slot.start)

    def _creating(self, uuid: str, slot: MigSlot) -> Callable[[], object]:
        return lambda: self._create(uuid, slot)

    def _destroying(self, uuid: str, number: int) -> Callable[[], object]:
        return lambda: self._nvml.destroy_mig(uuid, number)

    def _mode_back(self, uuid: str, on: bool) -> None:
        if not self._nvml.set_mig_mode(uuid, on):
            raise NvmlError("it changes back with a reset of the GPU")


def table_of(facts: MigReply) -> MigTable:
    """The driver's own; while MIG mode is off it reports no placements, and the model's documented ones stand in."""
    model = model_of(facts.model)
    return MigTable.of(facts.profiles) if facts.profiles or model is None else model.table


def carry_out(plans: Iterable[GpuPlan], nvml: MigCalls, tables: Tables) -> None:
    """Every plan, or none. None of them may be refused. Raises NotCarriedOut."""
    changes = _Changes(nvml, tables)
    try:
        for plan in plans:
            changes.carry_out(plan)
    except (NvmlError, KeyboardInterrupt) as error:
        left = changes.undo()
        why = str(error) or "interrupted"
        if isinstance(error, NvmlHalf):
            left.append("what of this instance is there: the next plan of this GPU removes it")
        after = "the layout is as before" if not left else "these could not be undone: " + "; ".join(left)
        raise NotCarriedOut(f"{why}; {after}") from None


def _slot(slot: MigSlot) -> str:
    return f"{nvidia_form(slot.profile)} at slice {slot.start}"
