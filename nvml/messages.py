"""Requests to the NVML child and its replies: msgpack in packets (SOCK_SEQPACKET).

The supervisor sends a list of `RequestPacket` to its child and gets a list of `ReplyPacket` with the same numbers, in this order: of the
first of them, where the child is slow. The server takes one `ServedPacket` a packet from other programs of the node, and sends one
`ReplyPacket` for each. A message that does not decode ends the connection that it came on.

The tags are what programs of other versions send: they stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import msgspec

from nvml.errors import NvmlAway, NvmlError, NvmlHalf, NvmlHung, NvmlOpening
from vgpu.api.inventory import Gpu
from vgpu.api.mig import MigProfile
from vgpu.health.conditions import Reading

REQUEST_BYTES: Final = 16 * 1024
"""Largest request: the UUIDs of 64 GPUs are 3 KiB."""
TOGETHER: Final = 16
"""Requests of one packet to the child, and of one client that wait for their answers. Guessed: a node has eight GPUs, and each packet wakes four threads."""
REPLY_BYTES: Final = 128 * 1024
"""Largest reply: 4,000 processes of one GPU."""
ENOUGH_BYTES: Final = 64 * 1024
"""Replies of this size together are not added to: with one of the largest they are below what a socket's buffer takes as one packet by
default, 208 KiB."""
MOST_MAPS: Final = 16
"""Processes whose maps, or descriptors, one request names. More are requested one after the other."""
MOST_PROCESSES: Final = 3000
"""Of one GPU in a reply. More are left out: a process with a context has some hundred MiB, so no GPU fits so many."""

Found = Literal["driver root", "loader"]
"""Where the management library was found."""

WHOLE: Final = 100
"""Percent. The driver was seen to answer numbers far beyond it for processes it has lost sight of; those are left out."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Memory of one process on one GPU or MIG instance. `used_bytes` is None where the driver does not report it."""

    pid: int
    uuid: str
    used_bytes: int | None
    mps: bool = False
    """It is a client of an MPS server: NVML lists those apart."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one GPU or MIG instance, without what the driver reserves for itself."""

    used_bytes: int
    usable_bytes: int
    """Used and free."""


@dataclass(frozen=True, slots=True)
class Busy:
    """One reading of a GPU."""

    percent: Mapping[int, int]
    """Host pid -> percent of the time since the last reading in which the process computed. Others are left out."""
    seen_us: int
    """Of the driver's latest sample, by its own clock: for the next reading. 0 = there never was one."""
    by_process: bool = True
    """Does the driver count by process there? If not, an empty `percent` has no meaning."""


@dataclass(frozen=True, slots=True)
class Xid:
    """An XID event of a GPU."""

    uuid: str
    xid: int


@dataclass(frozen=True, slots=True)
class MigInstanceFacts:
    """A GPU instance, as NVML has it."""

    number: int
    """Its ID on the GPU."""
    profile: str
    """As a resource has it."""
    start: int
    """Memory slice."""
    uuids: tuple[str, ...]
    """Of its compute instances: MIG devices."""
    complete: bool
    """It has one, as large as itself."""


class NvmlRequest(msgspec.Struct, frozen=True, tag=True):
    """A request. `key`: what it is about, for a call that does not return; requests about a GPU have its UUID. `wants`: in words."""

    wants: ClassVar[str] = "something"

    @property
    def key(self) -> str:
        return str(self.__struct_config__.tag).lower()


class OpenRequest(NvmlRequest, frozen=True, tag="Open"):
    """Load the library, initialise NVML and attach every GPU, or `only` those at these PCI addresses. The first request."""

    wants: ClassVar[str] = "its start"

    driver_root: str
    only: tuple[str, ...] | None = None


class CountRequest(NvmlRequest, frozen=True, tag="Count"):
    """How many GPUs there are."""

    wants: ClassVar[str] = "the number of GPUs"


