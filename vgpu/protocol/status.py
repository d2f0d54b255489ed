"""The state of every container that the arbiter serves: one JSON document, version 1.

The arbiter writes it to each client of its status socket and closes the connection; the device plugin and `tangramctl ps` read it. The document
states facts only: the arbiter found that a container is over its limit, and the reader decides what follows. Fields may be added within a version,
so a reader ignores unknown fields; a document of a later version is rejected.

Units: bytes. `pid` is the host's, `pid_in_container` that of the container's pid namespace, 0 if unknown.
"""

from __future__ import annotations

from typing import Final

import msgspec

from vgpu.api.errors import BadDocument, NewerVersion

VERSION: Final = 1
BRIEF: Final = "\0tangram-brief-"
"""A reader whose socket is bound to an abstract name with this prefix gets a brief document: only the containers over their limit, with a limit
that is not enforced, with a problem of GPU time, or that do not give way or cannot come back. An arbiter of an earlier version writes the whole document."""


class GpuStatus(msgspec.Struct, frozen=True):
    """A container's limit on one GPU and its processes' parts of it."""

    uuid: str
    limit_bytes: int
    """In all, as CUDA and nvidia-smi show it in the container: above the guarantee where it may burst."""
    core_percent: int
    """Guaranteed compute time. 0 = no cap was requested."""
    leased_bytes: int
    """Leased to its processes for allocations; memory for their contexts is in `context_bytes`."""
    used_bytes: int
    """The allocated part of it, by their last statements."""
    context_bytes: int
    """Memory of their contexts, modules and kernels beside that."""
    shared_bytes: int = 0
    """Charged beside all leases: memory that some of them have open after the end of the process that made it."""
    guarantee_bytes: int | None = None
    """The part of `limit_bytes` that is never swapped out. None = all of it, or an arbiter without this field."""
    away_bytes: int = 0
    """The part of what is leased that is in host memory."""
    elastic_bytes: int = 0
    """The part of what is leased that can be moved there, or is there."""
    core_limit_percent: int = 0
    """Compute time in all: more than `core_percent` where the container may burst. 0 = no cap, or an arbiter without this field."""


class ProcessGpu(msgspec.Struct, frozen=True):
    """One process on one GPU."""

    uuid: str
    used_bytes: int
    context_bytes: int
    measured_bytes: int | None = None
    """All memory that NVML lists for it there; None if NVML does not report it."""
    managed_bytes: int = 0
    """The managed part of `used_bytes`, which NVML lists for no process. 0 also if its library does not count it."""


class ProcessStatus(msgspec.Struct, frozen=True, rename={"gpus": "cards"}):
    """A process of the container: one with the library, or one that only NVML lists."""

    pid: int
    pid_in_container: int
    command: str
    gpus: tuple[ProcessGpu, ...]


class GpuTimeStatus(
    msgspec.Struct,
    frozen=True,
    rename={"requested_percent": "asked_percent", "unreported": "untold", "watchdog_resumes": "heals"},
):
    """A container's GPU time since its first process connected. Seconds."""

    on: bool
    """Whether it may run now."""
    working: bool
    """Whether its processes report work."""
    processes: int
    """Processes that can be suspended: their channels are known."""
    requested_percent: int
    """Guaranteed. 0 = no cap."""
    on_s: float
    """Time in which it had work and was allowed to run; this counts against its cap."""
    off_s: float
    """Time in which it had work and waited for others."""
    capped_s: float
    """Time in which it had work and waited for its own cap."""
    suspends: int
    trouble: str
    """Why it cannot be suspended; empty = it can."""
    mode: str = "suspend"
    """How the arbiter keeps it from running: `suspend`, or `gate` if suspends do not work and its launches are delayed."""
    watchdog_resumes: int = 0
    """Times the watchdog resumed it, in case another process had stopped it."""
    clearing_s: float = 0.0
    """Time in which it had work and was allowed to run, beside a container that was being suspended for it."""
    suspended_s: float = 0.0
    """Time in which it was suspended, with work or without."""
    arrivals: int = 0
    """Times that work arrived after idleness."""
    credit_s: float = 0.0
    """How long it may still run before its own cap stops it; below 0 it has a debt. 0 without a cap."""
    unreported: bool = False
    """The driver counts GPU time while its processes report no work."""
    stopped: bool = False
    """Something other than the arbiter seems to stop it again and again: its work ends right after it is enabled anew."""
    seen_s: float | None = None
    """GPU time that the driver counted for its processes; None if the driver does not report it."""
    resumes: int = 0
    """Times that its processes resumed themselves because the arbiter's heartbeat had stopped."""
    limit_percent: int = 0
    """What it may use in all: more than `requested_percent` where it may burst. 0 = no cap, or an arbiter without this field."""
    burst_s: float = 0.0
    """The part of `on_s` above its guarantee, in time that no other container needed."""


