"""What `tangramctl ps` shows: recorded runs, with their memory by the arbiters' status; pods of a cluster's node beside them.

An arbiter that does not answer costs its numbers (null, `?`) and a note, never the list.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from tangramctl import fake, service
from tangramctl.errors import Broken
from tangramctl.machine import StateRoot, default_root, found
from tangramctl.proc import called_by_kubectl
from tangramctl.records import Run, UnreadableRun, runs
from tangramctl.swapping import excess_of
from vgpu.api.enforcement import Limit, row_of
from vgpu.api.errors import BadDocument
from vgpu.protocol.status import (
    ContainerStatus,
    GpuTimeStatus,
    SensorStatus,
    StatusDocument,
    SwapStatus,
    UnenforcedStatus,
    UngrantedStatus,
    UnlistedStatus,
    decode_status,
)

VERSION: Final = 1
CLUSTER_SOCKET: Final = Path("/var/lib/tangram/arbiter/status.sock")
"""Of the arbiter of a cluster's node; root alone may read it."""
PODS_SEEN_BY: Final = "kubectl -n tangram-system exec ds/tangram-node -c arbiter -- tangramctl ps"
ANSWER_S: Final = 2.0
DOCUMENT_LIMIT: Final = 16 * 2**20


class GpuView(msgspec.Struct, frozen=True):
    """One GPU of a run or container. Bytes; None where no arbiter reports it."""

    uuid: str
    index: int | None
    model: str | None
    limit_bytes: int
    core_percent: int
    leased_bytes: int | None = None
    used_bytes: int | None = None
    context_bytes: int | None = None
    shared_bytes: int | None = None
    core_limit_percent: int = 0
    """Above `core_percent` where it may burst; 0 = no cap, or none that an arbiter reports."""
    guarantee_bytes: int | None = None
    """Below `limit_bytes` where it may burst; None = no arbiter reports it."""
    away_bytes: int = 0
    """The part of what is leased that is in host memory."""
    excess_bytes: int | None = None
    """What it has above its guarantee, on the GPU or in host memory; None = no arbiter reports it."""

    @property
    def bursts(self) -> bool:
        """Whether it may have more than its guarantee here."""
        return self.guarantee_bytes is not None and self.guarantee_bytes < self.limit_bytes


class ProcessView(msgspec.Struct, frozen=True):
    """A process that uses a GPU under the grant."""

    pid: int
    command: str
    used_bytes: int
    context_bytes: int


class RunView(msgspec.Struct, frozen=True, rename={"service_class": "class", "gpu_time": "turn"}):
    """A run, or a container of a pod."""

    kind: str
    """run or container"""
    key: str
    name: str
    """The user of a run; namespace/pod/container."""
    pid: int | None
    command: str
    started_unix: int | None
    service_class: str
    level: int
    over: bool
    fake: str | None
    """The description that its GPUs come from; None on real ones."""
    gpus: tuple[GpuView, ...]
    processes: tuple[ProcessView, ...] | None
    gpu_time: GpuTimeStatus | None = None
    """What it got of the GPU's time; None while none of its processes computes, or no arbiter reports it."""
    unenforced: tuple[UnenforcedStatus, ...] = ()
    """Limits that are not enforced, and why."""
    swap: SwapStatus | None = None
    """Of its memory above the guarantee; None where nothing may burst, or no arbiter reports it."""


class StateRootView(msgspec.Struct, frozen=True):
    """The document of `ps --json`."""

    entries: tuple[RunView, ...]
    notes: tuple[str, ...] = ()
    version: int = VERSION
    sensors: tuple[SensorStatus, ...] = ()
    """Of the GPUs that they share, by UUID; empty from an arbiter that reports none."""