class GpuAtRequest(NvmlRequest, frozen=True, tag="GpuAt"):
    """All about the GPU with this index. `uuid`: which one was there before, empty = none."""

    wants: ClassVar[str] = "its description"

    index: int
    uuid: str = ""

    @property
    def key(self) -> str:
        return self.uuid or f"GPU {self.index}"


class PerGpuRequest(NvmlRequest, frozen=True):
    """About one GPU."""

    uuid: str

    @property
    def key(self) -> str:
        return self.uuid


class HealthRequest(PerGpuRequest, frozen=True, tag="Answers"):
    """Is it well?"""

    wants: ClassVar[str] = "its health"


class ProcessesRequest(PerGpuRequest, frozen=True, tag="Processes"):
    """Which processes use memory there, and how much is in use."""

    wants: ClassVar[str] = "its processes"


class UtilisationRequest(PerGpuRequest, frozen=True, tag="Computes"):
    """The processes that computed there, between two times of the driver's clock."""

    wants: ClassVar[str] = "its utilisation"

    since_us: int
    until_us: int


class XidsRequest(NvmlRequest, frozen=True, tag="Xids"):
    """XID events of these GPUs since the last such request."""

    wants: ClassVar[str] = "XID events"

    uuids: tuple[str, ...]


class MapsRequest(NvmlRequest, frozen=True, tag="Maps"):
    """Which of these processes have the library in their memory. `processes`: host pid and start, in clock ticks since boot. No child answers it:
    `nvml.mapped` does, in the program that serves."""

    wants: ClassVar[str] = "the maps of processes"

    processes: tuple[tuple[int, int], ...]


class DescriptorsRequest(NvmlRequest, frozen=True, tag="Descriptors"):
    """Which of these processes have a GPU's device file open. `processes`: as of `MapsRequest`. `nvml.descriptors` answers it, no child."""

    wants: ClassVar[str] = "the descriptors of processes"

    processes: tuple[tuple[int, int], ...]


class MigRequest(PerGpuRequest, frozen=True, tag="Mig"):
    """MIG mode, profiles and instances. `brief`: mode, and numbers and UUIDs of MIG devices, to see whether anything changed."""

    wants: ClassVar[str] = "its MIG instances"

    brief: bool = False


class MigModeRequest(PerGpuRequest, frozen=True, tag="MigMode"):
    """Switch MIG mode."""

    wants: ClassVar[str] = "a change of its MIG mode"

    on: bool


class MigCreateRequest(PerGpuRequest, frozen=True, tag="MigCreate"):
    """Create a GPU instance and its compute instance. `profile`: its number."""

    wants: ClassVar[str] = "a MIG instance"

    profile: int
    start: int


class MigDestroyRequest(PerGpuRequest, frozen=True, tag="MigDestroy"):
    """Remove a GPU instance and its compute instances. `instance`: its ID."""

    wants: ClassVar[str] = "the end of a MIG instance"

    instance: int


class NvmlReply(msgspec.Struct, frozen=True, tag=True):
    """An answer."""


class OpenReply(NvmlReply, frozen=True, tag="Opened"):
    """NVML is open. `path`: of the library in use."""

    found: Found
    path: str


class CountReply(NvmlReply, frozen=True, tag="Counted"):
    """How many GPUs there are. `driver`, `cuda`: its version, and the newest CUDA version that it supports; empty = not reported."""

    count: int
    driver: str
    cuda: str = ""


class GpuReply(NvmlReply, frozen=True, tag="OneGpu"):
    gpu: Gpu


class HealthReply(NvmlReply, frozen=True, tag="Health"):
    trouble: str | None
    """Why the GPU does not answer, for a person; None = it answers."""
    reading: Reading | None = None
    """Where it answers."""
    code: int = 0
    """NVML's number of the error."""
    heat: str | None = None
    """Its heat class, where the program that serves determines it; None = a child's own answer."""


class ProcessesReply(NvmlReply, frozen=True, tag="Held"):
    processes: tuple[ProcessUsage, ...]
    memory: MemoryUse | None = None
    """Of the GPU or MIG instance, as the driver counts it. None = the driver does not report it, or the list is not whole."""


