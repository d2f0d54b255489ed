"""What the arbiter says of every container it serves: one JSON document, version 1.

The arbiter writes it to each client of its status socket and closes; the device plugin and `tangramctl ps` read it. Facts
only: a container is over its limit in it because the arbiter found so; what follows from that is the reader's business. Fields may
be added within a version, so a reader passes over what it does not know; a document of a later version is refused.

Units: bytes. `pid` is the host's, `pid_in_container` as the process itself would say, 0 where that is not known.
"""

from __future__ import annotations

from typing import Final

import msgspec

from vgpu.api.errors import BadDocument, NewerVersion

VERSION: Final = 1
BRIEF: Final = "\0tangram-brief-"
"""A reader whose socket is bound to an abstract name that begins so gets a brief document: of the containers only those that are over their
limit, whose limits are not enforced, or whose GPU time is not as it should be. An arbiter of an earlier version writes it the whole one."""


class GpuStatus(msgspec.Struct, frozen=True):
    """A container's limit on one GPU and what its processes have of it."""

    uuid: str
    limit_bytes: int
    core_percent: int
    """0 = no cap was requested."""
    leased_bytes: int
    """Lent to its processes for allocations; what is held for their contexts is in `context_bytes`."""
    used_bytes: int
    """Of that, what they last said they allocated."""
    context_bytes: int
    """What their contexts, modules and kernels take beside that."""
    shared_bytes: int = 0
    """Charged beside all leases: memory that some of them have open and whose maker is gone."""


class ProcessGpu(msgspec.Struct, frozen=True):
    """One process on one GPU."""

    uuid: str
    used_bytes: int
    context_bytes: int
    measured_bytes: int | None = None
    """All memory that NVML lists for it there; None where NVML does not say."""
    managed_bytes: int = 0
    """Of `used_bytes`: managed memory, which NVML lists for no process. 0 also where its library does not count it."""


class ProcessStatus(msgspec.Struct, frozen=True, rename={"gpus": "cards"}):
    """A process of the container: one that carries the library, or one that NVML alone knows."""

    pid: int
    pid_in_container: int
    command: str
    gpus: tuple[ProcessGpu, ...]


class GpuTimeStatus(
    msgspec.Struct,
    frozen=True,
    rename={"requested_percent": "asked_percent", "unreported": "untold", "watchdog_resumes": "heals"},
):
    """A container's GPU time since its first process came. Seconds."""

    on: bool
    """May it run now?"""
    working: bool
    """Has it work, as its processes say?"""
    processes: int
    """That can be suspended: their channels are known."""
    requested_percent: int
    """0 = no cap."""
    on_s: float
    """It ran, or could: what counts against its cap."""
    off_s: float
    """It had work and waited for others."""
    capped_s: float
    """It had work and waited for its own cap."""
    suspends: int
    trouble: str
    """Why it cannot be suspended; empty = it can."""
    mode: str = "suspend"
    """How it is kept off: `suspend`, or `gate` where that does not work and its new work is held back."""
    watchdog_resumes: int = 0
    """Times the watchdog resumed it, in case another process had stopped it."""
    clearing_s: float = 0.0
    """It had work and was allowed to run, beside a container that was being suspended for it."""
    suspended_s: float = 0.0
    """It was suspended, with work or without."""
    arrivals: int = 0
    """Times that work came after idleness."""
    credit_s: float = 0.0
    """How long it may still run before its own cap stops it; below 0 it has a debt. 0 without a cap."""
    unreported: bool = False
    """The driver sees it compute while it says it is idle."""
    stopped: bool = False
    """Something other than the arbiter seems to stop it again and again: its work ends right after it is enabled anew."""
    seen_s: float | None = None
    """GPU time that the driver counted of its processes; None where it does not tell."""
    resumes: int = 0
    """Times that its processes resumed themselves, as the arbiter gave no sign of life."""


class UnenforcedStatus(msgspec.Struct, frozen=True):
    """Why a limit of a container is not enforced. docs/reference/enforcement.md lists the reasons."""

    reason: str
    limits: tuple[str, ...]
    """memory, gpu-time"""
    pids: tuple[int, ...] = ()
    """Of the host; none = it is about the container as a whole."""


