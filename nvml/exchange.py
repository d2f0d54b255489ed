"""One packet of requests to a child, and its packet of replies, each call within a time of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from nvml.messages import MALFORMED, AnyReply, AnyRequest, RequestPacket, decode_replies, encode
from nvml.process import PACKET_BYTES, Child, Wake

REPORTED: Final = 200
"""Characters of what is wrong with an answer."""


class Hangs(Exception):
    """The call after so many of a packet that were answered does not return."""

    def __init__(self, answered: int) -> None:
        super().__init__(answered)
        self.answered = answered


class NoAnswer(Exception):
    """What the child sent is no answer; the text gives the reason."""


def exchange(
    child: Child,
    first: int,
    requests: Sequence[AnyRequest],
    limit_s: float,
    wake: Wake,
    tick_s: float,
    check: Callable[[], None],
) -> list[AnyReply]:
    """Replies to these, or to the first of them. `first`: the number of the first one. `limit_s`: for each call. `check` is called after
    each wake-up, every `tick_s` at least, and may raise. Raises Hangs, NoAnswer, Ended."""
    child.send(encode([RequestPacket(first + at, request) for at, request in enumerate(requests)]))
    until_s, answered, last = time.monotonic() + limit_s, 0, len(requests) - 1
    while True:
        packet = child.receive(min(until_s, time.monotonic() + tick_s), wake)
        check()
        if packet is not None:
            return _understood(packet, range(first, first + len(requests)))
        came, at_s = child.answered(), time.monotonic()
        if came and answered < last:  # one that counts without end gains no time by it
            answered, until_s = min(answered + came, last), at_s + limit_s
        elif at_s >= until_s:
            raise Hangs(answered)


def _understood(packet: bytes, numbers: Sequence[int]) -> list[AnyReply]:
    try:
        if len(packet) > PACKET_BYTES:
            raise ValueError(f"more than {PACKET_BYTES} bytes")
        answers = decode_replies(packet)
        found = [answer.number for answer in answers]
        if not found or found != list(numbers[: len(found)]):
            raise ValueError(f"numbers {found}, not {list(numbers)}")
    except (*MALFORMED, ValueError) as error:
        raise NoAnswer(str(error)[:REPORTED]) from None
    return [answer.reply for answer in answers]
