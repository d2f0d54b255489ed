"""Whether a container can be swapped, as it is reported to the swap policy: all its processes can, and its last orders did not fail."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Final

from arbiter.swap.process import SwapProcess

RECONNECT_S: Final = 1.0
"""How long a process may be without a connection before its container is unable. Specified: a library connects again within 200 ms."""
UNABLE_S: Final = 30.0
"""After which a container whose orders failed, or that did not give way, is tried again. Guessed."""
FAILURES: Final = 3
"""Orders in a row that failed, after which it counts as unable. Guessed."""
NO_PROCESS: Final = "no process of it is connected"


class Ability:
    """`able`: as the policy knows it; None = nothing was reported yet. `unable`: why not."""

    def __init__(self) -> None:
        self.able: bool | None = None
        self.unable = ""
        self._failures, self._failing, self._until_s = 0, "", -inf

    @property
    def deadline_s(self) -> float:
        """When it is tried again."""
        return self._until_s if self._failing else inf

    def succeeded(self) -> None:
        """An order ended as it should."""
        self._failures = 0

    def failed(self, reason: str, now_s: float, *, stuck: bool) -> None:
        """An order to move out failed. `stuck`: the next would, too."""
        self._failures += 1
        if stuck or self._failures >= FAILURES:
            self._failing, self._until_s, self._failures = reason, now_s + UNABLE_S, 0

    def refused(self, reason: str, now_s: float) -> None:
        """The policy counts it as unable by itself."""
        self.able, self.unable = False, reason
        self.failed(reason, now_s, stuck=True)

    def reason(self, processes: Collection[SwapProcess], lost: str, now_s: float) -> str | None:
        """Why it cannot be swapped; empty: it can. None: it will be known soon."""
        if self._failing and now_s < self._until_s:
            return self._failing
        self._failing = ""
        if lost:
            return lost
        if not processes:
            return NO_PROCESS
        reasons = [_reason(process, now_s) for process in processes]
        return next((reason for reason in reasons if reason), None if None in reasons else "")

    def change(self, reason: str | None) -> bool:
        """Note this; whether that must be reported to the policy."""
        if reason is None or (self.able is None and reason == NO_PROCESS):
            return False
        before = self.able, self.unable
        self.able, self.unable = not reason, reason
        return before != (self.able, self.unable)


def _reason(process: SwapProcess, now_s: float) -> str | None:
    if process.connected or process.broken:
        return process.unable
    return f"process {process.pid} is not connected" if now_s >= process.since_s + RECONNECT_S else None
