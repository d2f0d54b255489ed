"""When a declared MIG layout is checked anew: a check reads the kubelet's list and some 60 facts of NVML a GPU, so not while nothing can have changed. Pure.

Whatever a check depends on is compared in each round, but for what is expensive to read: processes on GPUs, instances that are half made, and what the kubelet
lists after a pod has left the API. So checks go on for a while after each change, and now and then without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SOON_S: Final = 10.0
"""After a change, each round is a check for so long: the kubelet gives the devices of a pod back after the pod is gone. Guessed."""
WAITING_S: Final = 10.0
"""Between checks of a layout that waits for a GPU to be free: a process that no pod has may have ended. Guessed."""
DONE_S: Final = 30.0
"""Between checks of a layout that is as declared: an instance that another program made half is seen by no other. Guessed."""


class Pace:
    """Of one node's checks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inputs: object = None
        self._changed_s = self._next_s = float("-inf")

    def due(self, inputs: object) -> bool:
        """Whether to check now. `inputs`: everything comparable that a check depends on."""
        now_s = self._clock()
        if inputs != self._inputs:
            self._inputs, self._changed_s = inputs, now_s
        return now_s - self._changed_s < SOON_S or now_s >= self._next_s

    def checked(self, rest_s: float) -> None:
        """A check ended. The next is due after so long, unless something changes."""
        self._next_s = self._clock() + rest_s
