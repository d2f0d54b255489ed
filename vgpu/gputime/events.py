"""The events of the containers on a node's GPUs, as a list that can be recorded and replayed.

From a recorded file `vgpu.gputime.scheduler` makes the same decisions again, so a user can report a wrong decision as a file. One event is one
JSON object on a line, with `type` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from vgpu.api.errors import BadDocument
from vgpu.api.names import CLASSES, DEFAULT_CLASS, DEFAULT_LEVEL, LEVELS


class SchedulingParameters(msgspec.Struct, frozen=True):
    """The request of a container. `gpus`: all GPUs that it uses; it runs on all of them or on none."""

    gpus: frozenset[str]
    service_class: str = DEFAULT_CLASS
    level: int = DEFAULT_LEVEL
    cap_percent: float = 0.0
    """Of each of its GPUs, at most; 0 = no cap."""
    weight: float = 1.0
    """Its relative part among containers of equal urgency."""
    pace: float = 1.0
    """Part of its running time with work that it pays for; less than 1 if its usage reports do not count and the driver counted less
    work."""
    guaranteed_percent: float = 0.0
    """The part of the cap that is its guarantee: above it, the container runs only in time that no other needs. 0 = the whole cap."""

    @property
    def bursts(self) -> bool:
        """Whether it may use more than its guarantee."""
        return 0 < self.guaranteed_percent < self.cap_percent

    def __post_init__(self) -> None:
        if not self.gpus:
            raise BadDocument("container without a GPU: at least one is needed")
        if self.service_class not in CLASSES:
            raise BadDocument(f"class {self.service_class!r} of a container: one of {', '.join(CLASSES)}")
        if self.level not in LEVELS:
            raise BadDocument(f"level {self.level} of a container: {LEVELS[0]} to {LEVELS[-1]}")
        if not 0 <= self.cap_percent <= 100:
            raise BadDocument(f"cap of {self.cap_percent} percent: 0 (none) to 100")
        if not 0 <= self.guaranteed_percent <= self.cap_percent:
            raise BadDocument(f"guarantee of {self.guaranteed_percent} percent: 0 (all) to {self.cap_percent}, the cap")
        if not self.weight > 0:
            raise BadDocument(f"weight {self.weight} of a container: more than 0")
        if not 0 <= self.pace <= 1:
            raise BadDocument(f"pace {self.pace} of a container: 0 to 1")


class _Event(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    at_s: float
    name: str


class Join(_Event, frozen=True, tag_field="type", tag=str.lower):
    """A container joined, with all channels enabled; or the parameters of a known one changed."""

    container: SchedulingParameters


class Leave(_Event, frozen=True, tag_field="type", tag=str.lower):
    """The container left."""


class Work(_Event, frozen=True, tag_field="type", tag=str.lower):
    """The container has work for the GPU from now on."""


class Idle(_Event, frozen=True, tag_field="type", tag=str.lower):
    """The container's last work has ended."""


class Hint(_Event, frozen=True, tag_field="type", tag=str.lower):
    """The container announces work in `in_s` seconds."""

    in_s: float


class BeginSection(_Event, frozen=True, tag_field="type", tag="begin"):
    """The container reports that a section of work begins."""


class EndSection(_Event, frozen=True, tag_field="type", tag="end"):
    """The container reports that the section, or its announced work, is over."""


class Switched(_Event, frozen=True, tag_field="type", tag=str.lower):
    """The container was resumed or suspended; that took `took_s`. Suspended by its gate: its launches wait there, and it has no work on the GPU."""

    on: bool
    took_s: float
    gate: bool = False


class Stalled(_Event, frozen=True, tag_field="type", tag=str.lower):
    """The arbiter did not run for the GPU `name` until now, though it was due at `since_s`: no decision was made."""

    since_s: float


class Late(_Event, frozen=True, tag_field="type", tag=str.lower):
    """The container has computed for `late_s` before the arbiter noticed: a process's channels run until the process connects."""

    late_s: float


class Block(_Event, frozen=True, tag_field="type", tag=str.lower):
    """The container may not run from now on, whatever else happens: its memory is being swapped out, or is away."""


class Unblock(_Event, frozen=True, tag_field="type", tag=str.lower):
    """All memory of the container is on its GPUs again."""


class Hung(_Event, frozen=True, tag_field="type", tag=str.lower):
    """Whether a GPU of the container does not answer: while it is suspended, it cannot be resumed on all of its GPUs."""

    hung: bool


Event = (
    Join | Leave | Work | Idle | Hint | BeginSection | EndSection | Switched | Stalled | Late | Block | Unblock | Hung
)
_decoder = msgspec.json.Decoder(Event)


def to_lines(events: Iterable[Event]) -> bytes:
    """The events as JSON lines."""
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def from_lines(lines: bytes) -> Iterator[Event]:
    """The events of `to_lines`. Raises BadDocument with the line number."""
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, BadDocument) as error:
            raise BadDocument(f"trace line {number}: {error}") from None
