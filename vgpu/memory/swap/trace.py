"""Traces of the swap policy: its events, as JSON lines, so that a wrong decision can be reported as a file and made again.

One event is one JSON object on a line, with `type` first. A `Decided` stands for each call of `decide`: which events were applied between two
decisions is part of what led to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from vgpu.api.errors import BadDocument
from vgpu.memory.swap.actions import Action
from vgpu.memory.swap.events import Decided, Event
from vgpu.memory.swap.policy import SwapPolicy
from vgpu.memory.swap.settings import SwapSettings

_decoder = msgspec.json.Decoder(Event | Decided)


def to_lines(events: Iterable[Event | Decided]) -> bytes:
    """The events as JSON lines."""
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def from_lines(lines: bytes) -> Iterator[Event | Decided]:
    """The events of `to_lines`. Raises BadDocument with the line number."""
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, BadDocument) as error:
            raise BadDocument(f"trace line {number}: {error}") from None


def replay(events: Iterable[Event | Decided], settings: SwapSettings | None = None) -> Iterator[tuple[float, Action]]:
    """The actions of a policy to which this happens, each with the time of its decision."""
    policy = SwapPolicy(settings)
    for event in events:
        if isinstance(event, Decided):
            for action in policy.decide(event.at_s):
                yield event.at_s, action
        else:
            policy.apply(event)
