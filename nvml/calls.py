"""Requests that wait for the child, each with its reply once there is one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nvml.messages import TOGETHER, AnyReply, AnyRequest, ErrorReply


@dataclass(slots=True)
class PendingCall:
    """One request."""

    request: AnyRequest
    done: threading.Event = field(default_factory=threading.Event)
    reply: AnyReply | None = None
    given_up: bool = False

    def answer(self, reply: AnyReply) -> None:
        """Set the reply; the waiting caller continues."""
        self.reply = reply
        self.done.set()


def next_calls(calls: deque[PendingCall]) -> list[PendingCall]:
    """Remove the first ones that a caller waits for, as many as fit one packet."""
    found: list[PendingCall] = []
    while calls and len(found) < TOGETHER:
        call = calls.popleft()
        found += [] if call.given_up else [call]
    return found


def fail(calls: Iterable[PendingCall], why: str) -> None:
    """No child answers those of these that have no reply."""
    for call in calls:
        if call.reply is None:
            call.answer(ErrorReply(why, kind="away"))
