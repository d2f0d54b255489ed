"""`tangramctl mig plan | apply | assert | export`: the MIG layout of this machine's GPUs against a file in the format of mig-parted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvml.errors import NvmlError
from nvml.messages import MigReply
from nvml.mig_changes import table_of
from nvml.queries import Nvml
from nvml.supervisor import TimeLimits, supervised
from tangramctl.errors import BadOption, CommandError, NoGpu
from tangramctl.kubelet_devices import given_to_pods
from tangramctl.mig_changes import carry_out
from vgpu.api.mig import MigSlot, nvidia_form
from vgpu.mig.config import LARGEST_BYTES, BadMigFile, MigConfig, MigEntry, read
from vgpu.mig.plan import GpuInstance, GpuPlan, GpuState, differences, plan

CALL_S: Final = 60.0
"""MIG mode resets a GPU. Guessed: some seconds each, more with many GPUs on one board."""


class LayoutRefused(CommandError):
    """The layout cannot be had now; nothing was changed."""

    code = 75


@dataclass(frozen=True, slots=True)
class Where:
    """The machine that is meant."""

    driver_root: Path = Path("/")
    checkpoint: Path | None = None
    """The kubelet's; None = pods do not matter."""


def show_plan(file: Path, name: str, where: Where) -> None:
    """Print what `apply` would do. Raises LayoutRefused, BadOption, NoGpu."""
    with _opened(where) as machine:
        for one in machine.plans(file, name):
            print("\n".join(_lines(one)))


def apply(file: Path, name: str, where: Where) -> None:
    """Make the layout so, on every GPU or on none. Raises LayoutRefused, MigFailed, BadOption, NoGpu."""
    with _opened(where) as machine:
        plans = [one for one in machine.plans(file, name) if one.changes]
        carry_out(plans, machine.nvml, lambda uuid: table_of(machine.nvml.mig(uuid)))
        for one in plans:
            print("\n".join(_lines(one)))
        if not plans:
            print("nothing to do")


def check(file: Path, name: str, where: Where) -> bool:
    """Print what differs; True when nothing does. Raises BadOption, NoGpu."""
    with _opened(where) as machine:
        wrong = [
            sentence
            for state, entry in machine.wanted(_config(file, name, machine.states))
            for sentence in differences(state, entry.mig, entry.counts)
        ]
    print("\n".join(wrong) if wrong else "the layout is as the file has it")
    return not wrong


def export(name: str, where: Where) -> None:
    """Print a file that `apply` reads, with the layout that is there. Raises NoGpu, LayoutRefused."""
    with _opened(where) as machine:
        print(written(machine.states, name), end="")


def written(states: Sequence[GpuState], name: str) -> str:
    """A file with one layout: as these GPUs are. Raises LayoutRefused for instances that the format cannot describe."""
    for state in states:
        for one in state.instances:
            if not one.complete:
                raise LayoutRefused(
                    f"GPU {state.index}: GPU instance {one.number} has no compute instance as large as itself"
                )
    alike: dict[tuple[str, bool, tuple[tuple[str, int], ...]], list[int]] = {}
    for state in states:
        alike.setdefault((state.device_id, state.mig, tuple(sorted(state.counts.items()))), []).append(state.index)
    lines = ["version: v1", "mig-configs:", f"  {json.dumps(name)}:"]
    for (_, mig, counts), indices in alike.items():
        lines += [
            f"    - devices: [{', '.join(map(str, indices))}]",
            f"      mig-enabled: {'true' if mig else 'false'}",
        ]
        if mig:
            lines.append("      mig-devices:" + ("" if counts else " {}"))
            lines += [f'        "{nvidia_form(profile)}": {count}' for profile, count in counts]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Machine:
    nvml: Nvml
    states: tuple[GpuState, ...]

    def plans(self, file: Path, name: str) -> list[GpuPlan]:
        """One for each GPU that the layout speaks of. Raises LayoutRefused, with every reason."""
        found = [plan(state, entry.mig, entry.counts) for state, entry in self.wanted(_config(file, name, self.states))]
        refused = [one.refused for one in found if one.refused]
        if refused:
            raise LayoutRefused("nothing was changed: " + "; ".join(refused))
        return found

    def wanted(self, config: MigConfig) -> Iterator[tuple[GpuState, MigEntry]]:
        try:
            entries = config.of_gpus({state.index: state.device_id for state in self.states})
        except BadMigFile as error:
            raise BadOption(str(error)) from None
        return ((state, entries[state.index]) for state in self.states if state.index in entries)


@contextmanager
def _opened(where: Where) -> Iterator[_Machine]:
    try:
        with supervised(where.driver_root, TimeLimits(call_s=CALL_S)) as nvml:
            gpus = [nvml.gpu_at(index) for index in range(nvml.count().count)]
            if not gpus:
                raise NoGpu("the NVIDIA driver is here and has no GPU")
            facts = [nvml.mig(gpu.uuid) for gpu in gpus]
            uuids = [uuid for one in facts for instance in one.instances for uuid in instance.uuids]
            every = (*uuids, *(gpu.uuid for gpu in gpus))
            pods = given_to_pods(where.checkpoint, every) if where.checkpoint is not None else {}
            states = tuple(_state(nvml, gpu.index, gpu.uuid, one, pods) for gpu, one in zip(gpus, facts, strict=True))
            yield _Machine(nvml, states)
    except NvmlError as error:
        raise NoGpu(f"MIG of this machine's GPUs cannot be had ({error})") from None


def _state(nvml: Nvml, index: int, uuid: str, facts: MigReply, pods: dict[str, str]) -> GpuState:
    table = table_of(facts)
    instances = tuple(
        GpuInstance(one.number, MigSlot(one.start, one.profile), _used(nvml, one.uuids, pods), one.complete)
        for one in sorted(facts.instances, key=lambda one: one.number)
    )
    in_use = "" if facts.mig else _used(nvml, (uuid,), pods)
    return GpuState(index, uuid, facts.device_id, facts.capable, facts.mig, facts.pending, table, instances, in_use)


def _used(nvml: Nvml, uuids: tuple[str, ...], pods: dict[str, str]) -> str:
    for uuid in uuids:
        if uuid in pods:
            return pods[uuid]
        processes = nvml.processes(uuid)
        if processes:
            return f"process {processes[0].pid}" + (f" and {len(processes) - 1} more" if processes[1:] else "")
    return ""


def _config(file: Path, name: str, states: Sequence[GpuState]) -> MigConfig:
    tables = [state.table for state in states]
    try:
        with file.open("rb") as opened:
            text = opened.read(LARGEST_BYTES + 1).decode()
        more = {profile.name for table in tables for profile in table.profiles}
        return read(text, str(file), more, tables).named(name)
    except OSError as error:
        raise BadOption(f"--file is {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadOption(f"--file is {file}: it must be a text in UTF-8") from None
    except BadMigFile as error:
        raise BadOption(str(error)) from None


def _lines(one: GpuPlan) -> list[str]:
    if not one.changes:
        return [f"GPU {one.index}: nothing to do"]
    lines = [
        f"GPU {one.index}: destroy {nvidia_form(i.slot.profile)} at slice {i.slot.start} (GPU instance {i.number})"
        for i in one.destroy
    ]
    if one.mode is not None:
        lines.append(f"GPU {one.index}: switch MIG mode {'on' if one.mode else 'off'}")
    return lines + [f"GPU {one.index}: create {nvidia_form(slot.profile)} at slice {slot.start}" for slot in one.create]
