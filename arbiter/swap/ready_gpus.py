"""On which GPUs memory can be moved now, so that limits above guarantees apply there; and for which of them that is not known yet.

A copier is asked at the start, and answers within a moment. Until then nothing is said of its GPU: an arbiter that starts again would otherwise lower
the limits of what runs there, and raise them again. Nor is anything said of a GPU whose memory was not read yet: requests for its memory could not be decided.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from math import inf
from typing import Final

from arbiter.swap.host_pool import HostPool

ANSWERS_WITHIN_S: Final = 0.5
"""A copier that has not answered after so long is not ready. Guessed; a library waits for its limits for 1 s (specified: protocol.md)."""


class ReadyGpus:
    """See the module. `pools`: by GPU, the node's own; `read`: the GPUs of which it is known how much memory they have."""

    def __init__(self, pools: Mapping[str, HostPool], read: Container[str], clock: Callable[[], float]) -> None:
        self._pools, self._read, self._clock = pools, read, clock
        self._known: dict[str, bool] = {}
        """Of GPUs that are known -> whether they are ready."""
        self._until_s: dict[str, float] = {}
        """Until when the answer of the others is waited for."""
        self._changed: set[str] = set()

    def ready(self, gpu: str) -> bool:
        """Whether memory can be moved. No, while it is not known."""
        return self._known.get(gpu, False)

    def known(self, gpu: str) -> bool:
        """Whether a copier has answered, or there is none."""
        return gpu in self._known

    def changed(self) -> frozenset[str]:
        """The GPUs that became known, or ready, or no longer are, since the last call."""
        changed, self._changed = frozenset(self._changed), set()
        return changed

    def turn(self) -> None:
        """Note what the pools are."""
        now_s = self._clock()
        for gpu, pool in self._pools.items():
            known = pool.answered or now_s >= self._until_s.setdefault(gpu, now_s + ANSWERS_WITHIN_S)
            if known and not self._is_unread(gpu) and self._known.get(gpu) is not pool.ready:
                self._known[gpu] = pool.ready
                self._changed.add(gpu)

    def deadline_s(self) -> float:
        """When `turn` is due."""
        waiting = (gpu for gpu in self._until_s if gpu not in self._known and not self._is_unread(gpu))
        return min((self._until_s[gpu] for gpu in waiting), default=inf)

    def _is_unread(self, gpu: str) -> bool:
        return self._pools[gpu].ready and gpu not in self._read
