"""Containers over their limit in the arbiter's status, as sentences for Events. Pure.

Also of limits that are not enforced, of work that is not reported, and of memory that belongs to no grant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kube.objects import Pod
from vgpu.api.enforcement import row_of
from vgpu.protocol.status import (
    BypassStatus,
    ContainerStatus,
    GpuStatus,
    GpuTimeStatus,
    KillStatus,
    ProcessGpu,
    ProcessStatus,
    StatusDocument,
    SwapStatus,
    UngrantedStatus,
    UnlistedStatus,
)

MIB: Final = 2**20
PIDS_NAMED: Final = 8
"""In an Event."""
COMMAND_LIMIT: Final = 80
"""Characters of a command line in an Event."""

REASON: Final = "OverMemoryLimit"
BYPASSED: Final = "LimitBypassed"
UNGRANTED: Final = "UngrantedMemory"
UNLISTED: Final = "UnlistedMemory"
STRANDED: Final = "MemoryStranded"
KILL: Final = "kill"
EVICT: Final = "evict"
NOTICES: Final = {
    "UnreportedWork": (
        "container {} uses the GPU while its processes report that they are idle; where the arbiter's cap-unreported is on, that counts as "
        "best-effort work, and from its gpu-core"
    ),
    "StoppedByAnother": (
        "the GPU work of container {} seems to be stopped again and again by something other than the arbiter; it is started again "
        "within a second each time"
    ),
}
"""What is found out about a container's GPU time: the Event's reason, and the sentence for a person."""
_FOLLOWS: Final = {
    "evict": "the pod is deleted",
    "kill": "the process that does it is killed",
    "report": "nothing more is done",
}

_WHOLE: Final = ", and with it all processes of the container, which starts such processes again and again"
UNENFORCED: Final = "LimitNotEnforced"
POOL_FULL: Final = "HostPoolFull"


@dataclass(frozen=True, slots=True)
class LimitViolation:
    """A container that is over its limit, or whose memory cannot come back."""

    uid: str
    container: str
    policy: str
    """What follows: report, evict or kill; of memory that cannot come back: evict or keep."""
    note: str
    """The sentence for a person."""
    reason: str = REASON
    """Of the Event."""
    killed: bool = False
    """A process of it was killed for that."""

    @property
    def series(self) -> str:
        """Offences of a container with the same reason and series are counted on one Event: a program may start process after process."""
        return "killed" if self.killed else self.policy


def limit_violations(status: StatusDocument) -> list[LimitViolation]:
    """Every container that the arbiter found over its limit, and every one that is over it by a way around the library, or because it does not
    give way; and every one whose memory cannot come back. A kill is reported as such."""
    over = [LimitViolation(c.uid, c.container, c.over_limit_action, _note(c)) for c in status.containers if c.over]
    return (
        over
        + [
            LimitViolation(c.uid, c.container, one.policy, _bypass_note(c, one), BYPASSED)
            for c in status.containers
            for one in c.bypasses
            if one.policy != KILL
        ]
        + [violation for c in status.containers if c.swap is not None for violation in _of_swapping(c, c.swap)]
    )


def _of_swapping(found: ContainerStatus, swap: SwapStatus) -> Iterator[LimitViolation]:
    """A container that does not give way, and one whose memory cannot come back."""
    if swap.over_limit:
        action = swap.over_limit_action
        follows = "its processes are killed" if action == KILL else _FOLLOWS["report"]
        note = f"container {found.container} {swap.over_limit}; {_sizes(found)}burst.overLimit {action}: {follows}"
        yield LimitViolation(found.uid, found.container, action, note)
    if swap.stranded:
        action = swap.stranded_action
        follows = "the pod is evicted, as its disruption budgets allow" if action == EVICT else "it waits"
        note = (
            f"memory of container {found.container} cannot come back from host memory: {swap.stranded}; "
            f"{_sizes(found)}burst.stranded {action}: {follows}"
        )
        yield LimitViolation(found.uid, found.container, action, note, STRANDED)


def not_evicted_note(message: str, *, again: bool) -> str:
    """The sentence for a person. `message`: the API server's. `again`: it is tried again."""
    if not again:
        return f"the pod could not be evicted, and that is not tried again: {message}"
    return f"the pod is not evicted yet: {message.rstrip('.')}. The eviction is tried again until it is allowed, or until the memory has come back"


def _sizes(found: ContainerStatus) -> str:
    """Of the GPU on which it is furthest above its guarantee."""
    above = [(gpu.leased_bytes - gpu.guarantee_bytes, gpu) for gpu in found.gpus if gpu.guarantee_bytes is not None]
    if not above:
        return ""
    _, gpu = max(above, key=lambda one: one[0])
    return (
        f"it has {gpu.leased_bytes // MIB} MiB of {gpu.uuid}, {gpu.away_bytes // MIB} MiB of it in host memory, and its guarantee is "
        f"{(gpu.guarantee_bytes or 0) // MIB} MiB; "
    )


def _bypass_note(found: ContainerStatus, one: BypassStatus) -> str:
    commands = {process.pid: process.command for process in found.processes}
    pid = one.pids[0] if one.pids else 0
    command = commands.get(pid, "")[:COMMAND_LIMIT] or "of unknown name"
    follows = _FOLLOWS["evict"] if one.policy == "evict" else "it is reported"
    return (
        f"container {found.container} uses {one.held_bytes // MIB} MiB of {one.gpu} and was granted {one.limit_bytes // MIB} MiB; "
        f"process {pid} ({command}) goes around the library; arbiter.bypass: {follows}"
    )


