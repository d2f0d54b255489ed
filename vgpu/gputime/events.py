"""What happens to the containers of a node's GPUs, as a list of events that can be written down and replayed.

An arbiter that records its events hands over a file from which `vgpu.gputime.scheduler` makes the same decisions again, so a report of a
wrong decision is a file. One event is one JSON object on a line, with `type` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from vgpu.api.errors import BadDocument
from vgpu.api.names import CLASSES, DEFAULT_CLASS, DEFAULT_LEVEL, LEVELS


class Container(msgspec.Struct, frozen=True):
    """What a container requested. `gpus`: all that it uses; several make it a gang."""

    gpus: frozenset[str]
    service_class: str = DEFAULT_CLASS
    level: int = DEFAULT_LEVEL
    cap_percent: float = 0.0
    """Of each of its GPUs; 0 = no cap."""
    weight: float = 1.0
    """Its part among equals."""
    pace: float = 1.0
    """Part of its time on with work that it pays for; less than 1 where it does not say itself when it works, and was seen to
    work for less."""

    def __post_init__(self) -> None:
        if not self.gpus:
            raise BadDocument("container without a GPU: at least one is needed")
        if self.service_class not in CLASSES:
            raise BadDocument(f"class {self.service_class!r} of a container: one of {', '.join(CLASSES)}")
        if self.level not in LEVELS:
            raise BadDocument(f"level {self.level} of a container: {LEVELS[0]} to {LEVELS[-1]}")
        if not 0 <= self.cap_percent <= 100:
            raise BadDocument(f"cap of {self.cap_percent} percent: 0 (none) to 100")
        if not self.weight > 0:
            raise BadDocument(f"weight {self.weight} of a container: more than 0")
        if not 0 <= self.pace <= 1:
            raise BadDocument(f"pace {self.pace} of a container: 0 to 1")


class _Event(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    at_s: float
    name: str


class Join(_Event, frozen=True, tag_field="type", tag=str.lower):
    """A container came, with everything on; or one that is here changed."""

    container: Container


class Leave(_Event, frozen=True, tag_field="type", tag=str.lower):
    """It is gone."""


class Work(_Event, frozen=True, tag_field="type", tag=str.lower):
    """It has work for the GPU now."""


class Idle(_Event, frozen=True, tag_field="type", tag=str.lower):
    """Its last work is done."""


class Hint(_Event, frozen=True, tag_field="type", tag=str.lower):
    """It says that work comes in `in_s` seconds."""

    in_s: float


class Begin(_Event, frozen=True, tag_field="type", tag=str.lower):
    """It says that a section of work begins."""


class End(_Event, frozen=True, tag_field="type", tag=str.lower):
    """It says that the section, or what it announced, is over."""


class Switched(_Event, frozen=True, tag_field="type", tag=str.lower):
    """It is on or off now; that took `took_s`. Off by its gate: what it launches waits there, and nothing of it is on the GPU."""

    on: bool
    took_s: float
    gate: bool = False


class Stalled(_Event, frozen=True, tag_field="type", tag=str.lower):
    """Until now the arbiter did not run for the GPU `name`, though it was due at `since_s`: nothing was decided."""

    since_s: float


class Late(_Event, frozen=True, tag_field="type", tag=str.lower):
    """It has computed for `late_s` until now, unnoticed: a process's channels run until the arbiter has met it."""

    late_s: float


Event = Join | Leave | Work | Idle | Hint | Begin | End | Switched | Stalled | Late
_decoder = msgspec.json.Decoder(Event)


def to_lines(events: Iterable[Event]) -> bytes:
    """The events as JSON lines."""
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def from_lines(lines: bytes) -> Iterator[Event]:
    """The events of `to_lines`. Raises BadDocument that names the line."""
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, BadDocument) as error:
            raise BadDocument(f"trace line {number}: {error}") from None
