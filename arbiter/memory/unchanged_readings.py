"""Which readings of NVML tell a container nothing new: nearly all, on a node at rest.

What a reading does to a container depends on what was read, on what its processes said, and on the readings just before. Where all of it has
been the same for some readings, one more changes nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

from arbiter.memory.meter import Reading

SETTLED: Final = 5
"""After so many readings alike a measure stays as it is: it needs those of 1.5 s without a word (`vgpu.memory.context`) and two for a lease."""


class Stillness:
    """Of one container."""

    def __init__(self) -> None:
        self._taken_s = -inf
        self._alike = 0

    def moved(self) -> None:
        """A process came, went or said something, or the limits are others."""
        self._alike = 0

    def lasts(self, reading: Reading, uuids: Iterable[str]) -> bool:
        """Is this reading of these GPUs one of many alike, with nothing said between them? Asked of each reading, in order."""
        alike = reading.before_s == self._taken_s and all(uuid in reading.unchanged for uuid in uuids)
        self._alike = self._alike + 1 if alike else 0
        self._taken_s = reading.at_s
        return self._alike > SETTLED