def _note(found: ContainerStatus) -> str:
    follows = f"policy {found.over_limit_action}: {_FOLLOWS.get(found.over_limit_action, 'nothing more is done')}"
    held = {gpu.uuid: sum(_held(part) for _, part in _on(found.processes, gpu)) for gpu in found.gpus}
    worst = max(found.gpus, key=lambda gpu: held[gpu.uuid] - gpu.limit_bytes, default=None)
    if worst is None:
        return f"container {found.container} uses more GPU memory than it was granted; {follows}"
    text = (
        f"container {found.container} uses {held[worst.uuid] // MIB} MiB of {worst.uuid} and was granted "
        f"{worst.limit_bytes // MIB} MiB"
    )
    largest = max(_on(found.processes, worst), key=lambda pair: _held(pair[1]), default=None)
    if largest is not None:
        process, part = largest
        command = process.command[:COMMAND_LIMIT] or "of unknown name"
        text += f", {_held(part) // MIB} MiB of it by process {process.pid} ({command})"
    return f"{text}; {follows}"


def _on(processes: Iterable[ProcessStatus], gpu: GpuStatus) -> list[tuple[ProcessStatus, ProcessGpu]]:
    return [(process, part) for process in processes for part in process.gpus if part.uuid == gpu.uuid]


def _held(part: ProcessGpu) -> int:
    """Bytes: measured by NVML, else as the arbiter counts."""
    return part.used_bytes + part.context_bytes if part.measured_bytes is None else part.measured_bytes


def kill_violation(kill: KillStatus) -> LimitViolation:
    """The Event's text for a kill."""
    if kill.reason:
        note = (
            f"container {kill.container} {kill.reason}; it had {kill.held_bytes // MIB} MiB of {kill.gpu}, and its guarantee is "
            f"{kill.limit_bytes // MIB} MiB; burst.overLimit kill: its processes were killed"
        )
        return LimitViolation(kill.uid, kill.container, KILL, note, killed=True)
    note = (
        f"container {kill.container} held {kill.held_bytes // MIB} MiB of {kill.gpu} and was granted "
        f"{kill.limit_bytes // MIB} MiB; {'arbiter.bypass' if kill.bypass else 'policy'} kill: process {kill.pid} "
        f"({kill.command[:COMMAND_LIMIT] or 'of unknown name'}) {'went around the library and ' * kill.bypass}was killed"
        f"{_WHOLE * kill.whole}"
    )
    return LimitViolation(kill.uid, kill.container, KILL, note, BYPASSED if kill.bypass else REASON, killed=True)


def ungranted_notes(found: Iterable[UngrantedStatus], pod: Callable[[str], Pod | None]) -> dict[str, str]:
    """GPU -> the sentence for a person."""
    of_gpu: dict[str, list[UngrantedStatus]] = {}
    for one in found:
        of_gpu.setdefault(one.gpu, []).append(one)
    return {gpu: _ungranted_note(gpu, processes, pod) for gpu, processes in of_gpu.items()}


def _ungranted_note(gpu: str, processes: list[UngrantedStatus], pod: Callable[[str], Pod | None]) -> str:
    worst = max(processes, key=lambda one: (one.held_bytes or 0, -one.pid))
    known = pod(worst.pod) if worst.pod else None
    where = f" of pod {known.key if known is not None else worst.pod}" if worst.pod else ""
    held = f"{(worst.held_bytes or 0) // MIB} MiB" if worst.held_bytes is not None else "memory"
    others = f"; {len(processes) - 1} more do so" if len(processes) > 1 else ""
    return (
        f"process {worst.pid} ({worst.command[:COMMAND_LIMIT] or 'of unknown name'}){where} uses {held} of {gpu}, which containers share, and "
        f"belongs to no grant there: no limit counts it{others}"
    )


def unlisted_note(found: UnlistedStatus) -> str:
    """The sentence for a person."""
    return (
        f"{found.held_bytes // MIB} MiB of {found.gpu}, which containers share, are in use and NVML lists them for no process: no limit counts "
        f"them, and a program may have taken them without CUDA; {found.used_bytes // MIB} MiB are in use in all"
        + (f"; container {found.container} of pod {found.pod} may use them: {_suspicion(found)}" if found.pod else "")
    )


def _suspicion(found: UnlistedStatus) -> str:
    return (
        f"it alone has processes there ({', '.join(map(str, found.pids[:PIDS_NAMED]))}) that have a GPU open and that NVML lists nowhere, "
        "which is no proof"
    )


def notices(gpu_time: GpuTimeStatus | None) -> list[str]:
    """Which of `NOTICES` apply."""
    if gpu_time is None:
        return []
    shown = {"UnreportedWork": gpu_time.unreported, "StoppedByAnother": gpu_time.stopped}
    return [reason for reason in NOTICES if shown[reason]]


def pool_full_note(found: ContainerStatus) -> str:
    """The sentence for a person; empty: none of its requests waits for room in the host pool."""
    if found.swap is None or not found.swap.pool_full:
        return ""
    return f"requests of container {found.container} for memory above its guarantee wait: {found.swap.pool_full}"


def unenforced_note(container: str, reason: str, limits: Iterable[str]) -> str:
    """The sentence for a person. A reason of a later arbiter has no row here."""
    row = row_of(reason)
    reported = (
        f"{row.means} {row.do}" if row is not None else "This version does not know the reason; see the arbiter's log."
    )
    return f"the limit of {' and '.join(limits)} of container {container} is not enforced ({reason}): {reported}"