def seen_at(state: Path | None) -> StateRootView:
    """`read_view` of a state folder; None = this user's own. If it shows nothing, the notes name the other places. Raises Broken."""
    root = state or default_root()
    machine = found(root)
    view = read_view(machine, CLUSTER_SOCKET)
    notes = []
    if machine is None and state is not None:
        notes.append(f"there is no state folder {root.absolute()}: nothing has run with it")
    if called_by_kubectl() and not os.access(CLUSTER_SOCKET, os.W_OK):
        notes.append(f"only runs of this machine are seen here; the pods of one node: {PODS_SEEN_BY}")
    return msgspec.structs.replace(view, notes=(*view.notes, *notes))


def read_view(machine: StateRoot | None, cluster_socket: Path = CLUSTER_SOCKET) -> StateRootView:
    """Everything that has a share here. Starts an arbiter for runs that lost theirs. Raises Broken.

    `machine` is None where nothing ever ran.
    """
    entries: list[RunView] = []
    notes: list[str] = []
    sensors: dict[str, SensorStatus] = {}
    for place, described in fake.all_of(machine):
        there, note, shown = _of_machine(place, described)
        entries += there
        notes += note
        sensors |= {one.uuid: one for one in shown}
    if os.access(cluster_socket, os.W_OK):
        try:
            reported = requested(cluster_socket)
            entries += map(_container, reported.containers)
            notes += map(ungranted_note, reported.ungranted)
            notes += map(unlisted_note, reported.unlisted)
            sensors |= {one.uuid: one for one in reported.sensors}
        except (OSError, BadDocument) as error:
            notes.append(f"the node's arbiter at {cluster_socket} does not list pods: {error}")
    notes += map(_not_held, filter(_reports_nothing, entries))
    return StateRootView(tuple(entries), tuple(notes), sensors=tuple(sensors[uuid] for uuid in sorted(sensors)))


def _reports_nothing(entry: RunView) -> bool:
    """It requested a part of a GPU's time and has a context, and no arbiter knows of channels of its processes."""
    return (
        entry.gpu_time is None
        and not entry.unenforced
        and any(gpu.core_percent and gpu.context_bytes for gpu in entry.gpus)
    )


def _not_held(entry: RunView) -> str:
    percent = max(gpu.core_percent for gpu in entry.gpus)
    return f"{entry.name} requested {percent} % of a GPU's time and is not limited to it: none of its processes has reported its channels yet (docs/operations/gpu-time.md)"


def why_unenforced(name: str, found: Iterable[UnenforcedStatus]) -> list[str]:
    """A sentence for each reason. One of a later arbiter has no row here."""
    rows = ((one, row_of(one.reason)) for one in found)
    return [
        f"! {name}: {' and '.join(one.limits)} not enforced ({one.reason}): "
        + (row.means if row is not None else "a reason of a later version")
        for one, row in rows
    ]


def ungranted_note(found: UngrantedStatus) -> str:
    """The note on a process whose memory no limit counts."""
    held = "memory" if found.held_bytes is None else f"{found.held_bytes // 2**20} MiB"
    where = f" of pod {found.pod}" if found.pod else ""
    name = found.command or "of unknown name"
    return f"! process {found.pid} ({name}){where} uses {held} of {found.gpu} and belongs to no grant there"


def unlisted_note(found: UnlistedStatus) -> str:
    """The note on memory for which no process is named."""
    processes = ", ".join(map(str, found.pids))
    may = f"; {found.pod}/{found.container} may use them (processes {processes})" if found.pod else ""
    return f"! {found.held_bytes // 2**20} MiB of {found.gpu} are in use and NVML lists them for no process: no limit counts them{may}"


def unenforced_limit(limit: Limit, found: Iterable[UnenforcedStatus]) -> bool:
    """Is this one of those that are not enforced?"""
    return any(limit in one.limits for one in found)


