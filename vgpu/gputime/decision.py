"""What the GPU-time scheduler (`vgpu.gputime.scheduler`) decides, and until when that is valid."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Decision:
    """Who is to be on. Everybody else is to be off."""

    on: frozenset[str]
    again_s: dict[str, float]
    """GPU -> nothing changes for its containers before then, unless an event comes or another GPU's time does; inf or none = never."""
    why: dict[str, str]
    """One word or two for each container, for traces and people."""

    @property
    def decide_again_s(self) -> float:
        """The earliest of these; inf = never."""
        return min(self.again_s.values(), default=inf)