class SwapStatus(msgspec.Struct, frozen=True):
    """A container's memory above its guarantee, on a node where containers may burst. docs/development/swapping.md"""

    paused: bool
    """It does not run: some of its memory is in host memory, or moves."""
    paused_s: float
    """For how long, in seconds; 0 = it is not paused."""
    why: str
    """Why it is paused, in words; empty = it is not."""
    direction: str
    """In which direction its memory moves now: out, in, or empty."""
    waiting: int
    """Requests of its processes that wait for memory."""
    unable: str
    """Why its memory cannot be moved; empty = it can, or no process has connected."""
    over_limit: str
    """Why it is over its limit: it did not give way to the guarantee of another container. Empty = it is not."""
    over_limit_action: str
    """What follows: kill or report."""
    stranded: str
    """Why its memory cannot come back; empty = it can."""
    stranded_action: str
    """What follows: evict or keep."""
    no_pool: str = ""
    """Why no memory can be moved from one of its GPUs: the host pool is not ready. Empty = it can, or an earlier arbiter."""
    pool_full: str = ""
    """Why requests of its processes wait for room in the host pool. Empty = none does, or an earlier arbiter."""


class UnenforcedStatus(msgspec.Struct, frozen=True):
    """Why a limit of a container is not enforced. docs/reference/enforcement.md lists the reasons."""

    reason: str
    limits: tuple[str, ...]
    """memory, gpu-time"""
    pids: tuple[int, ...] = ()
    """Host pids; none = the reason concerns the container as a whole."""


class BypassStatus(msgspec.Struct, frozen=True):
    """A GPU on which a container is over its limit by processes that bypass the library."""

    gpu: str
    pids: tuple[int, ...]
    """Host pids, the largest process first."""
    held_bytes: int
    """By all processes of the container, by NVML."""
    limit_bytes: int
    policy: str
    """The action now: report, evict or kill."""


class ContainerStatus(
    msgspec.Struct,
    frozen=True,
    rename={"service_class": "class", "gpus": "cards", "over_limit_action": "guard", "gpu_time": "turn"},
):
    """One grant directory that has a grant."""

    key: str
    """Name of the grant directory."""
    pod: str
    """`<namespace>/<name>`"""
    uid: str
    container: str
    service_class: str
    level: int
    over_limit_action: str
    """The action if it is over its limit: report, evict or kill."""
    over: bool
    """NVML counted more than the limit on a GPU in two readings in a row."""
    gpus: tuple[GpuStatus, ...]
    processes: tuple[ProcessStatus, ...]
    gpu_time: GpuTimeStatus | None = None
    """None while none of its processes has reported channels."""
    memory_state: str = "enforced"
    """enforced, refused or unenforced"""
    gpu_time_state: str = "enforced"
    unenforced: tuple[UnenforcedStatus, ...] = ()
    """Empty = none; also from an arbiter without this field."""
    bypasses: tuple[BypassStatus, ...] = ()
    swap: SwapStatus | None = None
    """None where no container may burst, and from an arbiter without this field."""