def _of_machine(machine: StateRoot, described: str | None) -> tuple[list[RunView], list[str], tuple[SensorStatus, ...]]:
    with machine.locked():
        there = runs(machine)
    if not there:
        return [], [], ()
    notes = [run.why for run in there if isinstance(run, UnreadableRun)]
    reported: dict[str, ContainerStatus] = {}
    sensors: tuple[SensorStatus, ...] = ()
    try:
        service.await_socket(machine, machine.status_socket, service.IDLE_S)
        status = requested(machine.status_socket)
        reported = {one.key: one for one in status.containers}
        notes += map(ungranted_note, status.ungranted)
        notes += map(unlisted_note, status.unlisted)
        sensors = status.sensors
    except (OSError, BadDocument, Broken) as error:
        notes.append(f"the arbiter of {machine.root} does not report what is used: {error}")
    return [_run(run, reported.get(run.key), described) for run in there], notes, sensors


def requested(path: Path) -> StatusDocument:
    """The status document of the arbiter behind a socket. Raises OSError, BadDocument."""
    received = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        sock.connect(str(path))
        while part := sock.recv(65536):
            received += part
            if len(received) > DOCUMENT_LIMIT:
                raise BadDocument(f"status document has more than {DOCUMENT_LIMIT} bytes")
    return decode_status(bytes(received))


def _run(run: Run, status: ContainerStatus | None, described: str | None) -> RunView:
    gpus = {gpu.uuid: gpu for gpu in status.gpus} if status is not None else {}
    reported = gpus.get(run.uuid)
    gpu = GpuView(
        uuid=run.uuid,
        index=None if isinstance(run, UnreadableRun) else run.index,
        model=None if isinstance(run, UnreadableRun) else run.model,
        limit_bytes=reported.limit_bytes if reported else run.mib * 2**20,
        core_percent=run.core_percent,
        leased_bytes=reported.leased_bytes if reported else None,
        used_bytes=reported.used_bytes if reported else None,
        context_bytes=reported.context_bytes if reported else None,
        shared_bytes=reported.shared_bytes if reported else None,
        core_limit_percent=reported.core_limit_percent if reported else 0,
        guarantee_bytes=reported.guarantee_bytes if reported else None,
        away_bytes=reported.away_bytes if reported else 0,
        excess_bytes=excess_of(reported) if reported else None,
    )
    return RunView(
        kind="run",
        key=run.key,
        name=run.user,
        pid=run.pid,
        command=run.name,
        started_unix=run.started_unix,
        service_class=run.service_class,
        level=run.level,
        over=status.over if status else False,
        fake=described,
        gpus=(gpu,),
        processes=_processes(status) if status else None,
        gpu_time=status.gpu_time if status else None,
        unenforced=status.unenforced if status else (),
        swap=status.swap if status else None,
    )


def _container(status: ContainerStatus) -> RunView:
    gpus = tuple(
        GpuView(
            uuid=gpu.uuid,
            index=None,
            model=None,
            limit_bytes=gpu.limit_bytes,
            core_percent=gpu.core_percent,
            leased_bytes=gpu.leased_bytes,
            used_bytes=gpu.used_bytes,
            context_bytes=gpu.context_bytes,
            shared_bytes=gpu.shared_bytes,
            core_limit_percent=gpu.core_limit_percent,
            guarantee_bytes=gpu.guarantee_bytes,
            away_bytes=gpu.away_bytes,
            excess_bytes=excess_of(gpu),
        )
        for gpu in status.gpus
    )
    return RunView(
        kind="container",
        key=status.key,
        name=f"{status.pod}/{status.container}",
        pid=None,
        command=status.processes[0].command if status.processes else "",
        started_unix=None,
        service_class=status.service_class,
        level=status.level,
        over=status.over,
        fake=None,
        gpus=gpus,
        processes=_processes(status),
        gpu_time=status.gpu_time,
        unenforced=status.unenforced,
        swap=status.swap,
    )


def _processes(status: ContainerStatus) -> tuple[ProcessView, ...]:
    return tuple(
        ProcessView(
            process.pid,
            process.command,
            sum(gpu.used_bytes for gpu in process.gpus),
            sum(gpu.context_bytes for gpu in process.gpus),
        )
        for process in status.processes
    )


def encode(view: StateRootView) -> bytes:
    """As `ps --json` prints it."""
    return msgspec.json.format(msgspec.json.encode(view), indent=2)
