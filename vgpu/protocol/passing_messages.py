"""The messages by which a process opens elastic memory of another one, and the lease of such memory becomes resident."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class Convert:
    """Library: so many bytes of its elastic lease become resident lease, because the memory stays on the GPU from now on. Answered by Leased."""

    gpu: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Open:
    """Library: requests the memory of an emulated IPC handle. Answered by Exported."""

    handle: bytes


@dataclass(frozen=True, slots=True)
class Export:
    """Arbiter: another process of the pod opens this handle of yours. Answered by Exported."""

    handle: bytes


class UnopenedReason(IntEnum):
    """Why an emulated handle is not opened."""

    UNKNOWN = 1
    """No process of the pod has such memory."""
    NO_ANSWER = 2
    """The process that has it did not answer in time."""
    NO_DESCRIPTOR = 3
    """No file descriptor is free."""
    DRIVER = 4
    """The driver refused to export it."""
    BUSY = 5
    """Too many requests are not answered, or not read."""
    NO_GPU = 6
    """It is on a GPU that this container does not have."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Library, and passed on by the arbiter: blocks of the memory. A descriptor of each comes along, in the same order. Several messages, if there are more
    blocks than one can have."""

    gpu: int
    bytes: int
    """Of the range of addresses that all blocks have together."""
    total: int
    """Blocks in all."""
    first: int
    """How many blocks came in earlier messages."""
    blocks: tuple[int, ...]
    """Their sizes in bytes; none: it is refused."""
    reason: UnopenedReason | None = None
    """Why it is refused."""


PassingMessage = Convert | Open | Export | Exported
