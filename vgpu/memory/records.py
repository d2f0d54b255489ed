"""The records of a ledger: the part of one process on a GPU, its requests, and the messages to it.

`vgpu.memory.ledger` has the rules and `vgpu.memory.accounts` the sums; this module only defines the records. Bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from vgpu.memory.ceiling import Ceiling, Refusal
from vgpu.memory.context import ContextMeasure


@dataclass(frozen=True, slots=True)
class Part:
    """One process's part of a GPU."""

    leased_bytes: int
    used_bytes: int
    context_bytes: int
    measured_bytes: int | None
    """NVML's last count; None before the first."""
    made_bytes: int = 0
    """The size of its contexts when they were made, or their estimate; 0 = unknown."""
    managed_bytes: int = 0
    """The part of the used memory that NVML lists for no process; 0 also if the library does not count it."""
    still: bool = False
    """Lease and statement did not change around the last reading: they are the same as when NVML was read."""
    away_bytes: int = 0
    """The part of the lease that was in host memory at the last reading, and so is not in `measured_bytes`."""


@dataclass(slots=True)
class ProcessRecord:
    leased_bytes: int = 0
    elastic_bytes: int = 0
    """The elastic part of the lease."""
    unsorted_bytes: int = 0
    """The part that counts as resident because the process stated its lease to this arbiter without the kind."""
    away_bytes: int = 0
    """The part of the lease that was in host memory at the last reading."""
    used_bytes: int = 0
    managed_bytes: int = 0
    """The managed part of the used memory."""
    context: ContextMeasure = field(default_factory=ContextMeasure)
    made_bytes: int = 0
    """The size of its contexts when they were made; 0 = there are none, or it is unknown."""
    known: bool = False
    """It has stated its lease from before the connection, or has sent a request since: a later statement is no re-statement."""
    begun: bool = False
    """It has requested a context since it connected."""
    recall: int = 0
    """Number of the unanswered recall; 0 = none."""
    recalled_at_s: float = 0.0
    """When that recall was sent."""

    @property
    def part(self) -> Part:
        """The part of it that other modules read."""
        of = self.context
        allocated = self.leased_bytes, self.used_bytes
        return Part(
            *allocated, of.bytes, of.measured_bytes, self.made_bytes, self.managed_bytes, of.still, self.away_bytes
        )


@dataclass(frozen=True, slots=True)
class Granted:
    """To `process`: its request `seq` is granted these bytes."""

    process: int
    gpu: int
    seq: int
    granted_bytes: int


@dataclass(frozen=True, slots=True)
class Denied:
    """To `process`: its request `seq` does not fit."""

    process: int
    gpu: int
    seq: int
    refusal: Refusal | None = None
    """Why, if its container's limits allow it and it can never be granted."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """To `process`: return up to this many unused bytes, and answer with `recall`."""

    process: int
    gpu: int
    recall: int
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """To `process`: its request `seq` waits for this much memory that other containers have now."""

    process: int
    gpu: int
    seq: int
    missing_bytes: int


Event = Granted | Denied | Recalled | Waiting


class NodeAnswer(Enum):
    """Whether a GPU has the memory for a request that its container's limits allow."""

    GRANTED = "granted"
    """The memory is free, and counts as this container's from now on."""
    WAITS = "waits"
    """Others have to give way first; `Ledger.node_decided` follows."""
    REFUSED = "refused"


class NodeRoom(Protocol):
    """The memory of the node's GPUs, for one container. GPUs by their number in its grant."""

    def knows_limits(self, gpu: int) -> bool:
        """Whether the container's limit on this GPU is known: not while it may rise above its guarantee in a moment."""

    def decides(self, gpu: int) -> bool:
        """Whether this GPU's containers may burst, so that requests need its decision."""

    def ceiling(self, gpu: int) -> Ceiling | None:
        """The most that the container can ever have in all; None: not known."""

    def use(self, gpu: int, claimed_bytes: tuple[int, int]) -> None:
        """What the container has now, as `Ledger.claimed_bytes`."""

    def request(
        self, gpu: int, process: int, seq: int, need_bytes: int, *, elastic: bool, waited_s: float
    ) -> NodeAnswer:
        """A process requests memory, beside what `use` said last. `waited_s`: how long the same allocation has waited before."""

    def withdraw(self, gpu: int, process: int, seq: int) -> None:
        """Nothing waits for this request any more."""

    def free_bytes(self, gpu: int) -> int:
        """What could be granted beyond any request, as no other container lacks it."""


@dataclass(slots=True)
class LeaseRequest:
    process: int
    seq: int
    need_bytes: int
    want_bytes: int
    context: bool = False
    """The bytes are for a context, not for allocations."""
    bound: bool = False
    """The bytes are for calls of unknown cost."""
    elastic: bool = False
    """The bytes are for memory that can be swapped out."""
    waited_s: float = 0.0
    """The allocation has waited for so long before this request."""
    key: bytes = b""
    """The bytes are for memory of this key, which the process opened; empty otherwise."""
    recalled: bool = False
    requested_at_s: float = 0.0
    until_s: float = 0.0
    waits_for: set[int] = field(default_factory=set)
    """Processes that have not answered a recall."""
    owed: set[int] = field(default_factory=set)
    """Of those that it waited for, the ones whose recall was an earlier request's: they are sent another once they have answered."""
    awaits_limits: bool = False
    """It does not fit, and waits until the container's limits are known."""

    @property
    def kind(self) -> str:
        """The type of the request's message."""
        return "GROW" if self.bound else "CONTEXT" if self.context else "HOLD" if self.key else "LEASE"


@dataclass(frozen=True, slots=True)
class Promise:
    """Memory reserved for a context that a process has not begun."""

    bytes: int
    until_s: float
