"""The records of a ledger: what one process has of a GPU, what it requests, and what is sent to it.

The rules are the ledger's (`vgpu.memory.ledger`), the sums its GPU records' (`vgpu.memory.accounts`); here is only what is written down. Bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vgpu.memory.context import ContextMeasure


@dataclass(frozen=True, slots=True)
class Part:
    """One process's part of a GPU."""

    leased_bytes: int
    used_bytes: int
    context_bytes: int
    measured_bytes: int | None
    """NVML's last word; None before the first."""
    made_bytes: int = 0
    """What its contexts took when they were made, or may take; 0 = that is not known."""
    managed_bytes: int = 0
    """Of what is used, what NVML lists for no process; 0 also where the library does not count it."""
    still: bool = False
    """Lease and statement stood still around the last reading: they are as they were when NVML was read."""


@dataclass(slots=True)
class Holding:
    leased_bytes: int = 0
    used_bytes: int = 0
    managed_bytes: int = 0
    """Of what is used."""
    context: ContextMeasure = field(default_factory=ContextMeasure)
    made_bytes: int = 0
    """What its contexts took when they were made; 0 = there are none, or that is not known."""
    known: bool = False
    """It stated what it held before it connected, or has asked since: a statement is no re-statement any more."""
    begun: bool = False
    """It has requested a context since it connected."""
    recall: int = 0
    """Number of the recall it has not answered; 0 = none."""
    recalled_at_s: float = 0.0
    """When that was sent."""

    @property
    def part(self) -> Part:
        """What others are to know of it."""
        of = self.context
        allocated = self.leased_bytes, self.used_bytes
        return Part(*allocated, of.bytes, of.measured_bytes, self.made_bytes, self.managed_bytes, of.still)


@dataclass(frozen=True, slots=True)
class Granted:
    """To `process`: its request `seq` has so many bytes."""

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


@dataclass(frozen=True, slots=True)
class Wanted:
    """To `process`: return up to so many unused bytes, and answer with `recall`."""

    process: int
    gpu: int
    recall: int
    missing_bytes: int


Event = Granted | Denied | Wanted


@dataclass(slots=True)
class LeaseRequest:
    process: int
    seq: int
    need_bytes: int
    want_bytes: int
    context: bool = False
    """The bytes are for a context, not for allocations."""
    bound: bool = False
    """They are for calls whose cost is not known yet."""
    key: bytes = b""
    """They are for memory of this key, which the process opened; empty for all else."""
    recalled: bool = False
    requested_at_s: float = 0.0
    until_s: float = 0.0
    waits_for: set[int] = field(default_factory=set)

    @property
    def kind(self) -> str:
        """The message that asked."""
        return "GROW" if self.bound else "CONTEXT" if self.context else "HOLD" if self.key else "LEASE"


@dataclass(frozen=True, slots=True)
class Promise:
    """What is kept for a context that a process has not begun."""

    bytes: int
    until_s: float
