"""Nobody is evicted again and again: a pod is spared for a while after it was preempted so many times.

A pod that comes back under its own name (of a StatefulSet, or made by hand) is known by it. Others come back under new names: they
are counted together by their controller, which may lose as many times more as it has pods. Counted in memory: an extender that was
started again has forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from kube.objects import Pod

TIMES: Final = 3
"""Preemptions of a pod within `PERIOD_S`. Guessed."""
PERIOD_S: Final = 3600.0

REMEMBERED: Final = 4096
"""Pods and controllers; the ones that were not preempted for longest are forgotten. Guessed."""


def identity(pod: Pod) -> str:
    """What a pod has in common with the one that takes its place."""
    owner = next((one for one in pod.metadata.owner_references if one.controller), None)
    return pod.key if owner is None or owner.kind == "StatefulSet" else owner.uid


class Starvation:
    """Who was preempted lately. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], *, times: int = TIMES, period_s: float = PERIOD_S) -> None:
        self._clock, self._times, self._period_s = clock, times, period_s
        self._when: dict[str, deque[float]] = {}

    def preempted(self, pod: Pod) -> None:
        """It has just been evicted for another."""
        known = self._when.pop(identity(pod), None) or deque()
        known.append(self._clock())
        self._when[identity(pod)] = known
        while len(self._when) > REMEMBERED:
            del self._when[next(iter(self._when))]

    def spared(self, pod: Pod, alike: Callable[[str], int]) -> bool:
        """Has it had enough? `alike` says how many pods there are with an identity, and is asked only when it matters."""
        one = identity(pod)
        known = self._when.get(one)
        if not known:
            return False
        while known and known[0] <= self._clock() - self._period_s:
            known.popleft()
        return len(known) >= self._times and len(known) >= self._times * max(1, alike(one))
