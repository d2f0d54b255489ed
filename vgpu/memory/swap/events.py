"""What happens to the memory of a node's containers, as events that can be recorded.

The caller applies an event when its own records have changed, in the order of the changes. Names of containers and GPUs are the caller's, times are
seconds of any one clock that never goes back, sizes are bytes.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from vgpu.api.errors import BadDocument
from vgpu.api.names import CLASSES, DEFAULT_CLASS, DEFAULT_LEVEL, LEVELS

WAIT_MOST_S: Final = 3600.0
"""The longest time that a request may wait for memory above the guarantee. Specified: the file `burst` allows 0 to 3600."""


class MemoryContract(msgspec.Struct, frozen=True):
    """What a container may have and how urgent it is. `gpus`: GPU -> (guarantee, limit in all); equal numbers: it cannot burst."""

    gpus: dict[str, tuple[int, int]]
    service_class: str = DEFAULT_CLASS
    level: int = DEFAULT_LEVEL
    weight: float = 1.0
    """Its relative part among containers of equal urgency that take turns."""

    def __post_init__(self) -> None:
        if not self.gpus:
            raise BadDocument("container without a GPU: at least one is needed")
        for gpu, (guarantee_bytes, limit_bytes) in self.gpus.items():
            if not 0 <= guarantee_bytes <= limit_bytes:
                raise BadDocument(f"guarantee of {guarantee_bytes} bytes of GPU {gpu}: 0 to the limit of {limit_bytes}")
        if self.service_class not in CLASSES:
            raise BadDocument(f"class {self.service_class!r} of a container: one of {', '.join(CLASSES)}")
        if self.level not in LEVELS:
            raise BadDocument(f"level {self.level} of a container: {LEVELS[0]} to {LEVELS[-1]}")
        if not self.weight > 0:
            raise BadDocument(f"weight {self.weight} of a container: more than 0")


class _Event(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    at_s: float


class _OfContainer(_Event, frozen=True, tag_field="type", tag=True):
    name: str


class GpuSeen(_Event, frozen=True, tag=True):
    """A GPU has `capacity_bytes` for containers: contexts of the node's own processes are already taken off."""

    gpu: str
    capacity_bytes: int


class PoolSeen(_Event, frozen=True, tag=True):
    """The host pool of a GPU has slots for `free_bytes` more than the blocks that are away now. `ready`: the copier answers."""

    gpu: str
    free_bytes: int
    ready: bool


class Joined(_OfContainer, frozen=True, tag=True):
    """A container joined. Without `Able` it does not burst."""

    contract: MemoryContract


class Changed(_OfContainer, frozen=True, tag=True):
    """A container's guarantees, limits or urgency changed; its GPUs stay the same."""

    contract: MemoryContract


class Left(_OfContainer, frozen=True, tag=True):
    """The container ended. Its memory, its slots and its requests are gone."""


class Used(_OfContainer, frozen=True, tag=True):
    """What a container has leased of a GPU, in all. Every `Grant` and `Progress` until now is counted."""

    gpu: str
    resident_bytes: int
    """What cannot be swapped: plain leases, contexts, shared memory."""
    elastic_bytes: int
    """What can be, on the GPU or away."""
    away_bytes: int
    """The part of `elastic_bytes` that is not on the GPU."""


class Requested(_OfContainer, frozen=True, tag=True):
    """A process of the container waits for a lease. Above the guarantee it waits for at most `wait_s`."""

    id: str
    gpu: str
    bytes: int
    elastic: bool
    wait_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.wait_s <= WAIT_MOST_S:
            raise BadDocument(f"request that waits for {self.wait_s} s: 0 to {WAIT_MOST_S:g}")
        if self.bytes < 0:
            raise BadDocument(f"request of {self.bytes} bytes: 0 or more")


class Withdrawn(_Event, frozen=True, tag=True):
    """Nobody waits for this request any more."""

    id: str


class Working(_OfContainer, frozen=True, tag=True):
    """The container has work for its GPUs from now on. One that is paused has it as soon as it tries."""


class Idle(_OfContainer, frozen=True, tag=True):
    """The container's last work ended."""


class Announced(_OfContainer, frozen=True, tag=True):
    """The container announces work in `in_s` seconds."""

    in_s: float


class Able(_OfContainer, frozen=True, tag=True):
    """The container's library can swap; also, can again: after `Unable`, and after the policy reported that it did not give way."""


class Unable(_OfContainer, frozen=True, tag=True):
    """The container cannot swap, or cannot carry out the present order, which ends."""

    reason: str


class Suspended(_OfContainer, frozen=True, tag=True):
    """All channels of the container that is to be swapped out are suspended: from now on it is the library's part to name blocks."""


class Progress(_OfContainer, frozen=True, tag=True):
    """`bytes` more have left the GPU ("out": their blocks are released), or are about to take memory of it ("in": the library is sent the order
    to make their blocks; never more than `SwapPolicy.room_bytes`)."""

    gpu: str
    direction: Literal["out", "in"]
    bytes: int


class SwappedOut(_OfContainer, frozen=True, tag=True):
    """A swap out, or what was done of a cancelled one, is complete on this GPU: nothing more leaves it."""

    gpu: str


class SwappedIn(_OfContainer, frozen=True, tag=True):
    """All of the container's memory on this GPU is back, with its content."""

    gpu: str


class Failed(_OfContainer, frozen=True, tag=True):
    """The present order failed and ended, on all GPUs of the container. Blocks are whole on one side: a `Used` before it states what is away now."""

    gpu: str
    reason: str


class Decided(_Event, frozen=True, tag=True):
    """`decide` was called. It changes nothing: only traces have it."""


class Stalled(_Event, frozen=True, tag=True):
    """The caller did not run for so many seconds until now: this time counts against no container."""

    seconds: float


ContainerEvent = (
    Joined | Changed | Left | Used | Requested | Working | Idle | Announced
    | Able | Unable | Suspended | Progress | SwappedOut | SwappedIn | Failed
)  # fmt: skip
Event = GpuSeen | PoolSeen | Withdrawn | Stalled | ContainerEvent
