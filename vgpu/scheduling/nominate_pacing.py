"""Is nominating pods ahead of their scheduling cycle worth its writes in this cluster? Judged by the time between two calls of a busy scheduler.

A scheduler checks every node for a pod, and one node for a pod that is nominated. What that saves depends on the number of nodes, on
processors and on its other plugins, and what a nomination costs on the API server. Both are in the time from one pod's filter call to the
next one's: with the pod nominated, and without.

Pure: knows no API, and reads no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from vgpu.scheduling.nominate import BACKLOG

SAMPLES: Final = 16
"""Of each kind, by whose median they are compared. Guessed: at 10,000 nodes half a second of scheduling."""

SLOW_S: Final = 0.0015
"""Where a pod without a nomination takes less, nominating is not even tried. A nominated pod takes 1.3 to 2 ms on 16 cores and 2.6 to 5 on two, the write included (bench/scheduler)."""

GAIN: Final = 0.9
"""A nominated pod has to take less than this part of the time of a pod without a nomination. Guessed: a smaller saving is lost in noise."""

LONGEST_S: Final = 1.0
"""A scheduler that does not call for longer does something else, or has no pods to try."""

REST_S: Final = 60.0
"""For so long no pod is nominated where it was not worth it. Guessed."""

KNOWN_S: Final = 300.0
"""The time of a pod without a nomination is measured anew after so long, which costs the time of `SAMPLES` pods. Guessed: clusters grow, and other load comes and goes."""


def _samples() -> deque[tuple[float, float]]:
    return deque(maxlen=SAMPLES)


@dataclass(slots=True)
class Pacing:
    """When each call came, in seconds of one monotonic clock."""

    _in_turn: deque[tuple[float, float]] = field(default_factory=_samples)
    """When a call came, and for how long after the one before."""
    _nominated: deque[tuple[float, float]] = field(default_factory=_samples)
    _called_s: float = float("-inf")
    _busy: bool = False
    _rests_until_s: float = float("-inf")

    def called(self, now_s: float, *, nominated: bool, waiting: int) -> None:
        """The scheduler tries a pod, and so many others wait. The time counts if it had enough to do all along."""
        took_s, self._called_s = now_s - self._called_s, now_s
        busy, self._busy = self._busy, waiting >= BACKLOG
        if busy and took_s <= LONGEST_S:
            (self._nominated if nominated else self._in_turn).append((now_s, took_s))

    def worth(self, now_s: float) -> bool:
        """Is a pod to be nominated now?"""
        if now_s < self._rests_until_s:
            return False
        while self._in_turn and now_s - self._in_turn[0][0] > KNOWN_S:
            self._in_turn.popleft()
        if len(self._in_turn) < SAMPLES:
            return False
        in_turn_s = _median(self._in_turn)
        if len(self._nominated) < SAMPLES:
            return in_turn_s >= SLOW_S
        if _median(self._nominated) < GAIN * in_turn_s:
            return True
        self._in_turn.clear()
        self._nominated.clear()
        self._rests_until_s = now_s + REST_S
        return False


def _median(samples: deque[tuple[float, float]]) -> float:
    """The upper one of two."""
    return sorted(took_s for _, took_s in samples)[len(samples) // 2]
