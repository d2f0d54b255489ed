"""The state of a container's limits: enforced, refused, or unenforced for a reason. There is no fourth.

A limit (GPU memory, GPU time) is `enforced` where no reason is known against it, `refused` where no process gets any of the resource,
and `unenforced` where a process uses the GPU and a reason of the table below applies. The state is a function of what is known
now and of nothing else: a reason ends when its cause does. docs/reference/enforcement.md is this table for users.

Units: seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

NO_CHANNELS_S: Final = 2.0
"""A process that has had a context for so long has reported its channels, if it can. Specified."""
SILENT_S: Final = 2.0
"""A recall is answered within milliseconds; a process that has not answered for so long never will. Guessed."""
STALLED_S: Final = 2.0
"""The thread of a GPU comes round five times a second; its containers resume themselves after 0.6 s. Guessed."""
STALE_S: Final = 3.0
"""NVML is read each second; an older answer does not describe the present. Specified."""

STALL_SHOWN_S: Final = 5.0
"""A stall that is over is reported for so long: no client was answered while it lasted. Guessed: the device plugin reads the status every 0.8 s, and what was
not enforced meanwhile is even with the share again after three frames."""

GATED_POINTS: Final[Mapping[int, float]] = {580: 3.0}
"""By driver branch: by how many percentage points of the GPU's time launch gating missed a gpu-core at most, for one GPU on which the
trial shows that suspends do not work. Measured: bench/gpu_time/gated.csv."""
GATED_EXACT_POINTS: Final = 5.0
"""Gating that misses by no more enforces a gpu-core. Specified."""


class Limit(StrEnum):
    """What a share limits."""

    MEMORY = "memory"
    GPU_TIME = "gpu-time"


class LimitState(StrEnum):
    """Of one limit of one container."""

    ENFORCED = "enforced"
    REFUSED = "refused"
    UNENFORCED = "unenforced"


class Reason(StrEnum):
    """Why a limit is not enforced."""

    NO_THREAD = "no-thread"
    NO_CHANNELS = "no-channels"
    GRAPHICS = "graphics"
    UNKNOWN_FUNCTION = "unknown-function"
    CHANNELS_UNLISTED = "channels-unlisted"
    NO_UUID = "no-uuid"
    NO_PAGE = "no-page"
    GATED = "gated"
    MPS = "mps"
    UNKNOWN_DRIVER = "unknown-driver"
    NO_SUSPEND = "no-suspend"
    SILENT_PROCESS = "silent-process"
    UNCONNECTED = "unconnected"
    BYPASSING = "bypassing"
    UNATTRIBUTED = "unattributed"
    ARBITER_STALLED = "arbiter-stalled"
    NVML = "nvml"
    OVER_LIMIT = "over-limit"
    UNKNOWN_REASON = "unknown-reason"


@dataclass(frozen=True, slots=True)
class ReasonText:
    """What a reason concerns, what it means and what to do, as sentences for the operator."""

    limits: frozenset[Limit]
    means: str
    do: str


_MEMORY: Final = frozenset({Limit.MEMORY})
_TIME: Final = frozenset({Limit.GPU_TIME})

ALL: Final = tuple(Reason)
"""In the order in which they are reported. An enumeration takes longer to walk, and each container is judged each second."""

TABLE: Final[Mapping[Reason, ReasonText]] = {
    Reason.NO_THREAD: ReasonText(
        _TIME,
        "A process could not start the library's helper thread, so the arbiter never suspends it.",
        "Raise the pod's pids limit, or reduce the program's thread-local storage.",
    ),
    Reason.NO_CHANNELS: ReasonText(
        _TIME,
        "A process has a CUDA context and reported no channels within 2 s, so the arbiter cannot suspend it.",
        "Compare the driver version with the support matrix, and start the program again.",
    ),
    Reason.GRAPHICS: ReasonText(
        _MEMORY,
        "A process uses a graphics API, whose own GPU memory is not counted.",
        "Give programs that draw a whole GPU.",
    ),
    Reason.UNKNOWN_FUNCTION: ReasonText(
        _MEMORY | _TIME,
        "The driver has a function that allocates memory or launches work and that the library does not know, or lacks one that it needs to count memory.",
        "Install a version of Tangram that supports this driver.",
    ),
    Reason.CHANNELS_UNLISTED: ReasonText(
        _TIME,
        "A process has more than 64 channels on a GPU, or its channels cannot be followed, so the arbiter cannot suspend it.",
        "Use fewer CUDA contexts and streams in one process.",
    ),
    Reason.NO_UUID: ReasonText(
        _TIME,
        "The driver does not name the GPU of a process's channels, so the arbiter cannot suspend them.",
        "Compare the driver version with the support matrix.",
    ),
    Reason.NO_PAGE: ReasonText(
        _TIME,
        "A process had no file descriptor left when the arbiter restarted, so its kernel launches do not wait where the arbiter delays them.",
        "Raise the limit of open files, or close some; the library then connects anew within a second.",
    ),
    Reason.GATED: ReasonText(
        _TIME,
        "The arbiter delays the container's kernel launches instead of suspending it; its gpu-core is not exact, and a best-effort container yields late.",
        "Look for another reason of the same container, which shows why it cannot be suspended.",
    ),
    Reason.MPS: ReasonText(
        _TIME,
        "The MPS server runs the container's work and owns its channels, so the arbiter cannot suspend it.",
        "Stop the MPS server on nodes whose GPUs are shared.",
    ),
    Reason.UNKNOWN_DRIVER: ReasonText(
        _TIME,
        "This driver version is not known, and the trial of suspending could not run, so the arbiter does not suspend.",
        "Install a known driver; the arbiter's log shows why the trial could not run.",
    ),
    Reason.NO_SUSPEND: ReasonText(
        _TIME,
        "The trial of suspending failed on this driver and GPU model, so the arbiter does not suspend.",
        "Install another driver; the arbiter's log shows the result of the trial.",
    ),
    Reason.SILENT_PROCESS: ReasonText(
        _MEMORY,
        "A process has a lease and has not answered the arbiter's recall for 2 s; its siblings cannot use that memory.",
        "Resume the process if it is stopped, else end it.",
    ),
    Reason.UNCONNECTED: ReasonText(
        _MEMORY | _TIME,
        "A process of the container uses GPU memory and is not connected to the arbiter, so nothing is refused to it and its GPU time is not limited.",
        "Start the program with the library and without going around it; it needs its file descriptors and the socket in /.tangram also later.",
    ),
    Reason.BYPASSING: ReasonText(
        _MEMORY | _TIME,
        "A process of the container uses GPU memory, its program has never connected to the arbiter, and it lacks the library or the grant: it bypasses them.",
        "Start the program with the library; arbiter.bypass decides whether the arbiter ends the process when the container passes its limit.",
    ),
    Reason.UNATTRIBUTED: ReasonText(
        _MEMORY,
        "The arbiter does not see the node's processes, so GPU memory that a process uses without the library is not attributed to its container.",
        "Set node.hostPID to true.",
    ),
    Reason.ARBITER_STALLED: ReasonText(
        _TIME,
        "The arbiter, or its thread of a GPU, has stood still for 2 s, or a stall of 0.25 s or more ended less than 5 s ago; suspended processes resume themselves after 0.6 s.",
        "Look for a node short of CPU, for XIDs and a driver that does not answer; the arbiter restarts when its health check fails.",
    ),
    Reason.NVML: ReasonText(
        _MEMORY,
        "NVML has not answered for 3 s, so the memory of new contexts is not counted and the container is not found over its limit.",
        "Look at /readyz of the device plugin, which shows why NVML does not answer, and run nvidia-smi on the node.",
    ),
    Reason.OVER_LIMIT: ReasonText(
        _MEMORY,
        "NVML counted more GPU memory for the container than its limit, in two readings in a row.",
        "Look for processes that do not load the library; arbiter.guard.policy decides whether the arbiter ends them.",
    ),
    Reason.UNKNOWN_REASON: ReasonText(
        _MEMORY | _TIME,
        "A newer library reports a reason that this arbiter does not know.",
        "Upgrade the node's DaemonSet.",
    ),
}

_ROWS: Final[Mapping[str, ReasonText]] = {str(reason): row for reason, row in TABLE.items()}

REPORTED: Final[Mapping[int, Reason]] = {
    1: Reason.NO_THREAD,
    2: Reason.NO_CHANNELS,
    3: Reason.GRAPHICS,
    4: Reason.UNKNOWN_FUNCTION,
    5: Reason.CHANNELS_UNLISTED,
    6: Reason.NO_UUID,
    7: Reason.NO_PAGE,
}
"""What a library may report, by the number on the wire. Specified: `enum wire_reason` of shim/src/link/wire.h."""

_WHY_NO_CHANNELS: Final = frozenset({Reason.NO_THREAD, Reason.CHANNELS_UNLISTED, Reason.NO_UUID, Reason.MPS})
"""More specific than that there are no channels."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process that is connected, or that NVML sees in the container. `pid` is the host's, 0 where it is not known."""

    pid: int
    reported: frozenset[Reason] = frozenset()
    """What its library reports now."""
    without_channels_s: float | None = None
    """How long it has had a context on a GPU on which it has reported no channels; None = there is none such."""
    recall_s: float | None = None
    """How long a recall has been unanswered while it has a lease; None = no recall is unanswered."""
    mps: bool = False
    """NVML lists it as a client of an MPS server."""
    unconnected: bool = False
    """NVML counts memory for it, and it is not connected."""
    bypassing: bool = False
    """Nor was it ever, and nothing of Tangram is in it (`vgpu.memory.bypass`)."""


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """A container as the arbiter knows it now."""

    grant_readable: bool = True
    """No: the arbiter and the library refuse every process that starts."""
    core_percent: int = 0
    """0 = no gpu-core was requested."""
    gated: bool = False
    """Its launches are delayed instead of suspending it."""
    partial: bool = False
    """It reported a list of channels that does not name all."""
    denied: Reason | None = None
    """Why its GPUs or their driver do not let it be suspended, by the trial of this boot: `NO_SUSPEND`, `UNKNOWN_DRIVER`."""
    gating_points: float | None = None
    """By how much launch gating misses a gpu-core in such a case, of `GATED_POINTS`; None = not measured."""
    mps: bool = False
    """An MPS server runs on one of its GPUs."""
    stalled_s: float = 0.0
    """How long the arbiter's thread of one of its GPUs has made no progress."""
    reading_s: float = 0.0
    """How old the last reading of NVML is, of the GPU of which it is oldest."""
    stall_ended_s: float = inf
    """How long ago a stall of that thread, or of the whole arbiter, ended."""
    over_limit_pids: tuple[int, ...] = ()
    """The process to deal with on each GPU on which the container is over its limit now (`vgpu.memory.over_limit`); it need not be connected."""
    processes: tuple[ProcessFacts, ...] = ()
    best_effort: bool = False
    """It yields to every other container: that limits its GPU time, also without a gpu-core."""
    unattributed: bool = False
    """The node's processes are not seen."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason, and the processes that it is about; none = the container as a whole."""

    reason: Reason
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The states of a container's limits, and every reason."""

    memory: LimitState
    gpu_time: LimitState
    findings: tuple[Finding, ...] = ()


