"""Requests that wait for the child, each with its reply once there is one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nvml.messages import TOGETHER, AnyReply, AnyRequest, Failed


@dataclass(slots=True)
class Call:
    """One request."""

    request: AnyRequest
    done: threading.Event = field(default_factory=threading.Event)
    reply: AnyReply | None = None
    given_up: bool = False

    def answer(self, reply: AnyReply) -> None:
        """Whoever waits for it goes on."""
        self.reply = reply
        self.done.set()


def next_calls(calls: deque[Call]) -> list[Call]:
    """Take the first ones that somebody waits for, as many as are carried together."""
    found: list[Call] = []
    while calls and len(found) < TOGETHER:
        call = calls.popleft()
        found += [] if call.given_up else [call]
    return found


def fail(calls: Iterable[Call], why: str) -> None:
    """No child answers those of these that have no reply."""
    for call in calls:
        if call.reply is None:
            call.answer(Failed(why, kind="away"))
