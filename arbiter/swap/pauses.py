"""How long each container was paused for its memory, and how often it was swapped. It counts and decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

from arbiter.gputime.blocks import BlockStatus
from arbiter.swap.container_host import Blocking

Direction = Literal["out", "in"]


class Pauses:
    """`arbiter.gputime.blocks.Blocks`, with the times of each block."""

    def __init__(self, blocks: Blocking, clock: Callable[[], float]) -> None:
        self._blocks, self._clock = blocks, clock
        self._since_s: dict[str, float] = {}
        self._ended_s: Counter[str] = Counter()
        """Of the pauses that have ended. Seconds, by container."""

    def begin(self, name: str) -> None:
        """Nothing of it runs from now on."""
        self._since_s.setdefault(name, self._clock())
        self._blocks.begin(name)

    def end(self, name: str) -> None:
        """It may run."""
        if (since_s := self._since_s.pop(name, None)) is not None:
            self._ended_s[name] += self._clock() - since_s  # type: ignore[assignment]
        self._blocks.end(name)

    def status(self, name: str) -> BlockStatus:
        """How far its suspend is."""
        return self._blocks.status(name)

    def present_s(self, name: str) -> float:
        """How long its present pause has lasted; 0 = it is not paused."""
        return self._clock() - self._since_s[name] if name in self._since_s else 0.0

    def total_s(self, name: str) -> float:
        """All its pauses, in seconds."""
        return self._ended_s[name] + self.present_s(name)

    def forget(self, name: str) -> None:
        """The container is gone."""
        self._since_s.pop(name, None)
        del self._ended_s[name]


class SwapCounts:
    """Orders of the policy, since the arbiter's start."""

    def __init__(self) -> None:
        self.swaps: Counter[tuple[str, Direction]] = Counter()
        """By container and direction."""

    def forget(self, name: str) -> None:
        """The container is gone."""
        for direction in ("out", "in"):
            self.swaps.pop((name, direction), None)
