"""The messages between the library and the arbiter, as values.

docs/reference/protocol.md specifies which side sends which message and when; `vgpu.protocol.wire` makes packets of it and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from vgpu.protocol.passing_messages import PassingMessage


@dataclass(frozen=True, slots=True)
class Hello:
    """Library: the first message. `pid`: in the container's pid namespace; the arbiter trusts SO_PEERCRED alone."""

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
    """Arbiter: the GPUs of the grant, which later messages number in this order. The page's descriptor comes along."""

    gpus: tuple[WelcomeGpu, ...]
    promised_mib: int = 0
    """Reserved for a context on the first GPU, if the process begins one soon; 0 = nothing is."""


class LeaseKind(IntEnum):
    """What a lease is for."""

    RESIDENT = 0
    """Memory that stays on the GPU. Every lease of a library that does not know kinds."""
    ELASTIC = 1
    """Memory in blocks that can be swapped out."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Library: requests a lease of at least the needed bytes, at best the wanted bytes."""

    gpu: int
    need_bytes: int
    want_bytes: int
    kind: LeaseKind = LeaseKind.RESIDENT
    waited_ms: int = 0
    """How long the allocation has waited before this request."""


@dataclass(frozen=True, slots=True)
class Leased:
    """Arbiter: the answer to a Lease, with its seq."""

    gpu: int
    refused: int
    """`vgpu.memory.ceiling.RefusedBy`."""
    granted_bytes: int
    """Refused by host pool or GPU: the size of that."""
    unleased_bytes: int


@dataclass(frozen=True, slots=True)
class Return:
    """Library: returns a part of its lease. Has a Recall's seq if it answers one, and may then be of 0 bytes."""

    gpu: int
    bytes: int
    kind: LeaseKind = LeaseKind.RESIDENT


@dataclass(frozen=True, slots=True)
class Recall:
    """Arbiter: a sibling needs memory; the library returns up to this much unused memory."""

    gpu: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Library: states its allocated and its leased bytes. Before any Lease of a connection it re-states its existing leases."""

    gpu: int
    used_bytes: int
    leased_bytes: int
    managed_mib: int = 0
    """The managed part of the allocated bytes, rounded up; 0 also from a library that does not count it."""


@dataclass(frozen=True, slots=True)
class Error:
    """Arbiter: why it closes the connection now."""

    code: int
    text: str


class Step(IntEnum):
    """The state of all contexts of a process on one GPU."""

    BEGIN = 1
    """The first is about to be made."""
    DONE = 2
    """It was made, or this process had some when it connected again."""
    GONE = 3
    """The last was destroyed, or the first could not be made."""
    GROW = 4
    """They may grow by this much in the next calls: code that is loaded, a stream."""
    GROWN = 5
    """Those calls have returned."""


@dataclass(frozen=True, slots=True)
class Context:
    """Library: reports its contexts on a GPU. The answer to BEGIN is a Leased, to the others a Measured."""

    gpu: int
    step: Step
    estimate_bytes: int
    """The last known size of its contexts; 0 = never measured. With GROW: by how much they may grow."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Arbiter: NVML's count for the process beside its allocations."""

    gpu: int
    known: bool
    context_bytes: int
    unleased_bytes: int


@dataclass(frozen=True, slots=True)
class Processes:
    """Library: requests the list of this container's processes on the GPU."""

    gpu: int


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """One process of the container, by its pid in the container."""

    pid: int
    used_bytes: int
    """Including its contexts."""


@dataclass(frozen=True, slots=True)
class ProcessList:
    """Arbiter: the answer to Processes."""

    gpu: int
    processes: tuple[ListedProcess, ...]


@dataclass(frozen=True, slots=True)
class Channels:
    """Library: reports the channels of one client of the kernel driver on a GPU. The client's descriptor comes along;
    without compute channels the client is gone from the GPU, and no descriptor comes."""

    gpu: int
    client: int
    subdevice: int
    compute: tuple[int, ...]
    copy: tuple[int, ...]
    unlisted: bool = False
    """There are more compute channels than fit one list: not all can be suspended."""
    fresh: bool = False
    """The process has never reported channels to an arbiter before, so none has suspended these."""
    away: bool = False
    """Memory of the process is swapped out: its channels must not be enabled."""


