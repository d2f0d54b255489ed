"""The arbiter, with a clock at each of its switches: python3 watched.py FILE [twice] [unrehearsed]

What it saw is in FILE when it ends: `suspend,562.1,8123456.7,41.2` is one call, its microseconds, when it began by CLOCK_MONOTONIC, and for
how long the GPU's thread had been awake then (of several calls in a row the first counts). With `twice` each resume is issued again at once, as `enabled`: what it costs to enable channels that are enabled. With `unrehearsed` nothing is kept warm for a
request. Settings come from the environment, as for the arbiter.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from arbiter.__main__ import main
from arbiter.gputime.channels import ChannelGroup
from arbiter.gputime.suspend_thread import SuspendThread
from arbiter.gputime.warm_up import WarmUp

Seen = tuple[str, float, float, float]
_thread = threading.local()


def waking(plain: Callable[[SuspendThread], list[tuple[int, int]]]) -> Callable[[SuspendThread], list[tuple[int, int]]]:
    def call(suspend_thread: SuspendThread) -> list[tuple[int, int]]:
        ready = plain(suspend_thread)
        _thread.woke = time.monotonic_ns()
        return ready

    return call


def timed(what: str, plain: Callable[..., int], seen: list[Seen]) -> Callable[..., int]:
    def call(channel_group: ChannelGroup, **how: bool) -> int:
        began = time.monotonic_ns()
        awake = began - getattr(_thread, "woke", began)
        status = plain(channel_group, **how)
        seen.append((what, (time.monotonic_ns() - began) / 1000, began / 1000, awake / 1000))
        return status

    return call


def watch(file: Path, twice: bool, rehearsed: bool) -> None:
    seen: list[Seen] = []
    suspend, resume = timed("suspend", ChannelGroup.suspend, seen), timed("resume", ChannelGroup.resume, seen)
    again = timed("enabled", ChannelGroup.resume, seen)

    def resume_twice(channel_group: ChannelGroup) -> int:
        return resume(channel_group) or again(channel_group)

    SuspendThread._wait = waking(SuspendThread._wait)  # type: ignore[method-assign]
    ChannelGroup.suspend = suspend  # type: ignore[method-assign, assignment]
    ChannelGroup.resume = resume_twice if twice else resume  # type: ignore[method-assign, assignment]
    if not rehearsed:
        WarmUp.play = lambda *_: None  # type: ignore[method-assign]
    try:
        main([])
    finally:
        file.write_text("".join(f"{what},{us:.1f},{began:.1f},{awake:.1f}\n" for what, us, began, awake in seen))


if __name__ == "__main__":
    watch(Path(sys.argv[1]), "twice" in sys.argv[2:], "unrehearsed" not in sys.argv[2:])