class BypassStatus(msgspec.Struct, frozen=True):
    """A GPU on which a container is over its limit by processes that go around the library."""

    gpu: str
    pids: tuple[int, ...]
    """Of the host, the largest first."""
    held_bytes: int
    """By all processes of the container, as NVML said."""
    limit_bytes: int
    policy: str
    """report, evict or kill: what follows now."""


class ContainerStatus(msgspec.Struct, frozen=True, rename={"service_class": "class", "gpus": "cards"}):
    """One grant directory that has a grant."""

    key: str
    """Name of the grant directory."""
    pod: str
    """`<namespace>/<name>`"""
    uid: str
    container: str
    service_class: str
    level: int
    guard: str
    """report, evict or kill: what is to be done when it is over."""
    over: bool
    """NVML found more than the limit on a GPU, in two readings one after the other."""
    gpus: tuple[GpuStatus, ...]
    processes: tuple[ProcessStatus, ...]
    turn: GpuTimeStatus | None = None
    """None while none of its processes has reported channels."""
    memory_state: str = "enforced"
    """enforced, refused or unenforced"""
    gpu_time_state: str = "enforced"
    unenforced: tuple[UnenforcedStatus, ...] = ()
    """Empty = nothing is; also what an arbiter without this field says."""
    bypasses: tuple[BypassStatus, ...] = ()


class KillStatus(msgspec.Struct, frozen=True):
    """A process that the arbiter killed because its container was over its limit. The container may be gone since."""

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
    """By all processes of the container, as NVML said."""
    limit_bytes: int
    bypass: bool = False
    """It went around the library, and `arbiter.bypass` decided; else the container's `guard` did."""
    whole: bool = False
    """With it all processes of its container, as processes like it were started again and again."""


class UngrantedStatus(msgspec.Struct, frozen=True):
    """A process with memory of a GPU that containers share, and belongs to no grant there."""

    gpu: str
    pid: int
    command: str
    held_bytes: int | None
    """None = the driver does not tell."""
    pod: str = ""
    """UID of its pod by its cgroup; empty = it is in none."""


class UnlistedStatus(msgspec.Struct, frozen=True):
    """A GPU that containers share, with memory in use that NVML lists for no process."""

    gpu: str
    held_bytes: int
    """At least so much."""
    used_bytes: int
    """Of the GPU, by all that use it, as the driver counts it."""
    uid: str = ""
    """Of the pod whose container may have it: the only one there with processes that have a GPU open and that NVML lists nowhere. Empty = none can be
    named."""
    pod: str = ""
    """`<namespace>/<name>`"""
    container: str = ""
    pids: tuple[int, ...] = ()
    """Of the host: these processes."""


class Status(msgspec.Struct, frozen=True):
    """All containers of one arbiter, by key."""

    containers: tuple[ContainerStatus, ...]
    version: int = VERSION
    kills: tuple[KillStatus, ...] = ()
    """Of the last minute: being over a limit ends with a kill, perhaps before anybody looks."""
    ungranted: tuple[UngrantedStatus, ...] = ()
    """Memory that no limit counts."""
    unlisted: tuple[UnlistedStatus, ...] = ()
    """Memory that no limit counts, whose owner is unknown."""


class _Version(msgspec.Struct):
    version: int


def encode_status(status: Status) -> bytes:
    """As it goes over the socket."""
    return msgspec.json.encode(status)


def decode_status(document: bytes) -> Status:
    """Raises BadDocument that says what is wrong; NewerVersion when a later arbiter wrote it."""
    try:
        version = msgspec.json.decode(document, type=_Version).version
        if version > VERSION:
            raise NewerVersion(f"status document is of version {version}: this Tangram reads up to version {VERSION}")
        if version < 1:
            raise BadDocument(f"status document is of version {version}: versions are 1 to {VERSION}")
        return msgspec.json.decode(document, type=Status)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadDocument(f"status document of {len(document)} bytes cannot be read: {error}") from None
