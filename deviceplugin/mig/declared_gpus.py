"""What the node's GPUs are, as a declared MIG configuration needs to know it: read through NVML, with who uses what. Called in threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deviceplugin.mig.device_users import Users
from nvml.errors import NvmlError
from nvml.messages import MigInstanceFacts, MigReply, ProcessesReply
from nvml.mig_changes import table_of
from vgpu.api.inventory import Gpu
from vgpu.api.mig import MigSlot
from vgpu.mig.config import LARGEST_BYTES, BadMigFile, MigConfig, MigEntry, read
from vgpu.mig.declared import beside_on_demand
from vgpu.mig.plan import GpuInstance, GpuState

SlotsOf = Callable[[str], Collection[MigSlot]]
"""GPU's UUID -> slots of MIG on demand there."""


class MigNvml(Protocol):
    """Of `nvml.queries.Nvml`. Each raises NvmlError."""

    def mig(self, uuid: str, *, brief: bool = False) -> MigReply: ...

    def create_mig(self, uuid: str, profile: int, start: int) -> MigInstanceFacts: ...

    def destroy_mig(self, uuid: str, instance: int) -> None: ...

    def set_mig_mode(self, uuid: str, on: bool) -> bool: ...

    def held_of(self, uuids: Collection[str]) -> Mapping[str, ProcessesReply | NvmlError]: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """A GPU as NVML reports it."""

    gpu: Gpu
    facts: MigReply
    state: GpuState
    unread: str = ""
    """Why nothing is known about it, for a person; empty where it was read."""

    def shown_as(self, gpu: Gpu, *, instances: bool) -> bool:
        """Does a probe show the same MIG mode, and, if these matter, the same instances?"""
        there = {uuid for one in self.facts.instances if one.complete for uuid in one.uuids}
        return gpu.mig == self.facts.mig and (not instances or {one.uuid for one in gpu.instances} == there)


def see(nvml: MigNvml, gpus: Sequence[Gpu], users: Users, out: Collection[str]) -> list[Seen]:
    """`out`: GPUs that are not to be touched, by UUID: they may be silent. Raises NvmlError where another one is: then nothing is known to be free."""
    found = []
    for gpu in gpus:
        try:
            facts = nvml.mig(gpu.uuid)
            found.append(Seen(gpu, facts, _state(gpu, facts, users, _processes(nvml, gpu, facts))))
        except NvmlError as error:
            if gpu.uuid not in out:
                raise
            silent = MigReply("", gpu.model)
            found.append(
                Seen(
                    gpu,
                    silent,
                    GpuState(gpu.index, gpu.uuid, "", False, gpu.mig, gpu.mig, table_of(silent)),
                    str(error),
                )
            )
    return found


def glance(nvml: MigNvml, uuids: Sequence[str]) -> tuple[MigReply | str, ...]:
    """Of each GPU, what differs where its MIG mode or instances changed; why it cannot be read."""
    found: list[MigReply | str] = []
    for uuid in uuids:
        try:
            found.append(nvml.mig(uuid, brief=True))
        except NvmlError as error:
            found.append(str(error))
    return tuple(found)


def _processes(nvml: MigNvml, gpu: Gpu, facts: MigReply) -> Mapping[str, ProcessesReply | NvmlError]:
    uuids = [uuid for one in facts.instances for uuid in one.uuids] if facts.mig else [gpu.uuid]
    return nvml.held_of(uuids) if uuids else {}


def _state(gpu: Gpu, facts: MigReply, users: Users, processes: Mapping[str, ProcessesReply | NvmlError]) -> GpuState:
    instances = tuple(
        GpuInstance(
            one.number,
            MigSlot(one.start, one.profile),
            next(filter(None, (users.of_instance(uuid) or _process(processes[uuid]) for uuid in one.uuids)), ""),
            one.complete,
        )
        for one in sorted(facts.instances, key=lambda one: one.number)
    )
    in_use = "" if facts.mig else users.of_gpu(gpu.uuid) or _process(processes[gpu.uuid])
    return GpuState(
        gpu.index, gpu.uuid, facts.device_id, facts.capable, facts.mig, facts.pending, table_of(facts), instances, in_use
    )  # fmt: skip


def _process(reply: ProcessesReply | NvmlError) -> str:
    """Raises NvmlError."""
    if isinstance(reply, NvmlError):
        raise reply
    return f"process {reply.processes[0].pid}" if reply.processes else ""


def configuration(path: Path, name: str, seen: Sequence[Seen]) -> MigConfig:
    """The configuration of this name. Raises BadMigFile."""
    tables = [one.state.table for one in seen]
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1).decode()
    except OSError as error:
        raise BadMigFile(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadMigFile(f"{path}: it must be a text in UTF-8") from None
    return read(text, str(path), {one.name for table in tables for one in table.profiles}, tables).named(name)


def wanted(
    config: MigConfig, seen: Sequence[Seen], slots: SlotsOf, *, on_demand: bool
) -> list[tuple[GpuState, MigEntry]]:
    """GPUs that the configuration speaks of and that were read, and what each should have. `on_demand`: does the node make instances on demand? Raises BadMigFile."""
    entries = config.of_gpus({one.state.index: one.state.device_id for one in seen})
    return [
        (beside_on_demand(one.state, entry, slots(one.state.uuid), enabled=on_demand), entry)
        for one in seen
        if not one.unread and (entry := entries.get(one.state.index)) is not None
    ]