class UtilisationReply(NvmlReply, frozen=True, tag="Computed"):
    busy: Busy


class XidsReply(NvmlReply, frozen=True, tag="XidsSeen"):
    xids: tuple[Xid, ...]
    unwatched: dict[str, str]
    """UUID -> why its events cannot be had."""


class MapsReply(NvmlReply, frozen=True, tag="Mapped"):
    """One for each process that was named; None = unknown."""

    mapped: tuple[bool | None, ...]


class DescriptorsReply(NvmlReply, frozen=True, tag="Opens"):
    """One for each process that was named; None = unknown."""

    opens: tuple[bool | None, ...]


class MigReply(NvmlReply, frozen=True, tag="MigFacts"):
    """Without MIG, only the first two are set; without MIG mode, neither profiles nor instances."""

    device_id: str
    """PCI device ID, `0x233010de`."""
    model: str
    capable: bool = False
    mig: bool = False
    pending: bool = False
    profiles: tuple[MigProfile, ...] = ()
    instances: tuple[MigInstanceFacts, ...] = ()


class MigModeReply(NvmlReply, frozen=True, tag="MigModeSet"):
    active: bool
    """False: the mode is pending until the GPU is reset."""


class MigCreatedReply(NvmlReply, frozen=True, tag="MigCreated"):
    instance: MigInstanceFacts


class MigDestroyedReply(NvmlReply, frozen=True, tag="MigDestroyed"):
    pass


Kind = Literal["opening", "away", "hung", "half", "refused"]


class ErrorReply(NvmlReply, frozen=True, tag="Failed"):
    """Instead of the answer."""

    KINDS: ClassVar[dict[Kind, type[NvmlError]]] = {
        "opening": NvmlOpening,
        "away": NvmlAway,
        "hung": NvmlHung,
        "half": NvmlHalf,
        "refused": NvmlError,
    }
    """The narrowest first."""
    text: str
    code: int = 0
    kind: Kind = "refused"

    @classmethod
    def of(cls, error: NvmlError) -> ErrorReply:
        kind = next(kind for kind, of in cls.KINDS.items() if isinstance(error, of))
        return cls(str(error), error.code, kind)

    @property
    def error(self) -> NvmlError:
        return self.KINDS[self.kind](self.text, self.code)


AnyRequest = (
    OpenRequest
    | CountRequest
    | GpuAtRequest
    | HealthRequest
    | ProcessesRequest
    | UtilisationRequest
    | XidsRequest
    | MapsRequest
    | DescriptorsRequest
    | MigRequest
    | MigModeRequest
    | MigCreateRequest
    | MigDestroyRequest
)
AnyReply = (
    OpenReply
    | CountReply
    | GpuReply
    | HealthReply
    | ProcessesReply
    | UtilisationReply
    | XidsReply
    | MapsReply
    | DescriptorsReply
    | MigReply
    | MigModeReply
    | MigCreatedReply
    | MigDestroyedReply
    | ErrorReply
)
ServedRequest = CountRequest | HealthRequest | ProcessesRequest | UtilisationRequest | MapsRequest | DescriptorsRequest
"""What other programs may request: nothing that changes a GPU. Each XID event is reported once, to the supervisor's program."""


class RequestPacket(msgspec.Struct, frozen=True, array_like=True):
    number: int
    request: AnyRequest


class ServedPacket(msgspec.Struct, frozen=True, array_like=True):
    number: int
    request: ServedRequest


class ReplyPacket(msgspec.Struct, frozen=True, array_like=True):
    number: int
    reply: AnyReply


encode: Final = msgspec.msgpack.Encoder().encode
decode_requests: Final = msgspec.msgpack.Decoder(list[RequestPacket]).decode
decode_served: Final = msgspec.msgpack.Decoder(ServedPacket).decode
decode_reply: Final = msgspec.msgpack.Decoder(ReplyPacket).decode
decode_replies: Final = msgspec.msgpack.Decoder(list[ReplyPacket]).decode
MALFORMED: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