def enforcement(facts: ContainerFacts) -> Enforcement:
    """The one function that decides. A container that has no process and no memory uses no GPU: nothing is unenforced then."""
    of_processes = [(reason, process.pid) for process in facts.processes for reason in _of_process(process, facts)]
    of_processes += [(Reason.OVER_LIMIT, pid) for pid in facts.over_limit_pids]
    of_container = _of_container(facts) if facts.processes else set()
    if facts.unattributed:  # also of a container of which no process is seen
        of_container.add(Reason.UNATTRIBUTED)
    found = of_container.union(reason for reason, _ in of_processes)
    if not found:
        state = _state((), facts)
        return Enforcement(state, state)
    findings = tuple(
        Finding(reason, tuple(sorted({pid for one, pid in of_processes if one is reason and pid})))
        for reason in ALL
        if reason in found
    )
    memory, gpu_time = (
        _state((one for one in findings if limit in TABLE[one.reason].limits), facts) for limit in Limit
    )
    return Enforcement(memory, gpu_time, findings)


def row_of(reason: str) -> ReasonText | None:
    """The row of a reason as a status document names it; None for one of a later version."""
    return _ROWS.get(reason)


def reported(number: int) -> Reason:
    """The reason of a REPORT. A number of a later version is no reason to ignore it."""
    return REPORTED.get(number, Reason.UNKNOWN_REASON)