class ActivityKind(IntEnum):
    """The state of a process's work."""

    WORK = 1
    """It is about to launch work."""
    IDLE = 2
    """All its work has ended."""
    HINT = 3
    """Work comes in `value` microseconds."""
    BEGIN_SECTION = 4
    END_SECTION = 5
    YIELD = 6
    """The following work is best-effort."""
    END_YIELD = 7
    STILL = 8
    """It has launched more since its report of work, or something other than kernels."""
    DRAINED = 9
    """Launches wait at the gate, and all earlier ones have ended. The next WORK ends this state."""
    RESUMED = 10
    """It is about to resume its own channels, or has just done so: it was suspended, and the arbiter's heartbeat had stopped."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Library: reports the process's GPU work."""

    what: ActivityKind
    value: int = 0


class HoldState(IntEnum):
    """How a process has shared memory."""

    MADE = 1
    """Its lease pays for it. Not answered."""
    OPENED = 2
    """It has just opened the memory of another process. Answered by a Leased."""
    STILL_OPEN = 3
    """The same, stated again on a new connection. Not answered."""


class Space(IntEnum):
    """The type of a key's bytes."""

    IPC = 1
    """A CUipcMemHandle."""
    POOL = 2
    """A CUmemPoolPtrExportData."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Library: the process made or opened the memory of this key."""

    gpu: int
    held: HoldState
    space: Space
    amount: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Library: the process freed or closed it. `amount` bytes of the lease end with it. Answered by a Leased of 0 bytes."""

    gpu: int
    held: HoldState
    space: Space
    amount: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """Library: a limit that this process cannot enforce, by the number of its reason (`vgpu.api.enforcement`). Not answered."""

    reason: int
    active: bool
    """False = the reason has ended."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Arbiter: the limits of the container on a GPU now. Equal limits: it may not burst."""

    gpu: int
    guarantee_bytes: int
    limit_bytes: int
    """In all, the guarantee included."""


@dataclass(frozen=True, slots=True)
class Swappable:
    """Library: the process's elastic memory on a GPU, and whether it can be swapped."""

    gpu: int
    reason: int
    """Why it cannot be swapped now, 1 to 31; 0 = it can."""
    elastic_bytes: int
    """Of whole blocks, also of those that are away."""
    away_bytes: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Arbiter: all channels of the container are suspended. The library names blocks of at least this many bytes."""

    gpu: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """One physical block of elastic memory. `id`: the library's own, never used twice in a process."""

    id: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Library: blocks to copy. A descriptor of each comes along, in the same order."""

    gpu: int
    blocks: tuple[Block, ...]
    more: bool = False
    """Another message with further blocks of the same order follows."""


@dataclass(frozen=True, slots=True)
class Unmap:
    """Arbiter: the content of these blocks is saved. The library unmaps and releases them."""

    gpu: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unmapped:
    """Library: it has unmapped and released these blocks."""

    gpu: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Arbiter: the library makes and maps these blocks again, and answers with Blocks."""

    gpu: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """Arbiter: these blocks have their content again and are resident."""

    gpu: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Arbiter: the present SwapOut ends. Blocks that no Unmap names stay."""

    gpu: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Library: it needs the content of these blocks, which are away, no more, and does not make them again."""

    gpu: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Discarded:
    """Arbiter, with the seq of a Discard: nothing of these blocks is kept any more."""

    gpu: int
    ids: tuple[int, ...]


class UnableReason(IntEnum):
    """Why the library cannot do what the arbiter ordered."""

    NO_ELASTIC_MEMORY = 1
    """The process has no memory on that GPU that can be swapped."""
    UNKNOWN_BLOCK = 2
    """It has no such block in the state that the order needs."""
    NO_DESCRIPTOR = 3
    """No file descriptor is free."""
    DRIVER = 4
    """The driver refused."""


@dataclass(frozen=True, slots=True)
class Unable:
    """Library: it cannot do what the arbiter ordered; the answer in place of Blocks or Unmapped."""

    gpu: int
    reason: UnableReason


@dataclass(frozen=True, slots=True)
class Pending:
    """Arbiter, with the seq of a Lease: the request waits until other containers have given memory back."""

    gpu: int
    missing_bytes: int


SwapMessage = (
    Burst | Swappable | SwapOut | Blocks | Unmap | Unmapped | SwapIn | Filled | Cancel | Unable | Pending | Discard | Discarded
)  # fmt: skip
Message = (
    Hello | Welcome | Lease | Leased | Return | Recall | Usage | Error | Context | Measured | Processes | ProcessList
    | Channels | Activity | Hold | Drop | Report | SwapMessage | PassingMessage
)  # fmt: skip
