"""Requests to open memory of another process, from OPEN to the last EXPORTED: which are unanswered, and whether an answer fits its request.

Pure: it knows processes by any value, and neither sockets nor descriptors. A process has at most one request, and one process is asked for at most
`ASKED_LIMIT` exports at a time. Every request ends: by its answer, by a refusal, by the end of either process, or after `EXPORT_WAIT_S`. Time in seconds of any one clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from vgpu.api.errors import BadDocument

EXPORT_WAIT_S: Final = 1.5
"""How long a process has to export its memory. Specified: the library that opens it waits 2 s in all (protocol.md)."""
ASKED_LIMIT: Final = 16
"""Unanswered EXPORTs of one process. Guessed: a job has at most 8 or 16 processes on a node, and each opens one handle at a time."""


@dataclass(frozen=True, slots=True)
class ExportedPart:
    """One EXPORTED that is no refusal: so many blocks after the `first`, of `total` blocks of `bytes` in all."""

    bytes: int
    total: int
    first: int
    blocks: tuple[int, ...]
    """Their sizes."""


@dataclass(slots=True)
class OpenRequest:
    """One OPEN. `exporter` None: no process has stated that it has the memory, and after a restart one may still do so."""

    opener: Hashable
    seq: int
    handle: bytes
    gpu: int
    """The number of its GPU for the process that opens it."""
    exporter: Hashable | None
    until_s: float
    came: int = 0
    """Blocks that came so far."""
    total: int = 0
    bytes: int = 0
    left_bytes: int = 0


class OpenRequests:
    """See the module."""

    def __init__(self) -> None:
        self._by_number: dict[int, OpenRequest] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def asked(self, exporter: Hashable) -> int:
        """How many exports this process owes."""
        return sum(request.exporter == exporter for request in self._by_number.values())

    def begin(self, request: OpenRequest) -> int | None:
        """The number of the request, which EXPORT and EXPORTED have; None if the process that has the memory owes too many. Raises BadDocument."""
        if any(other.opener == request.opener for other in self._by_number.values()):
            raise BadDocument("OPEN while an earlier one is not answered: one at a time")
        if request.exporter is not None and self.asked(request.exporter) >= ASKED_LIMIT:
            return None
        self._numbers = self._numbers % 0x7FFFFFFF + 1
        self._by_number[self._numbers] = request
        return self._numbers

    def answered(self, exporter: Hashable, number: int, part: ExportedPart | None) -> OpenRequest | None:
        """The request that this answers (`part` None: with a refusal), which ends with the last part; None if it has ended before, or is of another process.
        Raises BadDocument if a part contradicts an earlier one."""
        request = self._by_number.get(number)
        if request is None or request.exporter != exporter:
            return None
        last = part is None
        if part is not None:
            last = part.first + len(part.blocks) == part.total
            self._count(request, part, last=last)
        if last:
            del self._by_number[number]
        return request

    @staticmethod
    def _count(request: OpenRequest, part: ExportedPart, *, last: bool) -> None:
        if request.came == 0:
            request.total, request.bytes, request.left_bytes = part.total, part.bytes, part.bytes
        request.left_bytes -= sum(part.blocks)
        expected = request.came, request.total, request.bytes
        if (part.first, part.total, part.bytes) != expected or last is not (request.left_bytes == 0):
            raise BadDocument(
                f"packet EXPORTED has blocks from {part.first}, of {part.total} and {part.bytes} bytes in all, and {request.left_bytes} bytes follow: "
                f"expected from {expected[0]}, of {expected[1]} and {expected[2]} bytes"
            )
        request.came += len(part.blocks)

    def end(self, number: int) -> None:
        """It is answered otherwise."""
        self._by_number.pop(number, None)

    def left(self, process: Hashable) -> list[OpenRequest]:
        """This process is gone, and its requests with it. Returns those that waited for its memory."""
        waited = [one for one in self._by_number.values() if one.exporter == process and one.opener != process]
        self._by_number = {
            number: one for number, one in self._by_number.items() if process not in (one.opener, one.exporter)
        }
        return waited

    def expired(self, now_s: float) -> list[OpenRequest]:
        """Remove and return the requests that have waited long enough."""
        due = {number: one for number, one in self._by_number.items() if now_s >= one.until_s}
        for number in due:
            del self._by_number[number]
        return list(due.values())

    def due_s(self) -> float | None:
        """When `expired` is to be called next, or None."""
        return min((one.until_s for one in self._by_number.values()), default=None)