class KillStatus(msgspec.Struct, frozen=True):
    """A process that the arbiter killed because its container was over its limit. The container may have ended since."""

    id: str
    """Of the process: no other process of this boot has it."""
    uid: str
    pod: str
    """`<namespace>/<name>`"""
    container: str
    gpu: str
    pid: int
    command: str
    held_bytes: int
    """By all processes of the container, by NVML."""
    limit_bytes: int
    bypass: bool = False
    """The process bypassed the library, and `arbiter.bypass` decided; otherwise the container's over-limit action did."""
    whole: bool = False
    """All processes of its container were killed with it: the container started such processes repeatedly, or `reason` says why."""
    reason: str = ""
    """Not for its own use, but because it did not give way to the guarantee of another container; then `held_bytes` is what it had leased and
    `limit_bytes` its guarantee. Empty: one of the other reasons."""


class UngrantedStatus(msgspec.Struct, frozen=True):
    """A process that has memory of a shared GPU and belongs to no grant there."""

    gpu: str
    pid: int
    command: str
    held_bytes: int | None
    """None = the driver does not report it."""
    pod: str = ""
    """UID of its pod by its cgroup; empty = it is in no pod."""


class UnlistedStatus(msgspec.Struct, frozen=True):
    """A GPU that containers share, with memory in use that NVML lists for no process."""

    gpu: str
    held_bytes: int
    """A lower bound."""
    used_bytes: int
    """Memory of the GPU in use by all processes, as the driver counts it."""
    uid: str = ""
    """The pod whose container may have it: the only one there with processes that have a GPU open and that NVML lists nowhere. Empty = no pod can be
    named."""
    pod: str = ""
    """`<namespace>/<name>`"""
    container: str = ""
    pids: tuple[int, ...] = ()
    """Host pids of these processes."""


class SensorStatus(msgspec.Struct, frozen=True):
    """What the sensors of a GPU show that containers share. None = this GPU or driver does not report it."""

    uuid: str
    heat: str
    """Class: cool, normal or hot."""
    temperature_c: int | None = None
    headroom_c: int | None = None
    """Degrees below the temperature at which the GPU reduces its clocks."""
    power_mw: int | None = None
    power_limit_mw: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    slowdowns: tuple[str, ...] = ()
    """Why the clocks are reduced, by nvidia-smi's names."""
    link_errors: int | None = None
    """Replays, recoveries and CRC errors of all its NVLinks, since the driver was loaded."""


class StatusDocument(msgspec.Struct, frozen=True):
    """All containers of one arbiter, by key."""

    containers: tuple[ContainerStatus, ...]
    version: int = VERSION
    kills: tuple[KillStatus, ...] = ()
    """Kills of the last minute: a kill ends the excess, perhaps before a reader sees it."""
    ungranted: tuple[UngrantedStatus, ...] = ()
    """Memory that no limit counts."""
    unlisted: tuple[UnlistedStatus, ...] = ()
    """Memory that no limit counts, whose owner is unknown."""
    sensors: tuple[SensorStatus, ...] = ()
    """By UUID. A GPU is left out while nothing of it could be read lately. Empty in a brief document."""


class _Version(msgspec.Struct):
    version: int


def encode_status(status: StatusDocument) -> bytes:
    """The document as JSON bytes."""
    return msgspec.json.encode(status)


def decode_status(document: bytes) -> StatusDocument:
    """Raises BadDocument with the reason; NewerVersion for a document of a later arbiter."""
    try:
        version = msgspec.json.decode(document, type=_Version).version
        if version > VERSION:
            raise NewerVersion(f"status document is of version {version}: this Tangram reads up to version {VERSION}")
        if version < 1:
            raise BadDocument(f"status document is of version {version}: versions are 1 to {VERSION}")
        return msgspec.json.decode(document, type=StatusDocument)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadDocument(f"status document of {len(document)} bytes cannot be read: {error}") from None
