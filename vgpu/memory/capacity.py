"""How much memory of a GPU its containers can have together: all but what others use, such as the copier's context or a display server.

NVML counts the processes of a container that ends a moment before it counts their memory as free. So only memory that stays in use counts as others'.
"""

from __future__ import annotations

from collections import deque
from typing import Final

READINGS: Final = 3
"""Readings, of one second each, in which memory must be in use by others. Guessed: the driver frees the memory of a process well within a second."""


class GpuCapacity:
    """The capacity of one GPU. Bytes."""

    def __init__(self) -> None:
        self._others: deque[int] = deque(maxlen=READINGS)

    def read(self, usable_bytes: int, used_bytes: int, containers_bytes: int) -> int:
        """The capacity after a reading of NVML. `usable_bytes`: without what the driver reserves; `containers_bytes`: listed for processes of containers."""
        self._others.append(max(0, used_bytes - containers_bytes))
        return usable_bytes - min(self._others)
