"""The decision of the GPU-time scheduler (`vgpu.gputime.scheduler`), and until when it is valid."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Decision:
    """The containers that are to run. All others are to be suspended."""

    on: frozenset[str]
    again_s: dict[str, float]
    """GPU -> when its containers need the next decision, unless an event or another GPU's time comes first; inf or missing = never."""
    why: dict[str, str]
    """The reason for each container, in one or two words, for traces and operators."""

    @property
    def decide_again_s(self) -> float:
        """The earliest of these; inf = never."""
        return min(self.again_s.values(), default=inf)
