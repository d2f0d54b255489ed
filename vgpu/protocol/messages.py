"""What the library and the arbiter say to each other, as values.

docs/reference/protocol.md says who sends what and when; `vgpu.protocol.wire` makes packets of it and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class Hello:
    """Library: here I am. `pid` is as the container numbers it; the arbiter trusts SO_PEERCRED alone."""

    pid: int
    flags: int
    library_version: str


@dataclass(frozen=True, slots=True)
class WelcomeGpu:
    """One GPU's limits, for all processes of the container together."""

    uuid: bytes
    limit_bytes: int
    core_percent: int
    service_class: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Arbiter: these are your GPUs; their order numbers them from here on. The page's descriptor comes along."""

    gpus: tuple[WelcomeGpu, ...]
    promised_mib: int = 0
    """Held for a context on the first GPU, if the process begins one soon; 0 = nothing is."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Library: I need so much, and would take so much."""

    gpu: int
    need_bytes: int
    want_bytes: int


@dataclass(frozen=True, slots=True)
class Leased:
    """Arbiter: the answer to a Lease, with its seq."""

    gpu: int
    refused: bool
    granted_bytes: int
    unleased_bytes: int


@dataclass(frozen=True, slots=True)
class Return:
    """Library: I give so much back. Carries a Recall's seq when it answers one, and may then be of 0 bytes."""

    gpu: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Arbiter: a sibling needs memory; return up to so much of what you do not use."""

    gpu: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Library: so much is allocated and so much leased. Before any Lease of a connection it re-states what it has."""

    gpu: int
    used_bytes: int
    leased_bytes: int
    managed_mib: int = 0
    """Of what is allocated, managed memory, rounded up; 0 also from a library that does not count it."""


@dataclass(frozen=True, slots=True)
class Error:
    """Arbiter: why it hangs up now."""

    code: int
    text: str


class Step(IntEnum):
    """Of a process's contexts on one GPU, all together."""

    BEGIN = 1
    """The first is about to be made."""
    DONE = 2
    """It was made, or this process had some when it connected again."""
    GONE = 3
    """The last was destroyed, or the first could not be made."""
    GROW = 4
    """They may grow by so much in the calls to come: code that is loaded, a stream."""
    GROWN = 5
    """Those calls are made."""


@dataclass(frozen=True, slots=True)
class Context:
    """Library: my contexts on a GPU. BEGIN is answered by a Leased, the others by a Measured."""

    gpu: int
    step: Step
    estimate_bytes: int
    """What it last learned that its contexts take; 0 = never. With GROW: by how much they may grow."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Arbiter: what NVML counts for the process beside its allocations."""

    gpu: int
    known: bool
    context_bytes: int
    unleased_bytes: int


@dataclass(frozen=True, slots=True)
class Processes:
    """Library: who of this container is on the GPU?"""

    gpu: int


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """One process of the container, as the container numbers it."""

    pid: int
    used_bytes: int
    """With its contexts."""


@dataclass(frozen=True, slots=True)
class ProcessList:
    """Arbiter: the answer to Processes."""

    gpu: int
    processes: tuple[ListedProcess, ...]


@dataclass(frozen=True, slots=True)
class Channels:
    """Library: these are the channels that one client of the kernel driver has on a GPU. The client's descriptor comes along;
    without compute channels the client is gone from the GPU, and no descriptor comes."""

    gpu: int
    client: int
    subdevice: int
    compute: tuple[int, ...]
    copy: tuple[int, ...]
    unlisted: bool = False
    """There are more compute channels than fit: they cannot be suspended whole."""
    fresh: bool = False
    """The process never reported channels to an arbiter before: so none has suspended these."""


class What(IntEnum):
    """Of a process's work."""

    WORK = 1
    """It is about to give the GPU work."""
    IDLE = 2
    """All of it is done."""
    HINT = 3
    """Work comes in `value` microseconds."""
    BEGIN_SECTION = 4
    END_SECTION = 5
    YIELD = 6
    """What follows is best-effort work."""
    END_YIELD = 7
    STILL = 8
    """It launched more since it said that it has work, or something other than kernels."""
    DRAINED = 9
    """Launches wait at the gate, and nothing is left of those before. The next WORK ends it."""
    RESUMED = 10
    """It is about to resume its own channels, or has just done so: it was suspended, and the arbiter's heartbeat had stopped."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Library: what the process does with the GPU."""

    what: What
    value: int = 0


class Held(IntEnum):
    """What a process has of memory that others may have, too."""

    MADE = 1
    """Its lease pays for it. Not answered."""
    OPENED = 2
    """Somebody else's, which it has just opened. Answered by a Leased."""
    STILL_OPEN = 3
    """The same, said again on a new connection. Not answered."""


class Space(IntEnum):
    """What the bytes of a key are."""

    IPC = 1
    """A CUipcMemHandle."""
    POOL = 2
    """A CUmemPoolPtrExportData."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Library: I have memory of this key."""

    gpu: int
    held: Held
    space: Space
    amount: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Library: I have it no more. `amount` bytes of my lease end with it. Answered by a Leased of 0 bytes."""

    gpu: int
    held: Held
    space: Space
    amount: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """Library: a limit that this process cannot enforce, by the number of its reason (`vgpu.api.enforcement`). Not answered."""

    reason: int
    active: bool
    """False = the reason has ended."""


Message = (
    Hello | Welcome | Lease | Leased | Return | Recall | Usage | Error | Context | Measured | Processes | ProcessList
    | Channels | Activity | Hold | Drop | Report
)  # fmt: skip