def _state(findings: Iterable[Finding], facts: ContainerFacts) -> LimitState:
    if any(findings):  # a process that runs without its limit outweighs those that are refused
        return LimitState.UNENFORCED
    return LimitState.ENFORCED if facts.grant_readable else LimitState.REFUSED


def _of_process(process: ProcessFacts, facts: ContainerFacts) -> set[Reason]:
    reasons = set(process.reported)
    if process.without_channels_s is not None and process.without_channels_s >= NO_CHANNELS_S:
        reasons.add(Reason.NO_CHANNELS)
    if process.mps or (facts.mps and Reason.NO_CHANNELS in reasons):
        reasons.add(Reason.MPS)
    if reasons & _WHY_NO_CHANNELS:
        reasons.discard(Reason.NO_CHANNELS)
    if process.recall_s is not None and process.recall_s >= SILENT_S:
        reasons.add(Reason.SILENT_PROCESS)
    if process.unconnected:
        reasons.add(Reason.UNCONNECTED)
    if process.bypassing:
        reasons.add(Reason.BYPASSING)
    return reasons


def gating_points(driver: str, gpus: int) -> float | None:
    """Of `GATED_POINTS`, for a container of so many GPUs. `driver`: as the driver writes its version, such as 580.159.04."""
    branch = driver.partition(".")[0]
    return GATED_POINTS.get(int(branch)) if branch.isdecimal() and gpus == 1 else None


def _gating_enforces(facts: ContainerFacts) -> bool:
    """A gpu-core, in the one case that is measured: the trial shows that suspends do not work, and all of its launches pass the gate."""
    points = facts.gating_points
    requested = facts.gated and facts.core_percent > 0 and facts.denied is Reason.NO_SUSPEND
    return requested and points is not None and points <= GATED_EXACT_POINTS


def _of_container(facts: ContainerFacts) -> set[Reason]:
    gating_enforces = _gating_enforces(facts)
    applicable = {
        Reason.GATED: facts.gated and (facts.core_percent > 0 or facts.best_effort) and not gating_enforces,
        Reason.CHANNELS_UNLISTED: facts.partial,
        Reason.UNKNOWN_DRIVER: facts.denied is Reason.UNKNOWN_DRIVER,
        Reason.NO_SUSPEND: facts.denied is Reason.NO_SUSPEND and not gating_enforces,
        Reason.ARBITER_STALLED: facts.stalled_s >= STALLED_S or facts.stall_ended_s < STALL_SHOWN_S,
        Reason.NVML: facts.reading_s > STALE_S,
    }
    return {reason for reason, applies in applicable.items() if applies}
